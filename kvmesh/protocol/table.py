"""A lifecycle as a table: (state, event) → next state and what it asks for.

Every lifecycle of the protocol is one `Table`, read by everyone and stepped through one method. Late and repeated events
stand in the table; an event without a row raises and changes nothing.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from kvmesh.errors import Fault

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)
Ask = TypeVar("Ask", bound=Enum)


class Table(Generic[State, Event, Ask]):
    """An immutable transition table."""

    def __init__(self, name: str, rows: Mapping[tuple[State, Event], tuple[State, tuple[Ask, ...]]]) -> None:
        """Args:
        name: of the lifecycle, for messages.
        rows: the whole table.
        """
        self.name = name
        self.rows = dict(rows)

    def step(self, state: State, event: Event) -> tuple[State, tuple[Ask, ...]]:
        """The row of `state` and `event`.

        Raises:
            Fault: there is no such row; the caller's state is as it was.
        """
        row = self.rows.get((state, event))
        if row is None:
            raise Fault(f"{self.name}: {event.value} cannot happen while {state.value}", reason="no_transition")
        return row

    def drawn(self) -> str:
        """The table as Markdown, for the docs."""
        lines = ["| state | event | next | asks |", "|---|---|---|---|"]
        for (state, event), (after, asks) in self.rows.items():
            lines.append(
                f"| {state.value} | {event.value} | {after.value} | {', '.join(a.value for a in asks) or '-'} |"
            )
        return "\n".join(lines)
