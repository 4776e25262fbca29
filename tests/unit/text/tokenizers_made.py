"""Small tokenizers of both kinds, made in memory. Used by the tests of kvmesh.text."""

from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers, pre_tokenizers

from kvmesh.text.tokenizer import Tokenizer

SPECIALS = ("<|end|>", "<|bos|>")
BYTES = 256


def byte_inner() -> Inner:
    """Ids 0 to 255 are the bytes in order; then the specials."""
    inner = Inner(models.BPE(vocab=dict(zip(letters(), range(BYTES), strict=True)), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIALS))
    inner.add_tokens(["<think>", "日-token"])
    return inner


def byte_tokenizer(*, add_bos: bool = False) -> Tokenizer:
    return Tokenizer(byte_inner(), vocab_size=300, bos_id=257, add_bos=add_bos)


def sentencepiece_inner() -> Inner:
    """<unk>, <s>, </s>, 256 bytes, then some pieces."""
    pieces = ["▁", "a", "b", "c", "▁a", "é", "▁▁", "日"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(BYTES)), *pieces]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocab, merges=[("▁", "a"), ("▁", "▁")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    inner = Inner(model)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return inner


def sentencepiece_tokenizer() -> Tokenizer:
    inner = sentencepiece_inner()
    return Tokenizer(inner, vocab_size=inner.get_vocab_size(), bos_id=1, add_bos=True)


def letters() -> list[str]:
    """How a byte-level vocabulary spells each byte: as itself where that can be printed, else as U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(BYTES)]
