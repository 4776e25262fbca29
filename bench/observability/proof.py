"""Whether a run was recorded where all was on, and left no trace where all was off. Called by the pairs after each run."""

from collections.abc import Mapping
from dataclasses import dataclass

from bench.observability.pages import Page

LAST_SPANS = {"gateway": "request", "bootstrap": "assign room", "decode": "room at decoder", "prefill": "prefill"}
"""What each service keeps of a room once all that matters of it is over there."""
MOVING = {
    "gateway": "kvmesh_output_tokens_count",
    "bootstrap": "kvmesh_rooms_minted_total",
    "decode": "kvmesh_decode_tokens_total",
    "prefill": "kvmesh_prefill_tokens_total",
}
"""A series of each service that no room leaves as it was."""
BY_THEMSELVES = frozenset({"kvmesh_loop_lag_seconds", "kvmesh_log_age_seconds"})
"""Worked out when a page is read: they record nothing."""


class NotSwitched(Exception):
    """A process recorded where it was off, or did not where it was on: the figure would not be what it says."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one process shows of a run: its page before and after, and the spans it kept of the room that passed by."""

    process: str
    service: str
    before: Page
    after: Page
    spans: Mapping[str, int]
    """How many, by name."""

    def recorded(self) -> list[str]:
        """What it recorded: nothing, where it was off."""
        moved = {series for series, _ in self.before.items() ^ self.after.items()} - BY_THEMSELVES
        return [f"{self.process}: {what}" for what in (*sorted(moved), *map(_span, self.spans))]

    def missing(self) -> list[str]:
        """What it did not record, or not yet: nothing, where it was on and the room is over."""
        series, span = MOVING[self.service], LAST_SPANS[self.service]
        missing = [] if self.after.get(series, 0.0) > self.before.get(series, 0.0) else [series]
        missing += [] if span in self.spans else [_span(span)]
        return [f"{self.process}: {what}" for what in missing]


def _span(name: str) -> str:
    return f"a span {name!r}"
