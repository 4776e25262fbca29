"""The story of a run that went wrong: what concerns the rooms, requests or generations that a violation names."""

from collections.abc import Iterator

from simulator.violation import Violation
from simulator.witness import Witness

MOST_LINES = 80
"""Of a story; the latest count."""
ALWAYS = ("fault:", "is gone", "is up", "its life is over")


def story(witness: Witness, violation: Violation) -> Iterator[str]:
    """One line for each thing that happened."""
    keys = set(violation.keys)
    lines = [
        f"{time:9.4f}  {name:<14} {text}"
        for time, name, text, about in witness.notes
        if text.startswith(ALWAYS)
        or (keys & set(about) if keys else "Heartbeat" not in text and "Progress" not in text)
    ]
    if len(lines) > MOST_LINES:
        yield f"… {len(lines) - MOST_LINES} lines before"
    yield from lines[-MOST_LINES:]
