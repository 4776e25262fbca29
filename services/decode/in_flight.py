"""The bound on KV that was read off links and not yet dealt with, over all links of a decoder.

At the bound nothing more is read: what stages send then waits in their streams, which are bounded by themselves, and stages
keep the rest in their pages. The window of each link bounds what one stage can hold of it. On the event loop; counts no cells
of segments, whose memory is there anyway.
"""

import asyncio


class InFlight:
    """Payload bytes that this process holds for its copier."""

    def __init__(self, limit_bytes: int) -> None:
        """Args:
        limit_bytes: overdrawn by at most one frame of each link.
        """
        self._limit = limit_bytes
        self._below = asyncio.Event()
        self._below.set()
        self.num_bytes = 0

    def took(self, num_bytes: int) -> None:
        """A frame was read."""
        self._change(num_bytes)

    def dealt(self, num_bytes: int) -> None:
        """A frame was written or dropped."""
        self._change(-num_bytes)

    async def below_limit(self) -> None:
        """Waits until another frame may be read."""
        await self._below.wait()

    def _change(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes < self._limit:
            self._below.set()
        else:
            self._below.clear()
