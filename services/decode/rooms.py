"""The rooms of this decoder as their calls see them: buffers of tokens, timings, and how each ends.

Carries out what `kvmesh.protocol.rooms` asks: records to the copier, messages on the pairing's control stream. Called by the
servicer (open, close), the pairings (refused, lost) and the threads' reports. All on the event loop.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from kvmesh.errors import Full, KvmeshError, Unavailable, reason_heard
from kvmesh.model.sampling import SamplingParams
from kvmesh.protocol.ids import Generation, PairingNumber, RoomId, short
from kvmesh.protocol.rooms import Action, Ask, DecoderRooms, Limits, RoomEvent, RoomState
from kvmesh.telemetry import logs, metrics, traces
from kvmesh.v1 import decode_pb2, prefill_pb2
from kvmesh.v1.types_pb2 import FINISH_REASON_UNSPECIFIED, FinishReason
from services.decode.links import PairingStreams
from services.decode.records import (
    CloseRoom,
    FirstTokenArrived,
    OpenRoom,
    RoomBroken,
    RoomComplete,
    TokenDrawn,
)
from services.decode.threads import DecodeThreads

log = logs.get(__name__)


@dataclass(slots=True)
class RoomTimes:
    """Monotonic times of one room, for its timing; 0 until it happened."""

    arrived: float
    admit_sent: float = 0.0
    first_token: float = 0.0
    complete: float = 0.0
    written: float = 0.0
    last_token: float = 0.0
    queued_seconds: float = 0.0


@dataclass(slots=True)
class LiveRoom:
    """A room and the call that waits for its tokens. Bounded by the room's own max_output_len."""

    request: decode_pb2.GenerateRoomRequest
    pairing: PairingStreams
    span: traces.Span
    times: RoomTimes
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason.ValueType = FINISH_REASON_UNSPECIFIED
    error: KvmeshError | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def room(self) -> RoomId:
        """Its id."""
        return RoomId(self.request.assignment.room)

    def trace(self, now: float) -> None:
        """Tells the stops of the walk that this room went through, as parts of its span."""
        times, finished = self.times, self.is_finished
        stops = (
            ("reserve", times.arrived, times.admit_sent),
            ("receive", times.admit_sent, times.complete),
            ("decode", times.complete, times.last_token),
        )
        for name, begun, ended in stops:
            if begun:
                span = self.span.child(name, begun=begun)
                if name == "receive" and ended:  # what then lay between it and its place in the batch
                    span.attributes["write_seconds"] = times.written - ended
                span.end("" if ended or finished else "the room ended", ended=ended or now)
        if finished:
            self.span.end(ended=now)  # however its call ends: its reader may leave with the last token

    @property
    def is_finished(self) -> bool:
        """Its last token was drawn."""
        return self.finish_reason != FINISH_REASON_UNSPECIFIED

    @property
    def why_ended(self) -> str:
        """A reason for the metrics, once its call has ended."""
        if self.is_finished:
            return "finished"
        return self.error.label if self.error is not None else "cancelled"

    @property
    def prefill_tokens(self) -> list[int]:
        """What the pipeline computes: prompt and output so far."""
        return [*self.request.prompt, *self.request.output_so_far]


class Rooms:
    """Every room of the process."""

    def __init__(self, limits: Limits, threads: DecodeThreads, changed: Callable[[], None]) -> None:
        """Args:
        changed: called when the load changed enough for placement to know.
        """
        self.books = DecoderRooms(limits)
        self._threads = threads
        self._changed = changed
        self._live: dict[RoomId, LiveRoom] = {}
        self.empty = asyncio.Event()
        self.empty.set()

    def open(self, request: decode_pb2.GenerateRoomRequest, pairing: PairingStreams, span: traces.Span) -> LiveRoom:
        """A room arrives for a standing pairing.

        Args:
            span: the room's, begun when it arrived.

        Raises:
            InvalidInput, DuplicateRoom, Full, Unavailable: see DecoderRooms.open.
        """
        live = LiveRoom(request, pairing, span, RoomTimes(span.begun))
        prompt_len = len(request.prompt) + len(request.output_so_far)
        try:
            actions = self.books.open(
                live.room,
                Generation(request.assignment.generation),
                prompt_len=prompt_len,
                max_output_len=request.max_output_len - len(request.output_so_far),
            )
        except KvmeshError as refusal:
            metrics.ROOMS_ENDED_TOTAL.labels(reason=refusal.label).inc()
            raise
        self._live[live.room] = live
        self.empty.clear()
        self._carry_out(actions)
        return live

    def close(self, live: LiveRoom) -> None:
        """The call of a room ended, however: the room ends everywhere. Already ended: only forgotten."""
        try:
            self._tell(live.room, RoomEvent.CANCELLED)
        finally:
            self._live.pop(live.room, None)
            live.trace(monotonic())
            metrics.ROOMS_ENDED_TOTAL.labels(reason=live.why_ended).inc()
            if not self._live:
                self.empty.set()

    # From the threads.

    def prefilled(self, report: FirstTokenArrived) -> None:
        """The first token is here."""
        live = self._live.get(report.room)
        if live is not None:
            live.times.first_token, live.times.queued_seconds = report.arrived, report.queued_seconds

    def completed(self, report: RoomComplete) -> None:
        """All KV and the first token are here."""
        live = self._live.get(report.room)
        if live is not None:
            live.times.complete, live.times.written = report.complete_at, report.written_at
            metrics.TRANSFER_TAIL_SECONDS.observe(max(0.0, report.complete_at - live.times.first_token))
        self._tell(report.room, RoomEvent.COMPLETE)

    def drew(self, report: TokenDrawn) -> None:
        """A token was drawn. Of a room that is receiving it is the first and the last: its KV is not needed."""
        live = self._live.get(report.room)
        if live is None or self.books.state_of(report.room) not in (RoomState.RECEIVING, RoomState.RUNNING):
            return
        live.tokens.append(report.token)
        live.finish_reason = report.finish_reason
        live.news.set()
        if live.is_finished:
            live.times.last_token = report.drawn_at
            self._tell(report.room, RoomEvent.FINISHED)

    def broke(self, report: RoomBroken) -> None:
        """What arrived can't be used."""
        self._fail(report.room, report.error)
        self._tell(report.room, RoomEvent.BROKEN)

    # From the pairings.

    def refused(self, pairing: PairingNumber, message: prefill_pb2.RoomRefused) -> None:
        """Rank 0 does not take a room, or its generation died in the very step that had work for it.

        Args:
            pairing: whose rank 0 says so; of another's room, and of one that it was never given, it has nothing to say.
        """
        room = RoomId(message.room)
        live = self._live.get(room)
        if live is None or live.pairing.number != pairing or self.books.state_of(room) is RoomState.WAITING:
            return
        reason = reason_heard(message.reason)
        if reason == "queue_full":
            error: KvmeshError = Full(message.detail, reason=reason, retry_after_seconds=1.0)
        else:
            error = Unavailable(f"the pipeline refused the room: {message.detail}", reason=reason)
        if self.books.state_of(room) is RoomState.RECEIVING:  # else it needs rank 0 no more
            self._fail(room, error)
        self._tell(room, RoomEvent.REFUSED)

    def pairing_lost(self, generation: Generation, error: KvmeshError) -> None:
        """The rooms that still needed the pairing end with its reason; the others decode on."""
        lost, actions = self.books.generation_lost(generation)
        for room in lost:
            self._fail(room, Unavailable(error.message, reason=error.reason))
        self._carry_out(actions)

    def fail_all(self, error: KvmeshError) -> None:
        """Every room that is not finished ends, and is replayed elsewhere."""
        for room in list(self._live):
            self._fail(room, error)
            self._tell(room, RoomEvent.CANCELLED)

    def _fail(self, room: RoomId, error: KvmeshError) -> None:
        live = self._live.get(room)
        if live is not None and live.error is None and not live.is_finished:
            with logs.bind(room=short(room), generation=short(live.pairing.generation)):
                log.info("the room failed: %s", error.message)
            live.error = error
            live.news.set()

    def _tell(self, room: RoomId, event: RoomEvent) -> None:
        self._carry_out(self.books.tell(room, event))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            live = self._live[action.room]
            if action.ask is Ask.ADMIT:
                self._admit(live, action)
            elif action.ask is Ask.RECEIVED:
                live.pairing.send(prefill_pb2.ControlRequest(received=action.room))
            elif action.ask is Ask.DROP:
                live.pairing.send(prefill_pb2.ControlRequest(drop=action.room))
            elif action.ask is Ask.RELEASE:
                self._threads.post(CloseRoom(action.room))
        self.show()
        self._changed()

    def show(self) -> None:
        """Sets the gauges."""
        books = self.books
        for state, num_pages in books.pages_by_state.items():
            metrics.PAGES.labels(state=state).set(num_pages)
        metrics.ROOMS_OPEN.set(len(books.states))
        metrics.ROOMS_RUNNING.set(books.running_rooms)
        metrics.ROOMS_WAITING.set(books.waiting_rooms)

    def _admit(self, live: LiveRoom, action: Action) -> None:
        request, tokens = live.request, live.prefill_tokens
        sampling = request.sampling
        output_index = len(request.output_so_far)
        self._threads.post(
            OpenRoom(
                live.room,
                live.pairing.number,
                live.pairing.shards,
                action.pages,
                prompt_len=len(tokens),
                cached_len=0,
                output_index=output_index,
                max_output_len=request.max_output_len,
                sampling=SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p or 1.0, sampling.seed),
                stop_ids=frozenset(request.stop_ids),
            )
        )
        live.times.admit_sent = monotonic()
        metrics.RESERVE_SECONDS.observe(live.times.admit_sent - live.times.arrived)
        live.pairing.send(
            prefill_pb2.ControlRequest(
                admit=prefill_pb2.Admit(
                    room=live.room,
                    tokens=tokens,
                    cached_len=0,
                    sampling=sampling,
                    output_index=output_index,
                    traceparent=live.span.traceparent,
                )
            )
        )
