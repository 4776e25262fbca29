"""Tokens to text, piece by piece: no piece splits a character, and all pieces joined are the whole text.

Called by the gateway, one for each request. A piece is what a window of tokens says beyond what its beginning said, held back
while it ends inside a character.
"""

from collections.abc import Sequence

from kvmesh.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_HELD = 8
"""Tokens a character may be spread over; bytes that are still no character then are shown as they are, replaced."""


class IncrementalDetokenizer:
    """The text of one growing sequence of tokens; the cost of a token does not grow with it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._said = 0
        """Tokens of the window whose text is out; they stay as context, since a decoder looks at the token before."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete; empty while a character is unfinished."""
        self._window += ids
        before = self._tokenizer.decode(self._window[: self._said])
        now = self._tokenizer.decode(self._window)
        unfinished = now.endswith(_REPLACEMENT) and len(self._window) - self._said <= _LONGEST_HELD
        if unfinished or len(now) < len(before):
            return ""
        return self._advance(now[len(before) :])

    def flush(self) -> str:
        """What is held back, at the end."""
        before = self._tokenizer.decode(self._window[: self._said])
        return self._advance(self._tokenizer.decode(self._window)[len(before) :])

    def _advance(self, piece: str) -> str:
        self._window = self._window[self._said :] if piece else self._window
        self._said = len(self._window)
        return piece
