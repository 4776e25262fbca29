"""How the KV that one link sends is cut into frames: those of a whole step, each as soon as its layers are computed.

Called by the link's sender with what the worker computed. Only here is known what a frame is on this link: of which shard, in
which format, how large.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvmesh.kv.layout import Piece, Shard, WireName, layers_per_frame, plan_shards
from kvmesh.protocol.ids import RoomId
from kvmesh.protocol.sending import Computed


class Cutter:
    """Spans in, as their layers are computed; pieces out, each once."""

    def __init__(self, shards: Sequence[Shard], wire: WireName, frame_bytes: int) -> None:
        """Args:
        shards: what the stage sends: its layers, all of its heads in one shard or several.
        wire: the format they travel in.
        frame_bytes: payload that a frame aims at.
        """
        self._shards, self._wire, self._frame_bytes = tuple(shards), wire, frame_bytes
        self._begins: dict[tuple[RoomId, int], list[int]] = {}
        """Of spans whose step still computes, by their first token: of each shard, the first layer that was not cut."""

    def cut(self, span: Computed) -> list[Piece]:
        """What of a span can be sent now and could not before: what fills frames; all of it once all layers are computed."""
        at = (span.room, span.begin)
        begins = self._begins.pop(at, None) or [shard.layer_begin for shard in self._shards]
        ends = [self._end(shard, begin, span) for shard, begin in zip(self._shards, begins, strict=True)]
        if span.layers_end is not None:
            self._begins[at] = ends
        ready = [
            replace(shard, layer_begin=begin, layer_end=end)
            for shard, begin, end in zip(self._shards, begins, ends, strict=True)
        ]
        return plan_shards(ready, span.begin, span.end, self._frame_bytes, self._wire)

    def _end(self, shard: Shard, begin: int, span: Computed) -> int:
        """Up to which layer, from `begin` on, a shard can be cut."""
        if span.layers_end is None or span.layers_end >= shard.layer_end:
            return shard.layer_end
        full = layers_per_frame(shard, span.end - span.begin, self._frame_bytes, self._wire)
        return begin + (span.layers_end - begin) // full * full
