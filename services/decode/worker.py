"""The decode worker: the thread that owns the model, and the pages of rooms that decode.

Complete rooms come from the copier through one queue; between two arrivals it decodes: one step, one token for every running
room. A room that ends it lets go, when no step touches its pages any more; only then may the copier write them for another.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import torch

from kvmesh.model.runner import Runner, Span
from kvmesh.model.sampling import sample
from kvmesh.protocol.ids import RoomId
from kvmesh.telemetry import metrics
from kvmesh.v1.types_pb2 import FINISH_REASON_UNSPECIFIED
from services.decode.records import CloseRoom, HandedOver, LetGo, OpenRoom, Receive, TokenDrawn


@dataclass(slots=True)
class _Room:
    opened: OpenRoom
    length: int
    """Tokens whose KV is in the pages."""
    output_len: int
    last_token: int


class DecodeWorker:
    """What the thread does with each record, and between them."""

    def __init__(
        self, runner: Runner, tell_copier: Callable[[LetGo], None], receive: Receive, moved: Callable[[], None]
    ) -> None:
        """Args:
        runner: the whole model and the decoder's pool; only this thread computes with it.
        tell_copier: posts to the copier.
        moved: called after every layer of a step.
        """
        self._runner = runner
        self._tell_copier = tell_copier
        self._receive = receive
        self._moved = moved
        self._running: dict[RoomId, _Room] = {}

    @property
    def is_idle(self) -> bool:
        """No room runs."""
        return not self._running

    def take(self, record: HandedOver | CloseRoom) -> None:
        """The next record: a room to decode, or one that is over."""
        if isinstance(record, HandedOver):
            opened = record.opened
            self._running[opened.room] = _Room(
                opened,
                length=opened.prompt_len,
                output_len=opened.output_index + 1,
                last_token=record.first_token,
            )
        elif record.room in self._running:  # else it has ended, and was let go with its last token
            self._let_go(record.room)

    def turn(self) -> bool:
        """Decodes one step; whether there is another."""
        if self._running:
            self._decode()
        return bool(self._running)

    def _decode(self) -> None:
        """One step: the KV of each running room's last token is computed, and the next token drawn."""
        began = monotonic()
        rooms = list(self._running.values())
        spans = [Span(pages=r.opened.pages, begin=r.length, end=r.length + 1, sample=True) for r in rooms]
        inputs = torch.tensor([r.last_token for r in rooms], dtype=torch.int64)
        logits = self._runner.forward(spans, inputs, self._moved)
        tokens = sample(logits, [r.opened.sampling for r in rooms], [r.output_len for r in rooms])
        metrics.DECODE_STEP_SECONDS.observe(monotonic() - began)
        metrics.DECODE_BATCH_ROOMS.set(len(rooms))
        metrics.DECODE_TOKENS_TOTAL.inc(len(rooms))
        for room, token in zip(rooms, tokens, strict=True):
            room.length += 1
            self._drew(room, token)

    def _drew(self, room: _Room, token: int) -> None:
        reason = room.opened.ending(token, room.output_len)
        room.last_token = token
        room.output_len += 1
        if reason != FINISH_REASON_UNSPECIFIED:
            self._let_go(room.opened.room)  # before the report: what follows from that finds the pages let go
        self._receive(TokenDrawn(room.opened.room, token, reason, monotonic()))

    def _let_go(self, room: RoomId) -> None:
        del self._running[room]
        self._tell_copier(LetGo(room))
