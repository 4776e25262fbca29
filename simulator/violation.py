"""An invariant of docs/protocol.md §5 that is broken. Raised by the witness, at the act that breaks it, and at rest."""


class Violation(AssertionError):
    """An invariant is broken."""

    def __init__(self, invariant: int, message: str, *keys: int) -> None:
        super().__init__(f"invariant {invariant}: {message}")
        self.invariant = invariant
        self.keys = keys
        """Rooms, requests or generations concerned: what to look for in the timeline."""
