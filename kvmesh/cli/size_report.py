"""The answer of `kvmesh size`, as tables and as JSON."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table

from kvmesh.sizing.given import Given
from kvmesh.sizing.outlook import Gauge, Outlook
from kvmesh.sizing.plan import Signs


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was found."""

    given: Given
    pipelines: int
    decoders: int
    outlook: Outlook
    highest_rate: float
    """Requests a second that this mesh bears."""
    full_first: list[Gauge]
    """What is over its limit just above that."""
    signs: Signs
    taken: tuple[str, ...]
    """Flags that were measured."""


def drawn(answer: Answer) -> RenderableType:
    """The answer for people."""
    return Group(*_lines(answer))


def _lines(answer: Answer) -> Iterator[RenderableType]:
    found, given = answer.outlook, answer.given
    if answer.taken:
        yield f"measured: {' '.join(answer.taken)}\n"
    verdict = "" if found.holds else ": too much"
    yield (
        f"{_many(answer.pipelines, 'pipeline')} of {_many(given.num_stages, 'stage')} and"
        f" {_many(answer.decoders, 'decoder')} at {_figure(found.rate)} requests/s{verdict}"
    )
    yield (
        f"prompts of {_figure(given.prompt.mean)} tokens (95 % within {_figure(given.prompt.p95)}),"
        f" answers of {_figure(given.output_tokens)} (at most {given.max_output_tokens})\n"
    )
    yield _gauges(found)
    parts = " + ".join(f"{name} {_figure(seconds)}" for name, seconds in found.first_token_parts.items())
    yield f"\nfirst token, mean {_figure(found.first_token_mean)} s = {parts}"
    yield f"token gap, mean {_figure(found.token_gap_mean)} s\n"
    first = "; ".join(f"{gauge.name} (add a {gauge.cure})" for gauge in answer.full_first)
    yield _watched(answer)
    first = "; ".join(f"{gauge.name}: add a {gauge.cure}" for gauge in answer.full_first)
    yield f"\nbears up to {_figure(answer.highest_rate)} requests/s; what is full first: {first}"


def _watched(answer: Answer) -> Table:
    found, signs, pages = answer.outlook, answer.signs, answer.given.decoder_pages
    table = Table("what to watch, means of each", box=SIMPLE, show_edge=False, pad_edge=False)
    for column in ("expected", "add one above"):
        table.add_column(column, justify="right")
    for name, expected, above, unit in (
        (
            "kvmesh_queued_prefill_seconds of pipelines",
            found.queued_prefill_seconds,
            signs.queued_prefill_seconds,
            " s",
        ),
        ("kvmesh_pages in use of decoders", 100 * found.pages / pages, 100 * signs.pages, " %"),
        ("kvmesh_rooms_running of decoders", found.rooms, signs.rooms, ""),
    ):
        table.add_row(name, f"{_figure(expected)}{unit}", f"{_figure(above)}{unit}")
    return table


def _gauges(found: Outlook) -> Table:
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    table.add_column("what may be full")
    for column in ("expected", "limit", "used"):
        table.add_column(column, justify="right")
    for gauge in found.gauges:
        if math.isfinite(gauge.limit):
            table.add_row(
                gauge.name,
                f"{_figure(gauge.expected)} {gauge.unit}",
                f"{_figure(gauge.limit)} {gauge.unit}",
                f"{_figure(100 * gauge.used)} %",
                style=None if gauge.holds else "red",
            )
    return table


def as_json(answer: Answer) -> dict[str, Any]:
    """The answer for programs: units end the names; null is infinite, or has no limit."""
    found = answer.outlook
    return {
        "pipelines": answer.pipelines,
        "stages": answer.given.num_stages,
        "decoders": answer.decoders,
        "rate": found.rate,
        "holds": found.holds,
        "highest_rate": answer.highest_rate,
        "full_first": [{"name": gauge.name, "add": gauge.cure} for gauge in answer.full_first],
        "gauges": [
            {
                "name": gauge.name,
                "expected": _finite(gauge.expected),
                "limit": _finite(gauge.limit),
                "unit": gauge.unit,
                "holds": gauge.holds,
            }
            for gauge in found.gauges
        ],
        "first_token_parts_seconds": {name: _finite(seconds) for name, seconds in found.first_token_parts.items()},
        "first_token_mean_seconds": _finite(found.first_token_mean),
        "first_token_p95_seconds": _finite(found.first_token_p95),
        "token_gap_mean_seconds": _finite(found.token_gap_mean),
        "token_gap_p95_seconds": _finite(found.token_gap_p95),
        "queued_prefill_seconds": _finite(found.queued_prefill_seconds),
        "decoder_pages_ratio": _finite(found.pages / answer.given.decoder_pages),
        "decoder_rooms": _finite(found.rooms),
        "add_pipeline_above_queued_prefill_seconds": answer.signs.queued_prefill_seconds,
        "add_decoder_above_pages_ratio": answer.signs.pages,
        "add_decoder_above_rooms": answer.signs.rooms,
        "measured": list(answer.taken),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _figure(value: float) -> str:
    """Three digits, or all of those before the point."""
    if math.isinf(value):
        return "∞"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
