"""The tokenizer inside a GGUF, as a tokenizer.json: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

Called by `kvmesh.model.gguf`. A GGUF keeps vocabulary and merges and only *names* how text is cut before merging; what each
name means is known here, after the models' own tokenizers. A name that is not known is refused: cutting otherwise would
give other tokens, silently.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvmesh.errors import BadConfig

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_SPACE = "\u2581"  # how SentencePiece spells a space
_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Name in tokenizer_config.json → name in `tokenizer.ggml.<name>_token_id`."""
_ENDS = ("eos", "eot", "eom")
"""Tokens that end an answer: of text, of turn, of message; the same naming."""

# How text is cut. \p{L} letters, \p{N} numbers, \p{M} marks; alternatives are tried in the order they stand.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"


@dataclass(frozen=True, slots=True)
class Cut:
    """How one family of byte-level tokenizers treats text before merging."""

    pattern: str | None = None
    """Pieces; None: GPT-2's, which `tokenizers` has built in."""
    single_digits: bool = False
    """Each digit is a piece, before anything else is cut."""
    ignore_merges: bool = False
    """A piece that is a token as a whole is taken as such, whatever the merges say."""
    add_bos: bool = False
    """Begin-of-text before each prompt when the file does not say."""
    nfc: bool = False
    """Text is brought into Unicode's composed form first."""


_GPT2 = Cut()
_LLAMA3 = Cut(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", ignore_merges=True, add_bos=True)
_QWEN2 = Cut(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}", nfc=True)
_TEKKEN = Cut(rf"{_CASED_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}", ignore_merges=True, add_bos=True)
CUTS: Mapping[str, Cut] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": Cut(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
"""Value of `tokenizer.ggml.pre` → how its text is cut."""


class Header(Protocol):
    """What is read here of an opened GGUF."""

    path: Path

    def fact(self, key: str, kind: type, default: object = ...) -> Any:
        """One value; BadConfig when it is absent without a default, or of another kind."""


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A tokenizer, and what the file says beside it."""

    tokenizer_json: str
    special_tokens: Mapping[str, str]
    """bos_token, eos_token, unk_token, pad_token, as far as the file has them."""
    add_bos: bool
    bos_id: int | None
    pad_id: int | None
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: Sequence[str]
    kinds: Sequence[int]
    ids: Mapping[str, int]

    def of_kind(self, kind: int) -> list[str]:
        return [token for token, its in zip(self.tokens, self.kinds, strict=True) if its == kind]


def read_tokenizer(file: Header) -> GgufTokenizer:
    """Build the tokenizer that a GGUF's header describes.

    Raises:
        BadConfig: it is incomplete, contradictory or of a kind that is not supported.
    """
    vocabulary = _vocabulary(file)
    special = {name: _special_id(file, key, vocabulary) for name, key in _KEYS.items()}
    names = {name: vocabulary.tokens[i] for name, i in special.items() if i is not None}
    kind = file.fact("tokenizer.ggml.model", str)
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(vocabulary, file)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(vocabulary, file, names.get("unk_token", "<unk>")), True
    else:
        raise BadConfig(f"{file.path}: tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama")
    _add_tokens(tokenizer, vocabulary, names)
    bos, bos_id = names.get("bos_token"), special["bos_token"]
    add_bos = file.fact("tokenizer.ggml.add_bos_token", bool, add_bos) and bos is not None
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B:1"], special_tokens=[(bos, bos_id)]
        )
    ends = (_special_id(file, key, vocabulary) for key in _ENDS)
    return GgufTokenizer(
        tokenizer_json=tokenizer.to_str(),
        special_tokens=names,
        add_bos=add_bos,
        bos_id=bos_id,
        pad_id=special["pad_token"],
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
    )


def _vocabulary(file: Header) -> _Vocabulary:
    tokens = file.fact("tokenizer.ggml.tokens", list)
    kinds = file.fact("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise BadConfig(f"{file.path}: tokenizer.ggml.tokens is not a list of texts")
    if len(kinds) != len(tokens):
        raise BadConfig(f"{file.path}: {len(tokens)} tokens have {len(kinds)} token types")
    return _Vocabulary(tokens, kinds, {token: index for index, token in enumerate(tokens)})


def _special_id(file: Header, key: str, vocabulary: _Vocabulary) -> int | None:
    token_id = file.fact(f"tokenizer.ggml.{key}_token_id", int, None)
    if token_id is not None and not 0 <= token_id < len(vocabulary.tokens):
        raise BadConfig(f"{file.path}: tokenizer.ggml.{key}_token_id {token_id} is outside the vocabulary")
    return None if token_id is None else int(token_id)


def _byte_level(vocabulary: _Vocabulary, file: Header) -> tuple[Tokenizer, bool]:
    """GPT-2's kind, and whether its family starts prompts with begin-of-text."""
    name = file.fact("tokenizer.ggml.pre", str, "default")
    cut = CUTS.get(name)
    if cut is None:
        raise BadConfig(f"{file.path}: tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(CUTS)}")
    merges = [tuple(str(merge).split(" ")) for merge in file.fact("tokenizer.ggml.merges", list)]
    tokenizer = Tokenizer(_bpe(file, vocab=vocabulary.ids, merges=merges, ignore_merges=cut.ignore_merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.single_digits else []
    if cut.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if cut.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, cut.add_bos


def _sentencepiece(vocabulary: _Vocabulary, file: Header, unknown: str) -> Tokenizer:
    """Llama 2's kind: a space before each piece of text, unknown characters as bytes, merges by score."""
    if unknown not in vocabulary.ids:
        raise BadConfig(f"{file.path}: the vocabulary has no unknown token {unknown}")
    scores = file.fact("tokenizer.ggml.scores", list)
    if len(scores) != len(vocabulary.tokens):
        raise BadConfig(f"{file.path}: {len(vocabulary.tokens)} tokens have {len(scores)} scores")
    merges = _merges(vocabulary, scores)
    tokenizer = Tokenizer(
        _bpe(file, vocab=vocabulary.ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spell: list[Any] = [normalizers.Replace(" ", _SPACE)]
    read: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.fact("tokenizer.ggml.add_space_prefix", bool, True):
        spell.insert(0, normalizers.Prepend(_SPACE))
        read.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spell)
    tokenizer.decoder = decoders.Sequence(read)
    return tokenizer


def _merges(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, the best score first."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(vocabulary.tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary.ids and right in vocabulary.ids:
                found.append((score, len(left), len(right), left, right))
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _bpe(file: Header, **parts: Any) -> models.BPE:
    try:
        return models.BPE(**parts)
    # tokenizers raises plain Exception from its native part.
    except Exception as error:
        line = " ".join(str(error).split())[:200]
        raise BadConfig(f"{file.path}: vocabulary and merges do not fit: {line}") from None


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary, names: Mapping[str, str]) -> None:
    """Control tokens are matched whole and not shown; user-defined ones are matched whole and shown."""
    control = dict.fromkeys([*vocabulary.of_kind(_CONTROL), *names.values()])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    shown = [token for token in vocabulary.of_kind(_USER_DEFINED) if token not in control]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in shown])
