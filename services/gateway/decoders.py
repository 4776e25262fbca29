"""Channels to decoders: one for each process that has rooms of ours, kept for the next while the mesh knows it.

Called by the attempts, and told of each picture of the mesh. A decoder that restarted at the same address is another.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from kvmesh.rpc.channels import dial
from kvmesh.v1.types_pb2 import Member

Key = tuple[str, int]
"""Address and incarnation."""


@dataclass(slots=True)
class _Dialled:
    channel: grpc.aio.Channel
    num_rooms: int = 0


class Decoders:
    """The channels of one gateway."""

    def __init__(self, watchdog_seconds: float) -> None:
        self._watchdog_seconds = watchdog_seconds
        self._dialled: dict[Key, _Dialled] = {}

    @contextmanager
    def use(self, decoder: Member) -> Iterator[grpc.aio.Channel]:
        """A channel for one room."""
        key = (decoder.address, decoder.incarnation)
        if key not in self._dialled:
            self._dialled[key] = _Dialled(dial(decoder.address, watchdog_seconds=self._watchdog_seconds))
        dialled = self._dialled[key]
        dialled.num_rooms += 1
        try:
            yield dialled.channel
        finally:
            dialled.num_rooms -= 1

    async def keep(self, known: Collection[Member]) -> None:
        """Closes what leads to no decoder of the mesh any more and has no room."""
        keys = {(member.address, member.incarnation) for member in known}
        gone = [key for key, dialled in self._dialled.items() if key not in keys and not dialled.num_rooms]
        for channel in [self._dialled.pop(key).channel for key in gone]:
            await channel.close()

    async def close(self) -> None:
        """Closes all."""
        while self._dialled:
            _, dialled = self._dialled.popitem()
            await dialled.channel.close()
