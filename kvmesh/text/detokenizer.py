"""Tokens to text, as they come: no piece splits a character, and all pieces joined are what decoding at once gives.

Called by the gateway, one for each request. Works on the bytes that tokens stand for, so the cost of a token does not grow
with the text, and nothing is decoded twice.
"""

import codecs
from collections.abc import Sequence

from kvmesh.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """The text of one growing sequence of tokens."""

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = False) -> None:
        """Args:
        continues: the tokens go on after a prompt, so a space they begin with is kept even where the tokenizer drops
            the first space of a text.
        """
        self._tokenizer = tokenizer
        self._spelling = tokenizer.spelling
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()
        """Byte tokens in a row, of a SentencePiece vocabulary: they are text only if all of them together are."""
        self._strip = self._spelling.strips_space and not continues

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete; empty while a character is unfinished."""
        text = ""
        for token in ids:
            spelled = self._tokenizer.shown(token)
            if spelled is not None:
                text += self._take(spelled)
        return self._stripped(text)

    def flush(self) -> str:
        """What is held back, at the end: bytes that are no character are replaced."""
        return self._stripped(self._settle() + self._characters.decode(b"", final=True))

    def _take(self, spelled: str) -> str:
        byte = self._spelling.byte_of(spelled)
        if byte is not None:
            self._run.append(byte)
            return ""
        return self._settle() + self._characters.decode(self._spelling.bytes_of(spelled))

    def _settle(self) -> str:
        """The run of byte tokens, over now."""
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        if not (self._strip and text):
            return text
        self._strip = False
        return text.removeprefix(" ")
