"""Which KV of a step that still computes is told layer by layer, so that it leaves meanwhile and not after the whole step.

Kept by the stage's worker, for the step it is in. Whether a frame is full, the link knows. Touches no page.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvmesh.kv.layout import FRAME_BYTES, Shard
from kvmesh.protocol.sending import Computed


class Filling:
    """The spans of one step that are large enough for a frame, and the layers computed of them."""

    def __init__(self, spans: Sequence[Computed], shard: Shard) -> None:
        """Args:
        spans: what of the step is to be sent, all layers of it.
        shard: what the stage holds.
        """
        self._spans = [s for s in spans if (s.end - s.begin) * shard.bytes_per_token >= FRAME_BYTES]
        self._computed = shard.layer_begin

    def layer(self) -> tuple[Computed, ...]:
        """One more layer is computed. Returns what of these spans is now."""
        self._computed += 1
        return tuple(replace(span, layers_end=self._computed) for span in self._spans)
