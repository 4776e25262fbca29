"""What a piece of KV is: number formats, shards (layers x heads), pages, and how a range of tokens is cut into frames.

Torch-free. The services compare shards when they pair, the pool and the frames are laid out by them, and links
plan with `plan_shards` what they send. Nothing here knows a room, a link or a tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeGuard

from kvmesh.errors import Misfit

DTypeName = Literal["fp32", "bf16", "fp16"]
"""Number formats of weights, activations and KV."""

DTYPE_BYTES: dict[DTypeName, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Width of one number; the keys are all formats there are."""

WireName = Literal["fp32", "bf16", "fp16", "int8", "fp8"]
"""Formats in which KV travels: those of memory, and two that are quantised (`kvmesh.kv.wire`)."""

WIRE_BYTES: dict[WireName, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}
"""Width of one number in a frame; the keys are all formats there are."""

SCALE_BYTES = 4
"""A scale is fp32."""

BLOCK_TOKENS = 1
"""Tokens of one head that share a scale where this build quantises: docs/kv-wire.md has the choice. A frame says its own."""

FRAME_BYTES = 2 << 20
"""Payload a KV frame aims at on a stream. A frame has a cost beside its bytes: of frames of 1 MiB gRPC moves 0.85 times as
much. With larger ones it gains nothing, and the tail of a transfer is a frame."""


def is_wire(name: str) -> TypeGuard[WireName]:
    """Whether `name` is a format in which KV can travel."""
    return name in WIRE_BYTES


def is_dtype(wire: str) -> TypeGuard[DTypeName]:
    """Whether `wire` is a format of memory, too."""
    return wire in DTYPE_BYTES


def is_quantised(wire: WireName | None) -> bool:
    """Whether a format travels with scales."""
    return wire in ("int8", "fp8")


def wire_between(stage: DTypeName, decoder: DTypeName, asked: str = "auto") -> WireName:
    """What a stage sends a decoder: the quantised format the decoder asks for, else the narrower of the two formats.

    Of two that are equally wide the stage's own, so that it copies and the decoder casts.

    Args:
        asked: the decoder's `kv_wire`: "auto", "int8" or "fp8".

    Raises:
        Misfit: it asks for anything else.
    """
    if asked == "auto":
        return decoder if DTYPE_BYTES[decoder] < DTYPE_BYTES[stage] else stage
    if not is_wire(asked) or not is_quantised(asked):
        raise Misfit(f"kv_wire: decoder asks for {asked}, what can be asked for is auto, int8 or fp8")
    return asked


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of each token's KV that one member holds or sends: layers [begin, end) x KV heads [begin, end)."""

    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int
    head_dim: int
    dtype: DTypeName

    @property
    def num_layers(self) -> int:
        """Layers held."""
        return self.layer_end - self.layer_begin

    @property
    def num_heads(self) -> int:
        """KV heads held."""
        return self.head_end - self.head_begin

    @property
    def layer_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.num_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers held."""
        return self.num_layers * self.layer_bytes_per_token


class Piece(NamedTuple):
    """What one frame carries: layers [layer_begin, layer_end) of tokens [token_begin, token_end), of some heads."""

    layer_begin: int
    layer_end: int
    token_begin: int
    token_end: int
    heads: tuple[int, int] | None = None
    """KV heads, half-open; None: all that the pool holds."""
    wire: WireName | None = None
    """Format it travels in; None: the pool's own."""


def payload_bytes(
    wire: WireName,
    num_layers: int,
    num_heads: int,
    num_tokens: int,
    head_dim: int,
    block_tokens: int = BLOCK_TOKENS,
) -> int:
    """Bytes of a KV payload: the numbers and, where the format is quantised, a scale for each block of each head."""
    rows = num_layers * 2 * num_heads
    num_scales = -(-num_tokens // block_tokens) if is_quantised(wire) else 0
    return rows * (num_tokens * head_dim * WIRE_BYTES[wire] + num_scales * SCALE_BYTES)


def tokens_per_frame(shard: Shard, frame_bytes: int = FRAME_BYTES, wire: WireName | None = None) -> int:
    """Tokens of one layer that fit a frame of `frame_bytes`, at least 1."""
    form = wire or shard.dtype
    block = BLOCK_TOKENS if is_quantised(form) else 1
    block_bytes = payload_bytes(form, 1, shard.num_heads, block, shard.head_dim)
    blocks, rest = divmod(frame_bytes, block_bytes)
    # What is left over holds part of a block, whose scale is as large as a whole one's.
    rest -= 2 * shard.num_heads * SCALE_BYTES if is_quantised(form) else 0
    token_bytes = 2 * shard.num_heads * shard.head_dim * WIRE_BYTES[form]
    return max(1, blocks * block + max(0, rest) // token_bytes)


def layers_per_frame(
    shard: Shard, num_tokens: int, frame_bytes: int = FRAME_BYTES, wire: WireName | None = None
) -> int:
    """Layers of so many tokens that fit a frame of `frame_bytes`, at least 1."""
    layer_bytes = payload_bytes(wire or shard.dtype, 1, shard.num_heads, num_tokens, shard.head_dim)
    return max(1, frame_bytes // layer_bytes)


def plan_frames(
    shard: Shard, token_begin: int, token_end: int, frame_bytes: int = FRAME_BYTES, wire: WireName | None = None
) -> list[Piece]:
    """Cut [token_begin, token_end) of `shard` into pieces of at most `frame_bytes` (one token of one layer at least).

    As many layers as fit go into one piece; the tokens of a layer are split only when one layer alone is too large.
    The pieces tile layers x tokens exactly, by layer first, so they can be sent in the order the layers are computed.

    Args:
        frame_bytes: payload as it travels, scales included.
        wire: format it travels in; None: the shard's.
    """
    num_tokens = token_end - token_begin
    if num_tokens <= 0 or shard.num_layers <= 0:
        return []
    form, heads = wire or shard.dtype, (shard.head_begin, shard.head_end)
    layers = layers_per_frame(shard, num_tokens, frame_bytes, form)
    # Equal shares, so that no sliver of a frame is left over.
    num_splits = -(-num_tokens // tokens_per_frame(shard, frame_bytes, form)) if layers == 1 else 1
    tokens = -(-num_tokens // num_splits)
    return [
        Piece(layer, min(layer + layers, shard.layer_end), token, min(token + tokens, token_end), heads, form)
        for layer in range(shard.layer_begin, shard.layer_end, layers)
        for token in range(token_begin, token_end, tokens)
    ]


def plan_shards(
    shards: Sequence[Shard],
    token_begin: int,
    token_end: int,
    frame_bytes: int = FRAME_BYTES,
    wire: WireName | None = None,
) -> list[Piece]:
    """`plan_frames` of all the shards that one stage sends, those of early layers first."""
    pieces = [p for shard in shards for p in plan_frames(shard, token_begin, token_end, frame_bytes, wire)]
    return sorted(pieces, key=lambda piece: piece.layer_end)


class Run(NamedTuple):
    """Tokens [token_begin, token_begin + num_tokens) of a room in adjacent slots from `slot_begin` on."""

    slot_begin: int
    token_begin: int
    num_tokens: int


def runs(pages: Sequence[int], page_size: int, begin: int, end: int) -> Iterator[Run]:
    """The tokens [begin, end) of a room as the fewest runs of adjacent slots; token t lies in pages[t // page_size].

    Raises:
        IndexError: `pages` does not reach `end`.
    """
    token = begin
    while token < end:
        index = token // page_size
        slot = pages[index] * page_size + token % page_size
        stop = min(end, (index + 1) * page_size)
        while stop < end and pages[stop // page_size] == pages[stop // page_size - 1] + 1:
            stop = min(end, stop + page_size)
        yield Run(slot, token, stop - token)
        token = stop
