"""kvmesh over gRPC: the prefill service's own link, from pages to pages, within the decoder's credit.

Source: a thread copies frames out of the pool as the stage's worker does, `LinkSender` says when, and the servicer's loops
write them. Target: the loop reads, a thread opens frames and writes their pages, as the decoder's does. Between them
the services' channel and server options. HELLO and WELCOME speak of shared memory, where that is wanted, and of nothing else:
nobody checks who the other is.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar
from unittest.mock import patch

import grpc

from bench.kv_transfer.certificates import Certificate
from bench.kv_transfer.ends import End, NotHere
from bench.kv_transfer.rooms import SHARD, Turn
from kvmesh.kv.frames import FrameHeader, FrameKind, Handle, kind_of, open_frame, seal, seal_credit
from kvmesh.kv.pool import PagePool
from kvmesh.kv.segment import CELL_FRAME_BYTES, Segment, offer_segment
from kvmesh.protocol.ids import Generation, Incarnation, PairingKey, PairingNumber, RoomId
from kvmesh.protocol.sending import Computed
from kvmesh.rpc import streams
from kvmesh.rpc.channels import dial, server_options
from kvmesh.rpc.raw import raw_stream_call, raw_stream_handler
from kvmesh.rpc.tasks import race, until
from kvmesh.v1 import prefill_pb2 as pb
from services.decode.config import DecodeSettings
from services.decode.link import frames_in
from services.decode.links import LINK_PATH
from services.prefill.carrier import InSegment, OnStream, join_segment
from services.prefill.link_stream import RawContext, raise_when_cut, read_credits, write_frames
from services.prefill.sender import LinkSender
from services.prefill.worker import CopyFrame, FrameCopied

WATCHDOG_SECONDS = 2.0
WINDOW_BYTES = DecodeSettings.window_mib << 20
NUM_CELLS = (DecodeSettings.shared_mib << 20) // CELL_FRAME_BYTES
KEY: PairingKey = (Incarnation(1), PairingNumber(1))
_SERVICE, _METHOD = LINK_PATH.strip("/").split("/")
_CHECKSUM = slice(8, 16)


class LinkSource(End):
    """A stage's half: it serves."""

    begins = True

    def __init__(self, pool: PagePool, certificate: Certificate | None = None) -> None:
        """Args:
        certificate: for TLS.
        """
        super().__init__(pool)
        self._certificate = certificate
        self._link: asyncio.Future[LinkSender] = asyncio.get_running_loop().create_future()
        self._copier = _Copier(pool, self._copied)
        self._unsent_bytes = 0
        self._all_sent = asyncio.Event()

    async def offer(self) -> Any:
        """Its address."""
        self._server = grpc.aio.server(options=server_options(WATCHDOG_SECONDS))
        self._server.add_generic_rpc_handlers((raw_stream_handler(_SERVICE, {_METHOD: self._serve}),))
        if self._certificate is None:
            port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            pair = (self._certificate.key.read_bytes(), self._certificate.certificate.read_bytes())
            port = self._server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def meet(self, offered: Any) -> None:  # noqa: ARG002
        """The target has dialled."""
        await self._link

    async def begin(self, turn: Turn) -> None:
        """Which pages the rooms are in."""
        self._copier.take(turn)
        self._unsent_bytes = turn.num_bytes
        self._all_sent.clear()

    async def carry(self, turn: Turn) -> None:
        """All rooms were computed at once."""
        link = await self._link
        for room in turn.rooms:
            link.computed(Computed(KEY, RoomId(room.number), 0, room.num_tokens))
        await race(_raise_when_ended(link), _wait(self._all_sent))

    async def _serve(self, requests: AsyncIterator[bytes], context: RawContext) -> None:
        hello = pb.LinkHello.FromString(bytes(open_frame(await anext(requests))[1]))
        segment = join_segment(hello, [SHARD], SHARD.dtype)
        carrier = OnStream(WINDOW_BYTES) if segment is None else InSegment(segment)
        welcome = pb.LinkWelcome(in_segment=segment is not None)
        await context.write(seal(FrameHeader(FrameKind.WELCOME), welcome.SerializeToString()))
        link = LinkSender(KEY, Generation(1), [SHARD], SHARD.dtype, carrier, self._copier.post, self._sent)
        self._link.set_result(link)
        try:
            await race(read_credits(requests, link), write_frames(context, link), raise_when_cut(link))
        except BaseException as error:
            link.end(error if isinstance(error, Exception) else ConnectionError("the stream was cancelled"))
            raise

    def _copied(self, report: FrameCopied) -> None:
        self._link.result().copied(report)

    def _sent(self, _: RoomId, num_bytes: int) -> None:
        self._unsent_bytes -= num_bytes
        if self._unsent_bytes == 0:
            self._all_sent.set()


class LinkTarget(End):
    """A decoder's half: it dials."""

    def __init__(self, pool: PagePool, certificate: Certificate | None = None, num_cells: int = 0) -> None:
        """Args:
        certificate: the root that the stage's must come from.
        num_cells: of the segment that is offered; 0 for none.
        """
        super().__init__(pool)
        self._certificate = certificate
        self._num_cells = num_cells
        self._credits: asyncio.Queue[_Written] = asyncio.Queue()
        self._writer = _Writer(pool, self._written)
        self._lent: set[int] = set()
        self._missing_bytes = 0
        self._all_here = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def meet(self, offered: Any) -> None:
        """Dials."""
        self._channel = _dial(offered, self._certificate)
        self._call = raw_stream_call(self._channel, LINK_PATH)
        offered_segment = offer_segment(self._num_cells)
        hello = pb.LinkHello()
        if offered_segment is not None:
            hello.segment.CopyFrom(pb.SegmentOffer(**offered_segment.offer._asdict()))
        await streams.write(self._call, seal(FrameHeader(FrameKind.HELLO), hello.SerializeToString()))
        answer = await streams.read(self._call)
        _, said = open_frame(answer or b"")
        welcome = pb.LinkWelcome.FromString(bytes(said))
        self._segment: Segment | None = None
        if offered_segment is not None:
            if not welcome.in_segment:
                raise NotHere("the source could not open the segment")
            self._segment = offered_segment.taken()
            offered_segment.close()
        self._streaming = asyncio.ensure_future(race(self._read_frames(), self._write_credits()))

    async def begin(self, turn: Turn) -> None:
        """Which pages the rooms get."""
        self._writer.take(turn)
        self._missing_bytes = turn.num_bytes
        self._all_here.clear()

    async def carry(self, turn: Turn) -> None:  # noqa: ARG002
        """Until everything was written."""
        await race(until(self._streaming), until(self._failed), _wait(self._all_here))

    async def _read_frames(self) -> None:
        while (message := await streams.read(self._call)) is not None:
            if self._segment is None or kind_of(message) != FrameKind.IN_CELLS:
                self._writer.post((message, None))
                continue
            for cell in frames_in(self._segment, message, self._lent):
                self._writer.post((cell.memory, cell.number))

    async def _write_credits(self) -> None:
        while True:
            written = [await self._credits.get()]
            while not self._credits.empty():
                written.append(self._credits.get_nowait())
            num_bytes = sum(w.num_bytes for w in written if w.cell is None)
            cells = [w.cell for w in written if w.cell is not None]
            self._lent.difference_update(cells)
            await streams.write(self._call, seal_credit(num_bytes, cells, pairing=KEY[1]))

    def _written(self, result: "_Written | Exception") -> None:
        if isinstance(result, Exception):
            self._failed.set_exception(result)
            return
        self._credits.put_nowait(result)
        self._missing_bytes -= result.num_bytes
        if self._missing_bytes == 0:
            self._all_here.set()


class _Written(NamedTuple):
    num_bytes: int
    cell: int | None


_Record = TypeVar("_Record")
_Report = TypeVar("_Report")


class _Thread(Generic[_Record, _Report]):
    """The one thread that touches a pool, as a worker is: records in, reports out to the event loop."""

    def __init__(self, pool: PagePool, receive: Callable[[_Report], None]) -> None:
        self._pool, self._receive = pool, receive
        self._loop = asyncio.get_running_loop()
        self._pages: dict[int, list[int]] = {}
        self._checked = True
        self._inbox: SimpleQueue[_Record] = SimpleQueue()
        threading.Thread(target=self._run, name="pages", daemon=True).start()

    def take(self, turn: Turn) -> None:
        """The rooms of a round; none of the last is left by now."""
        self._pages = {room.number: room.pages for room in turn.rooms}
        self._checked = turn.checked

    def post(self, record: _Record) -> None:
        """Queues one."""
        self._inbox.put(record)

    def _run(self) -> None:
        while True:
            report = self._work(self._inbox.get())
            self._loop.call_soon_threadsafe(self._receive, report)

    def _work(self, record: _Record) -> _Report:
        raise NotImplementedError


class _Copier(_Thread[CopyFrame, FrameCopied]):
    """Makes frames, as the stage's worker does between two layers."""

    def _work(self, asked: CopyFrame) -> FrameCopied:
        pages, room, pairing = self._pages[asked.room], asked.room, asked.key[1]
        frame: bytes | Handle
        sealed: bytes | memoryview
        if asked.cell is None:
            frame = sealed = self._pool.frame(pages, asked.piece, room=room, pairing=pairing)
        else:
            num_bytes = self._pool.seal_frame(asked.cell.memory, pages, asked.piece, room=room, pairing=pairing)
            sealed, frame = asked.cell.memory, Handle(asked.cell.number, num_bytes)
        if not self._checked and any(sealed[_CHECKSUM]):
            raise AssertionError("a frame without a checksum has one: another function makes it now")
        return FrameCopied(asked, frame)


class _Writer(_Thread[tuple[bytes | memoryview, int | None], _Written | Exception]):
    """Opens frames and writes them to pages, as the decoder's copier does."""

    def _work(self, arrived: tuple[bytes | memoryview, int | None]) -> _Written | Exception:
        message, cell = arrived
        try:
            header, payload = open_frame(message)
            self._pool.write(self._pages[header.room], header, payload)
        except Exception as error:
            return error
        return _Written(len(payload), cell)


def _dial(address: str, certificate: Certificate | None) -> grpc.aio.Channel:
    if certificate is None:
        return dial(address, watchdog_seconds=WATCHDOG_SECONDS)
    # The services' options, and credentials that `dial` does not know.
    credentials = grpc.ssl_channel_credentials(certificate.certificate.read_bytes())
    with patch("grpc.aio.insecure_channel", partial(grpc.aio.secure_channel, credentials=credentials)):
        return dial(address, watchdog_seconds=WATCHDOG_SECONDS)


async def _raise_when_ended(link: LinkSender) -> None:
    raise await asyncio.shield(link.ended)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
