from collections.abc import AsyncIterator
from typing import Any

import pytest
from rpc_serving import served

from kvmesh.errors import Fenced
from kvmesh.rpc.channels import MAX_MESSAGE_BYTES
from kvmesh.rpc.raw import raw_stream_call, raw_stream_handler
from kvmesh.rpc.status import peer_errors
from kvmesh.rpc.streams import read, write
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1.prefill_pb2_grpc import PrefillServiceServicer, PrefillServiceStub, add_PrefillServiceServicer_to_server

LINK = "/kvmesh.v1.PrefillService/Link"
LARGEST_ID = (1 << 64) - 1


class Echo(PrefillServiceServicer):
    async def Control(  # noqa: N802
        self, request: AsyncIterator[pb.ControlRequest], context: Any
    ) -> AsyncIterator[pb.ControlResponse]:
        async for message in request:
            yield pb.ControlResponse(refused=pb.RoomRefused(room=message.admit.room))

    async def link(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            if message == b"foreign":
                raise Fenced("the link is of another pairing")
            yield message

    def add_to(self, server: Any) -> None:
        server.add_generic_rpc_handlers((raw_stream_handler("kvmesh.v1.PrefillService", {"Link": self.link}),))
        add_PrefillServiceServicer_to_server(self, server)


class EchoLast(Echo):
    """The same, its raw methods added last."""

    def add_to(self, server: Any) -> None:
        add_PrefillServiceServicer_to_server(self, server)
        server.add_generic_rpc_handlers((raw_stream_handler("kvmesh.v1.PrefillService", {"Link": self.link}),))


@pytest.mark.parametrize("echo", [Echo, EchoLast])
async def test_raw_and_protobuf_methods_of_one_service_both_answer(echo: type[Echo]) -> None:
    async with served(add=echo().add_to) as channel:
        control = PrefillServiceStub(channel).Control()
        await control.write(pb.ControlRequest(admit=pb.Admit(room=7)))
        answer = await read(control)
        assert answer is not None
        assert answer.refused.room == 7
        link = raw_stream_call(channel, LINK)
        await link.write(b"\x00\xff frame")
        assert await link.read() == b"\x00\xff frame"
        await link.done_writing()
        assert await read(link) is None


async def test_ids_at_their_limit_survive() -> None:
    async with served(add=Echo().add_to) as channel:
        control = PrefillServiceStub(channel).Control()
        await control.write(pb.ControlRequest(admit=pb.Admit(room=LARGEST_ID)))
        answer = await read(control)
        assert answer is not None
        assert answer.refused.room == LARGEST_ID


async def test_a_raw_method_raises_errors_of_the_table() -> None:
    async with served(add=Echo().add_to) as channel:
        link = raw_stream_call(channel, LINK)
        await link.write(b"foreign")
        with pytest.raises(Fenced), peer_errors("rank 0 of p0"):
            await link.read()


async def test_a_write_to_a_call_that_was_refused_tells_why() -> None:
    async with served(add=Echo().add_to) as channel:
        link = raw_stream_call(channel, LINK)
        await link.write(b"foreign")
        assert await link.code() is not None  # it has ended
        with pytest.raises(Fenced, match="another pairing"), peer_errors("rank 0 of p0"):
            await write(link, b"more")


async def test_frames_of_many_megabytes_pass() -> None:
    async with served(add=Echo().add_to) as channel:
        link = raw_stream_call(channel, LINK)
        frame = bytes(MAX_MESSAGE_BYTES - 1024)
        await link.write(frame)
        assert await link.read() == frame


async def test_a_raw_call_with_a_time_ends_by_it() -> None:
    async with served(add=Echo().add_to) as channel:
        link = raw_stream_call(channel, LINK, timeout=0.1)
        with pytest.raises(Exception, match="no answer in time"), peer_errors("x"):
            await link.read()
