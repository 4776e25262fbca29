"""Text to token ids and back, by the model's own tokenizer. Called by the gateway; knows no request."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from kvmesh.errors import BadConfig
from kvmesh.model.files import ModelFiles
from kvmesh.text.spelling import Spelling


class Tokenizer:
    """One model's tokenizer. Safe to share between threads."""

    def __init__(self, inner: tokenizers.Tokenizer, *, vocab_size: int, bos_id: int | None, add_bos: bool) -> None:
        """Args:
        inner: as tokenizer.json describes it.
        vocab_size: of the model: ids below it are accepted, even those the tokenizer has no text for.
        add_bos: put `bos_id` before a plain prompt that does not begin with it.

        Raises:
            BadConfig: it decodes in a way that is not supported.
        """
        self._inner = inner
        self._bos_id = bos_id if add_bos else None
        self.vocab_size = vocab_size
        self.spelling = Spelling.of(inner)
        self._hidden = {i for i, token in inner.get_added_tokens_decoder().items() if token.special}
        self.longest_token_bytes = max(len(self.spelling.bytes_of(token)) for token in inner.get_vocab())
        """No token stands for more bytes of a prompt than this."""

    @classmethod
    def open(cls, files: ModelFiles) -> "Tokenizer":
        """The tokenizer of a model.

        Raises:
            BadConfig: tokenizer.json is damaged or of a kind that is not supported.
        """
        inner = _load(files.tokenizer_path)
        try:
            return cls(inner, vocab_size=files.config.vocab_size, bos_id=files.bos_id, add_bos=files.add_bos)
        except BadConfig as error:
            raise BadConfig(f"{files.tokenizer_path}: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with what the model wants before it. Special tokens in the text count as such."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=True).ids
        if self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered conversation: its special tokens, the first included, are in the text already."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=True)
        return text

    def text_of(self, token: int) -> str | None:
        """How the vocabulary spells a token; None where it has none."""
        text: str | None = self._inner.id_to_token(token)
        return text

    def shown(self, token: int) -> str | None:
        """The same, and None too for a special token: what `decode` passes over."""
        return None if token in self._hidden else self.text_of(token)


def _load(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    # tokenizers raises plain Exception from its native part.
    except Exception as error:
        line = " ".join(str(error).split())[:200]
        raise BadConfig(f"{path} is not a usable tokenizer: {line}") from None
