"""What one stage sends one decoder over one link: KV frames within the decoder's credit, and first tokens.

The step loop never waits for a link: KV that can't be sent stays in its pages until the worker is asked to copy it.
Called by the generation (what was computed) and by the link's stream (what may be written). Touches no page.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

from google.protobuf.duration_pb2 import Duration

from kvmesh.errors import Unavailable
from kvmesh.kv.frames import FrameHeader, FrameKind, seal
from kvmesh.kv.layout import Piece, Shard, WireName, payload_bytes, plan_shards
from kvmesh.protocol.ids import Generation, PairingKey, RoomId
from kvmesh.protocol.sending import Computed
from kvmesh.v1 import prefill_pb2 as pb
from services.prefill.worker import CopyFrame, FrameCopied, Sampled


class _Outgoing(NamedTuple):
    message: bytes
    room: RoomId
    kv_bytes: int


class LinkSender:
    """The sending half of one link."""

    def __init__(
        self,
        key: PairingKey,
        generation: Generation,
        shards: Sequence[Shard],
        wire: WireName,
        window_bytes: int,
        post: Callable[[CopyFrame], None],
        sent: Callable[[RoomId, int], None] = lambda _room, _bytes: None,
    ) -> None:
        """Args:
        key: the pairing.
        shards: what this stage sends: its layers, all of its heads in one shard or several.
        wire: the format they travel in.
        window_bytes: bytes that may be in flight before the first credit.
        post: asks the worker for a frame.
        sent: told of each frame that was written: its room, and bytes of KV as they stand in the pages.
        """
        self.key = key
        self.ended: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._generation = generation
        self._shards, self._wire = shards, wire
        self._window = window_bytes
        self._post, self._sent = post, sent
        self._pending: deque[tuple[RoomId, Piece]] = deque()
        self._outbox: asyncio.Queue[_Outgoing] = asyncio.Queue()  # bounded by the window, and one record a room
        self._writing: _Outgoing | None = None
        self._asked = 0
        self._moved_at = monotonic()
        self._busy_since: float | None = None
        """Since when the link has had something to send, or since its last message; None while it has nothing."""

    # From the generation.

    def computed(self, span: Computed) -> None:
        """Tokens of a room lie in their pages now."""
        if self._busy_since is None:
            self._busy_since = monotonic()
        for piece in plan_shards(self._shards, span.begin, span.end, wire=self._wire):
            self._pending.append((span.room, piece))
        self._ask()

    def sampled(self, first: Sampled, queued_seconds: float) -> None:
        """The last rank drew a room's first token; the room had waited at rank 0 before its prefill."""
        queued = Duration()
        queued.FromNanoseconds(int(queued_seconds * 1e9))
        payload = pb.FirstToken(token=first.token, queued=queued).SerializeToString()
        header = FrameHeader(FrameKind.FIRST_TOKEN, room=first.room, pairing=self.key[1])
        self._outbox.put_nowait(_Outgoing(seal(header, payload), first.room, 0))

    def copied(self, report: FrameCopied) -> None:
        """The worker copied a frame, or found its room ended: then the credit comes back."""
        self._asked -= 1
        if report.frame is None:
            self._window += self._size(report.asked.piece)
            self._ask()
            if not self._has_work:
                self._busy_since = None
        else:
            asked = report.asked
            self._outbox.put_nowait(_Outgoing(report.frame, asked.room, self._kv_bytes(asked.piece)))

    def end(self, error: Exception) -> None:
        """Ends the link; its stream raises `error`. Repeated: nothing."""
        if not self.ended.done():
            self.ended.set_result(error)

    # From the stream.

    def credit(self, num_bytes: int) -> None:
        """The decoder wrote or discarded that many payload bytes."""
        self._window += num_bytes
        self._moved_at = monotonic()
        self._ask()

    async def next_message(self) -> bytes:
        """The next message to write; called again once that one is written."""
        self._moved_at = monotonic()
        self._writing = await self._outbox.get()
        return self._writing.message

    def written(self) -> float:
        """The last message was written. Returns the seconds it took, from the moment there was something to send."""
        now, since, written = monotonic(), self._busy_since, self._writing
        if written is not None:
            self._sent(written.room, written.kv_bytes)
        self._writing = None
        self._busy_since = now if self._has_work else None
        return now - since if since is not None else 0.0

    @property
    def _has_work(self) -> bool:
        return bool(self._pending or self._asked or self._writing or not self._outbox.empty())

    def check_progress(self, now: float, limit_seconds: float) -> None:
        """Cuts the link when it has something to send and nothing moved for the limit."""
        if not (self._pending or not self._outbox.empty()) or self._asked:
            self._moved_at = now
        elif now - self._moved_at > limit_seconds:
            self.end(Unavailable(f"the link made no progress for {limit_seconds:g} s", reason="link_stalled"))

    def _ask(self) -> None:
        while self._pending and self._window > 0 and not self.ended.done():
            room, piece = self._pending.popleft()
            self._window -= self._size(piece)
            self._asked += 1
            self._post(CopyFrame(self._generation, self.key, room, piece))

    def _size(self, piece: Piece) -> int:
        """Bytes of payload, as they travel: what credit counts."""
        return self._bytes_in(self._wire, piece)

    def _kv_bytes(self, piece: Piece) -> int:
        """Bytes in the pages."""
        return self._bytes_in(self._shards[0].dtype, piece)

    def _bytes_in(self, wire: WireName, piece: Piece) -> int:
        layers, tokens = piece.layer_end - piece.layer_begin, piece.token_end - piece.token_begin
        head_begin, head_end = piece.heads or (0, 0)
        return payload_bytes(wire, layers, head_end - head_begin, tokens, self._shards[0].head_dim)
