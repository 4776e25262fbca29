"""What memory gives: one thread copies big tensors, within the target's process. The source only says what was to come."""

from bench.kv_transfer import content
from bench.kv_transfer.ends import End
from bench.kv_transfer.rooms import Turn
from kvmesh.kv.pool import PagePool


class MemorySource(End):
    """Nothing to do."""

    async def carry(self, turn: Turn) -> None:
        """It is the target that copies."""


class MemoryTarget(End):
    """Copies from a pool of its own that was filled like the source's."""

    begins = True

    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool)
        self._source = content.make_pool(pool.num_pages)
        content.fill(self._source)
        self.bench_bytes = self._source.slots.nbytes

    async def carry(self, turn: Turn) -> None:  # noqa: ARG002  # all pages are some room's
        """A tensor a layer, of 16 MiB."""
        for target, source in zip(self.pool.slots, self._source.slots, strict=True):
            target.copy_(source)
