"""Text to token ids and back, by the model's own tokenizer. Called by the gateway; knows no request."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from kvmesh.errors import BadConfig
from kvmesh.model.files import ModelFiles


class Tokenizer:
    """One model's tokenizer."""

    def __init__(self, inner: tokenizers.Tokenizer, *, vocab_size: int, bos_id: int | None, add_bos: bool) -> None:
        """Args:
        inner: as tokenizer.json describes it.
        vocab_size: of the model: ids below it are accepted, even those the tokenizer has no text for.
        add_bos: put `bos_id` before a plain prompt that does not begin with it.
        """
        self._inner = inner
        self._bos_id = bos_id if add_bos else None
        self.vocab_size = vocab_size
        self.longest_token_bytes = max(len(token.encode()) for token in inner.get_vocab())
        """No token stands for more bytes of text: byte-level tokens spell a byte as one character or more."""

    @classmethod
    def open(cls, files: ModelFiles) -> "Tokenizer":
        """The tokenizer of a model.

        Raises:
            BadConfig: tokenizer.json is damaged.
        """
        inner = _load(files.tokenizer_path)
        return cls(inner, vocab_size=files.config.vocab_size, bos_id=files.bos_id, add_bos=files.add_bos)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with what the model wants before it."""
        ids = self._inner.encode(text, add_special_tokens=True).ids
        if self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered conversation: its special tokens are in the text already."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def text_of(self, token: int) -> str | None:
        """How the vocabulary spells a token; None where it has none."""
        return self._inner.id_to_token(token)


def _load(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise BadConfig(f"{path} is not a usable tokenizer: {error}") from error
