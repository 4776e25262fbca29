"""How a vocabulary spells text: which bytes a token stands for, and how bytes become text again.

Used by `Tokenizer` and `IncrementalDetokenizer`. There are two ways: byte-level vocabularies spell each byte as one character
of an alphabet (GPT-2's); SentencePiece vocabularies spell text as it is, a space as "▁", and what they lack as byte tokens
"<0x0A>". Which one, a tokenizer.json says by its decoder.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import tokenizers

from kvmesh.errors import BadConfig

_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _alphabet() -> dict[str, int]:
    """Character → byte: printable characters of Latin-1 stand for themselves, the other bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_ALPHABET = _alphabet()


@dataclass(frozen=True, slots=True)
class Spelling:
    """One of the two ways."""

    byte_level: bool
    strips_space: bool = False
    """The first space of a text is not part of it: encoding has put it there. Only without `byte_level`."""

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> "Spelling":
        """Read from a tokenizer's decoder.

        Raises:
            BadConfig: it is of neither kind.
        """
        steps = _decoder_steps(tokenizer)
        types = [step["type"] for step in steps]
        if "ByteLevel" in types and set(types) <= {"ByteLevel", "Fuse"}:
            return cls(byte_level=True)
        if "ByteFallback" in types and all(_is_sentencepiece(step) for step in steps):
            return cls(byte_level=False, strips_space="Strip" in types)
        raise BadConfig(f"a tokenizer that decodes by {', '.join(types) or 'nothing'} is not supported")

    def byte_of(self, token: str) -> int | None:
        """The byte a SentencePiece byte token stands for; None for any other token."""
        found = None if self.byte_level else _BYTE_TOKEN.fullmatch(token)
        return None if found is None else int(found[1], 16)

    def bytes_of(self, token: str) -> bytes:
        """What any other token stands for, in UTF-8; of a byte-level vocabulary maybe a part of a character."""
        if not self.byte_level:
            return token.replace(_SPACE, " ").encode()
        try:
            return bytes(_ALPHABET[character] for character in token)
        except KeyError:  # an added token, spelled as it is
            return token.encode()


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _is_sentencepiece(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return (step["pattern"], step["content"]) == ({"String": _SPACE}, " ")
    if step["type"] == "Strip":
        return (step["content"], step["start"], step["stop"]) == (" ", 1, 0)
    return step["type"] in ("ByteFallback", "Fuse")
