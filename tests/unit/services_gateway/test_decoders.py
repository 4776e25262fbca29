"""Channels to decoders: one a process, kept while it has rooms or the mesh knows it."""

import grpc

from kvmesh.v1.types_pb2 import Member
from services.gateway.decoders import Decoders

ONE = Member(address="127.0.0.1:1", incarnation=1)
REBORN = Member(address="127.0.0.1:1", incarnation=2)


def is_closed(channel: grpc.aio.Channel) -> bool:
    return channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_rooms_on_one_decoder_share_a_channel() -> None:
    """F-K6: connections grow with processes, not with rooms."""
    decoders = Decoders(2.0)
    with decoders.use(ONE) as first, decoders.use(ONE) as second:
        assert first is second
    await decoders.close()


async def test_a_decoder_that_restarted_at_the_same_address_is_another() -> None:
    decoders = Decoders(2.0)
    with decoders.use(ONE) as first, decoders.use(REBORN) as second:
        assert first is not second
    await decoders.close()


async def test_a_decoder_the_mesh_has_lost_is_closed_once_it_has_no_room() -> None:
    decoders = Decoders(2.0)
    with decoders.use(ONE) as channel:
        await decoders.keep([REBORN])
        assert not is_closed(channel)
    await decoders.keep([ONE])
    assert not is_closed(channel)
    await decoders.keep([REBORN])
    assert is_closed(channel)
    with decoders.use(ONE) as fresh:
        assert not is_closed(fresh)
    await decoders.close()
    assert is_closed(fresh)
