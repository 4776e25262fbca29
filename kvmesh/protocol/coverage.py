"""What of a room's KV has arrived: the decoder's completion by plan.

Every stage of a pairing sends [cached_len, prompt_len) of its shard exactly once, in pieces of its choice and in any order
across stages. A stage may send its heads in several shards, each of which is planned. Coverage counts them per shard and
layer. Called by the decoder's copier, at the write.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvmesh.errors import Corrupt, Misfit
from kvmesh.protocol.ids import Rank


@dataclass(frozen=True, slots=True)
class ShardSpan:
    """Layers × KV heads: a shard that one stage sends, or a part of its layers; half-open ranges of global ids."""

    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int


class Arrival(Enum):
    """What a piece is to the plan."""

    NEW = "new"
    """Write it."""
    REPEAT = "repeat"
    """All of it came before: count it, don't write it."""


def check_tiling(shards: Sequence[ShardSpan], num_layers: int, num_heads: int) -> None:
    """Checks that shards hold each (layer, head) of a model exactly once.

    Raises:
        Misfit: a gap or an overlap, named.
    """
    for layer in range(num_layers):
        heads = sorted((s.head_begin, s.head_end) for s in shards if s.layer_begin <= layer < s.layer_end)
        covered = 0
        for begin, end in heads:
            if begin != covered:
                what = "is sent twice" if begin < covered else "is not sent"
                raise Misfit(f"layer {layer}: head {min(begin, covered)} {what} (shards send heads {heads})")
            covered = end
        if covered != num_heads:
            raise Misfit(f"layer {layer}: shards send heads {heads}, the decoder holds [0, {num_heads})")
    for shard in shards:
        if not 0 <= shard.layer_begin < shard.layer_end <= num_layers:
            raise Misfit(f"layers [{shard.layer_begin}, {shard.layer_end}) lie outside the model's {num_layers}")
        if shard.head_begin >= shard.head_end:
            raise Misfit(f"heads [{shard.head_begin}, {shard.head_end}) are none: they could never arrive")


class Spans:
    """A set of integers as sorted disjoint half-open ranges."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def overlap(self, begin: int, end: int) -> int:
        """How many of [begin, end) are in the set."""
        first = max(0, bisect_left(self._begins, begin) - 1)
        total = 0
        for b, e in zip(self._begins[first:], self._ends[first:], strict=True):
            if b >= end:
                break
            total += max(0, min(e, end) - max(b, begin))
        return total

    def add(self, begin: int, end: int) -> None:
        """Adds [begin, end), none of which is in the set."""
        at = bisect_left(self._begins, begin)
        if at > 0 and self._ends[at - 1] == begin:
            self._ends[at - 1] = end
            at -= 1
        else:
            self._begins.insert(at, begin)
            self._ends.insert(at, end)
        if at + 1 < len(self._begins) and self._begins[at + 1] == end:
            self._ends[at] = self._ends.pop(at + 1)
            del self._begins[at + 1]


class Coverage:
    """The plan of one room and what of it has arrived."""

    def __init__(self, shards: Mapping[Rank, Sequence[ShardSpan]], begin: int, end: int) -> None:
        """Args:
        shards: what each stage of the pairing sends; no two of one stage overlap.
        begin, end: token range of the plan: [cached_len, prompt_len).
        """
        self.begin, self.end = begin, end
        self._shards = {
            rank: [(s, [Spans() for _ in range(s.layer_begin, s.layer_end)]) for s in own]
            for rank, own in shards.items()
        }
        self._missing = sum(len(layers) for own in self._shards.values() for _, layers in own) * (end - begin)

    @property
    def complete(self) -> bool:
        """Whether everything planned has arrived."""
        return self._missing == 0

    def offer(self, rank: Rank, piece: ShardSpan, token_begin: int, token_end: int) -> Arrival:
        """Judges a piece; one that is new counts as arrived from here on, so the caller writes it.

        Raises:
            Corrupt: it lies outside the plan or the stage's shards, or overlaps in part what came before.
        """
        if rank not in self._shards:
            raise Corrupt(f"rank {rank} has no shard in this pairing", reason="outside_plan")
        layers = self._planned(rank, piece) if self.begin <= token_begin < token_end <= self.end else []
        if not layers:
            planned = ", ".join(_named(shard) for shard, _ in self._shards[rank])
            raise Corrupt(
                f"rank {rank} sent {_named(piece)} tokens [{token_begin}, {token_end}), "
                f"outside its plan of {planned} tokens [{self.begin}, {self.end})",
                reason="outside_plan",
            )
        there = sum(spans.overlap(token_begin, token_end) for spans in layers)
        size = len(layers) * (token_end - token_begin)
        if there == size:
            return Arrival.REPEAT
        if there:
            raise Corrupt(
                f"rank {rank} sent tokens [{token_begin}, {token_end}) again in part", reason="partial_overlap"
            )
        for spans in layers:
            spans.add(token_begin, token_end)
        self._missing -= size
        return Arrival.NEW

    def _planned(self, rank: Rank, piece: ShardSpan) -> list[Spans]:
        """The layers of a piece within the one shard whose heads are the piece's; empty: it lies in none."""
        for shard, layers in self._shards[rank]:
            if (piece.head_begin, piece.head_end) != (shard.head_begin, shard.head_end):
                continue
            if shard.layer_begin <= piece.layer_begin < piece.layer_end <= shard.layer_end:
                return layers[piece.layer_begin - shard.layer_begin : piece.layer_end - shard.layer_begin]
        return []


def _named(span: ShardSpan) -> str:
    return f"layers [{span.layer_begin}, {span.layer_end}) heads [{span.head_begin}, {span.head_end})"
