"""Which KV of a step that still computes fills frames already: so it leaves layer by layer, and not after the whole step.

Kept by the stage's worker, for the step it is in. The frames are those that the whole step would be cut into: what is told
early is told in whole frames, and what fills none comes with the end of the step. Touches no page, knows no link.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvmesh.kv.layout import Shard, layers_per_frame
from kvmesh.protocol.sending import Computed


class Filling:
    """The spans of one step and the layers computed of them."""

    def __init__(self, spans: Sequence[Computed], shard: Shard) -> None:
        """Args:
        spans: what of the step is to be sent, all layers of it.
        shard: what the stage holds.
        """
        self._spans, self._end = tuple(spans), shard.layer_end
        self._begins = [shard.layer_begin] * len(self._spans)
        """Of each span, the first layer that was not told."""
        self._steps = [layers_per_frame(shard, span.end - span.begin) for span in self._spans]
        self._computed = self._first = shard.layer_begin

    def layer(self) -> tuple[Computed, ...]:
        """One more layer is computed. Returns what fills a frame with it."""
        self._computed += 1
        full = [i for i, begin in enumerate(self._begins) if self._computed - begin == self._steps[i]]
        return tuple(self._tell(i, self._computed) for i in full)

    def rest(self) -> tuple[Computed, ...]:
        """Every layer is computed. Returns what was not told."""
        return tuple(self._tell(i, self._end) for i, begin in enumerate(self._begins) if begin < self._end)

    def _tell(self, i: int, end: int) -> Computed:
        begin, self._begins[i] = self._begins[i], end
        return (
            self._spans[i] if (begin, end) == (self._first, self._end) else replace(self._spans[i], layers=(begin, end))
        )
