"""Stop strings over a stream of text: the output ends before the first that is complete, wherever pieces are cut.

Called by the gateway, one for each request, behind the detokenizer.
"""

from collections.abc import Sequence


class StopStrings:
    """Passes text on, holding back what may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Args:
        stops: none empty.
        """
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is safe to show, and whether a stop string was reached: then this is the last of it."""
        text = self._held + text
        # The stop string that is complete first, as if characters came one by one; of two, the longer.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        shown = len(text) - keep
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """What is held back, at the end."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` and is not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
