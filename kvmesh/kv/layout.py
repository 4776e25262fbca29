"""What a piece of KV is: number formats, shards (layers x heads), pages, and how a range of tokens is cut into frames.

Torch-free. The services compare shards when they pair, the pool and the frames are laid out by them, and the worker
plans with `plan_frames` what it sends. Nothing here knows a room, a link or a tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

DTypeName = Literal["fp32", "bf16", "fp16"]
"""Number formats of weights, activations and KV."""

DTYPE_BYTES: dict[DTypeName, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Width of one number; the keys are all formats there are."""

FRAME_BYTES = 1 << 20
"""Payload a KV frame aims at: gRPC is fastest at 1 to 2 MiB, larger frames leave the cache."""


def is_exact_cast(source: DTypeName, target: DTypeName) -> bool:
    """Whether every number of `source` keeps its value in `target`: the same format, or into fp32."""
    return source == target or target == "fp32"


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
    """What one frame carries of a shard: layers [layer_begin, layer_end) of tokens [token_begin, token_end)."""

    layer_begin: int
    layer_end: int
    token_begin: int
    token_end: int


def tokens_per_frame(shard: Shard, frame_bytes: int = FRAME_BYTES) -> int:
    """Tokens of one layer that fit a frame of `frame_bytes`, at least 1."""
    return max(1, frame_bytes // shard.layer_bytes_per_token)


def layers_per_frame(shard: Shard, num_tokens: int, frame_bytes: int = FRAME_BYTES) -> int:
    """Layers of so many tokens that fit a frame of `frame_bytes`, at least 1."""
    return max(1, frame_bytes // (num_tokens * shard.layer_bytes_per_token))


def plan_frames(shard: Shard, token_begin: int, token_end: int, frame_bytes: int = FRAME_BYTES) -> list[Piece]:
    """Cut [token_begin, token_end) of `shard` into pieces of at most `frame_bytes` (one token of one layer at least).

    As many layers as fit go into one piece; the tokens of a layer are split only when one layer alone is too large.
    The pieces tile layers x tokens exactly, by layer first, so they can be sent in the order the layers are computed.
    """
    num_tokens = token_end - token_begin
    if num_tokens <= 0 or shard.num_layers <= 0:
        return []
    layers = layers_per_frame(shard, num_tokens, frame_bytes)
    # Equal shares, so that no sliver of a frame is left over.
    num_splits = -(-num_tokens // tokens_per_frame(shard, frame_bytes)) if layers == 1 else 1
    tokens = -(-num_tokens // num_splits)
    return [
        Piece(layer, min(layer + layers, shard.layer_end), token, min(token + tokens, token_end))
        for layer in range(shard.layer_begin, shard.layer_end, layers)
        for token in range(token_begin, token_end, tokens)
    ]


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
