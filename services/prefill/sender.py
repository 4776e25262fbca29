"""What one stage sends one decoder over one link: KV frames within the decoder's credit, and first tokens.

The step loop never waits for a link: KV that can't be sent stays in its pages until the worker is asked to copy it.
Called by the generation's links (what was computed, drawn, copied) and by the link's stream (what may be written). Touches
no page.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

from google.protobuf.duration_pb2 import Duration

from kvmesh.errors import Corrupt, Unavailable
from kvmesh.kv.frames import FrameHeader, FrameKind, Handle, seal, seal_handles
from kvmesh.kv.layout import Piece, Shard, WireName, payload_bytes
from kvmesh.protocol.ids import Generation, PairingKey, RoomId
from kvmesh.protocol.sending import Computed
from kvmesh.telemetry import metrics
from kvmesh.v1 import prefill_pb2 as pb
from services.prefill.carrier import Carrier
from services.prefill.cutting import Cutter
from services.prefill.worker import CopyFrame, FrameCopied, Sampled


class _Outgoing(NamedTuple):
    message: bytes | Handle
    room: RoomId
    kv_bytes: int
    """In the pages."""
    payload_bytes: int
    """On the way."""


class LinkSender:
    """The sending half of one link."""

    def __init__(
        self,
        key: PairingKey,
        generation: Generation,
        shards: Sequence[Shard],
        wire: WireName,
        carrier: Carrier,
        post: Callable[[CopyFrame], None],
        sent: Callable[[RoomId, int], None] = lambda _room, _bytes: None,
    ) -> None:
        """Args:
        key: the pairing.
        shards: what this stage sends: its layers, all of its heads in one shard or several.
        wire: the format they travel in.
        carrier: what frames travel in, and its credit.
        post: asks the worker for a frame.
        sent: told of each frame that was written: its room, and bytes of KV as they stand in the pages.
        """
        self.key = key
        self.ended: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._generation = generation
        self._shards, self._wire = shards, wire
        self._cutter = Cutter(shards, wire, carrier.frame_bytes)
        self.carrier = carrier
        self._post, self._sent = post, sent
        self._pending: deque[tuple[RoomId, Piece]] = deque()
        self._outbox: deque[_Outgoing] = deque()  # bounded by the credit, and one record a room
        self._outgoing = asyncio.Event()
        self._writing: list[_Outgoing] = []
        self._asked = 0
        self._moved_at = monotonic()
        self._busy_since: float | None = None
        """Since when the link has had something to send, or since its last message; None while it has nothing."""

    # From the generation's links.

    def computed(self, span: Computed) -> bool:
        """Tokens of a room lie in their pages now. Returns whether that makes frames."""
        pieces = self._cutter.cut(span)
        if not pieces:
            return False
        if self._busy_since is None:
            self._busy_since = monotonic()
        self._pending.extend((span.room, piece) for piece in pieces)
        self._ask()
        return True

    def sampled(self, first: Sampled, queued_seconds: float) -> None:
        """The last rank drew a room's first token; the room had waited at rank 0 before its prefill."""
        queued = Duration()
        queued.FromNanoseconds(int(queued_seconds * 1e9))
        payload = pb.FirstToken(token=first.token, queued=queued).SerializeToString()
        header = FrameHeader(FrameKind.FIRST_TOKEN, room=first.room, pairing=self.key[1])
        self._send(_Outgoing(seal(header, payload), first.room, 0, 0))

    def copied(self, report: FrameCopied) -> None:
        """The worker copied a frame, or found its room ended: then the credit comes back."""
        self._asked -= 1
        asked = report.asked
        if report.frame is None:
            self.carrier.put_back(self._size(asked.piece), asked.cell)
            self._ask()
            if not self._has_work:
                self._busy_since = None
        else:
            piece = asked.piece
            self._send(_Outgoing(report.frame, asked.room, self._kv_bytes(piece), self._size(piece)))

    def end(self, error: Exception) -> None:
        """Ends the link; its stream raises `error`. Repeated: nothing."""
        if not self.ended.done():
            self.ended.set_result(error)

    # From the stream.

    def credit(self, num_bytes: int, cells: Sequence[int] = ()) -> None:
        """The decoder wrote or discarded that many payload bytes, or what stood in these cells."""
        try:
            self.carrier.credit(num_bytes, cells)
        except Corrupt as error:
            self.end(error)
            return
        self._moved_at = monotonic()
        self._ask()

    async def next_message(self) -> bytes:
        """The next message to write; called again once that one is written. Handles that wait together go together."""
        self._moved_at = monotonic()
        while not self._outbox:
            self._outgoing.clear()
            await self._outgoing.wait()
        first = self._outbox.popleft()
        self._writing = [first]
        if isinstance(first.message, bytes):
            return first.message
        handles = [first.message]
        while self._outbox and isinstance(handle := self._outbox[0].message, Handle):
            handles.append(handle)
            self._writing.append(self._outbox.popleft())
        return seal_handles(handles, pairing=self.key[1])

    def written(self) -> float:
        """The last message was written. Returns the seconds it took, from the moment there was something to send."""
        now, since = monotonic(), self._busy_since
        for outgoing in self._writing:
            self._sent(outgoing.room, outgoing.kv_bytes)
            metrics.KV_SENT_BYTES_TOTAL.inc(outgoing.payload_bytes)
        self._writing = []
        self._busy_since = now if self._has_work else None
        return now - since if since is not None else 0.0

    @property
    def _has_work(self) -> bool:
        return bool(self._pending or self._asked or self._writing or self._outbox)

    def check_progress(self, now: float, limit_seconds: float) -> None:
        """Cuts the link when it has something to send and nothing moved for the limit."""
        if self._asked or not self._has_work:
            self._moved_at = now
        elif now - self._moved_at > limit_seconds:
            self.end(Unavailable(f"the link made no progress for {limit_seconds:g} s", reason="link_stalled"))

    def _send(self, outgoing: _Outgoing) -> None:
        self._outbox.append(outgoing)
        self._outgoing.set()

    def _ask(self) -> None:
        while self._pending and not self.ended.done():
            room, piece = self._pending[0]
            allowed, cell = self.carrier.take(self._size(piece))
            if not allowed:
                return
            self._pending.popleft()
            self._asked += 1
            self._post(CopyFrame(self._generation, self.key, room, piece, cell))

    def _size(self, piece: Piece) -> int:
        """Bytes of payload, as they travel: what credit counts."""
        return self._bytes_in(self._wire, piece)

    def _kv_bytes(self, piece: Piece) -> int:
        """Bytes in the pages."""
        return self._bytes_in(self._shards[0].dtype, piece)

    def _bytes_in(self, wire: WireName, piece: Piece) -> int:
        layers, tokens = piece.layer_end - piece.layer_begin, piece.token_end - piece.token_begin
        assert piece.heads is not None
        head_begin, head_end = piece.heads
        return payload_bytes(wire, layers, head_end - head_begin, tokens, self._shards[0].head_dim)
