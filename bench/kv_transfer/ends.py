"""What a path is to the bench: a source end and a target end, each made in its own process. Implemented by each path.

The order of calls: both `offer`, then both `meet` with what the other offered; for each round both `begin`, then the target and
the source `carry`. Only `carry` is measured. Their processes are killed in the end.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from bench.kv_transfer.content import slots_of_page
from bench.kv_transfer.rooms import Turn
from kvmesh.kv.pool import PagePool


class NotHere(Exception):
    """This machine or build has not what a path needs; the message says what."""


class End(ABC):
    """One end of a path, in the event loop of its process."""

    begins: ClassVar[bool] = False
    """Whether its `carry` is what begins a round: the source's, as a rule."""

    bench_bytes = 0
    """Memory that it holds for the bench and not for its path."""

    def __init__(self, pool: PagePool) -> None:
        """Raises:
        NotHere: what the path needs is missing.
        """
        self.pool = pool

    def page_of(self, page: int) -> Tensor:
        """Where it takes a page to lie: a view."""
        return slots_of_page(self.pool, page)

    async def offer(self) -> Any:
        """What the other end must know; picklable."""
        return None

    async def meet(self, offered: Any) -> None:  # noqa: B027  # most ends have nothing to do here
        """Connects."""

    async def begin(self, turn: Turn) -> None:  # noqa: B027
        """Gets to know what the next round moves: at the source, what to send; at the target, where it goes."""

    @abstractmethod
    async def carry(self, turn: Turn) -> None:
        """Carries all of it; returns once this end knows its part to be through: the target, that all lies in its pages."""
