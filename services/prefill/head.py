"""Rank 0's half of a generation: rooms come in over control streams, decisions go out as steps.

Wires `kvmesh.protocol.scheduler` to the control streams and to the generation. Holds the prompts, since only rank 0 embeds.
"""

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic

from kvmesh.errors import InvalidInput, KvmeshError, Unavailable
from kvmesh.protocol.ids import PairingKey, RoomId, StepNumber
from kvmesh.protocol.scheduler import Limits, Scheduler
from kvmesh.protocol.steps import RoomAdmitted, RoomDone, Step
from kvmesh.telemetry import logs, metrics
from kvmesh.v1 import prefill_pb2 as pb
from services.prefill.generation import DRAINED, Generation
from services.prefill.rate import PrefillRate
from services.prefill.wire import sampling_from

log = logs.get(__name__)


MAX_TRACEPARENT = 64
"""Characters; W3C's form has 55."""


class Head:
    """The one that decides."""

    def __init__(
        self, generation: Generation, limits: Limits, vocab_size: int, clock: Callable[[], float] = monotonic
    ) -> None:
        self.generation = generation
        self._clock = clock
        self.scheduler = Scheduler(limits)
        self._vocab_size = vocab_size
        self._prompts: dict[RoomId, Sequence[int]] = {}
        self._pump_due = False
        self._rate = PrefillRate()
        generation.on_applied = self._applied
        generation.on_applied_here = self._applied_here
        generation.on_draining = self.drain
        generation.on_end = self._end
        if generation.drain_asked:
            self.drain()

    # Control streams.

    def pair(self, key: PairingKey, decoder_page_size: int = 1) -> None:
        """A control stream opened.

        Args:
            decoder_page_size: see Scheduler.pair.

        Raises:
            Fenced, Unavailable: see Scheduler.pair.
        """
        self._left(self.scheduler.pair(key, decoder_page_size=decoder_page_size), "its pairing is over")
        self._due()

    def unpair(self, key: PairingKey) -> None:
        """A control stream ended: its rooms are dropped."""
        self._left(self.scheduler.unpair(key), "its pairing is over")
        self._due()

    def admit(self, key: PairingKey, message: pb.Admit) -> pb.RoomRefused | None:
        """A decoder asks for a room; returns the refusal, if any."""
        room = RoomId(message.room)
        trace = message.traceparent if len(message.traceparent) <= MAX_TRACEPARENT else ""
        try:
            if any(token >= self._vocab_size for token in message.tokens):
                raise InvalidInput(f"a token id is not below {self._vocab_size}", reason="bad_token", field="tokens")
            self.scheduler.admit(
                key,
                room,
                prompt_len=len(message.tokens),
                cached_len=message.cached_len,
                sampling=sampling_from(message.sampling),
                output_index=message.output_index,
                trace=trace,
            )
        except KvmeshError as error:
            _count_ended(error.label)
            return pb.RoomRefused(room=room, reason=error.reason, detail=error.message)
        self._prompts[room] = message.tokens
        self.generation.spans.arrived(room, trace, self._clock())
        self._due()
        return None

    def drop(self, key: PairingKey, room: RoomId) -> None:
        """The decoder ended a room."""
        if self.scheduler.holds(room):
            self.scheduler.drop(key, room)
            self._left([room], "dropped")
        self._due()

    def received(self, key: PairingKey, room: RoomId) -> None:
        """The decoder has all of a room.

        Raises:
            Fault: see Scheduler.received.
        """
        self.scheduler.received(key, room)
        self._due()

    # Leaving.

    def drain(self) -> None:
        """Takes nothing new, finishes what is here, then ends the generation."""
        if not self.scheduler.draining:
            log.info("draining: no more rooms are taken")
        self.scheduler.drain()
        self._due()

    # Steps.

    def _due(self) -> None:
        """Writes steps once all that arrived together was heard, so that it shares a step."""
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """What can't be done ends the generation: the event loop would only log it."""
        self._pump_due = False
        if self.generation.ended.done():
            return
        try:
            self._write_steps()
        except Exception as error:
            self.generation.fail(error)

    def _write_steps(self) -> None:
        while (step := self.scheduler.next_step()) is not None:
            self._launch(step)
        self._show()
        if self.scheduler.draining and self.scheduler.idle:
            self.generation.end(Unavailable("the pipeline drained", reason=DRAINED))

    def _show(self) -> None:
        queued = self.scheduler.queued_tokens + self._rate.tokens_in_flight
        metrics.ROOMS_OPEN.set(self.scheduler.open_rooms)
        metrics.ROOMS_WAITING.set(self.scheduler.waiting_rooms)
        metrics.STEPS_IN_FLIGHT.set(self.scheduler.steps_in_flight)
        metrics.QUEUED_PREFILL_TOKENS.set(queued)
        metrics.QUEUED_PREFILL_SECONDS.set(queued * self._rate.seconds_per_token)

    def _launch(self, step: Step) -> None:
        self._rate.written(step, self._clock())
        tokens: list[int] = []
        for work in step.work:
            tokens.extend(self._prompts[work.room][work.begin : work.end])
        for entry in step.entries:
            if not isinstance(entry, RoomAdmitted):
                self._prompts.pop(entry.room, None)
                _count_ended("done" if isinstance(entry, RoomDone) else "dropped")
        self.generation.run(step, tokens=tokens)

    def _applied_here(self, number: StepNumber) -> None:
        self.scheduler.applied_here(number)
        self._due()

    def _applied(self, number: StepNumber) -> None:
        try:
            self.scheduler.applied(number)
            self._rate.applied(number, self._clock())
        except KvmeshError as error:
            self.generation.end(error)
        self._due()

    def _left(self, rooms: Sequence[RoomId], why: str) -> None:
        """Of rooms that were dropped, those that the log never knew are over; the others end with their entry."""
        for room in rooms:
            if not self.scheduler.holds(room):
                self._prompts.pop(room, None)
                self.generation.spans.left(room, why, self._clock())
                if not self.generation.ended.done():
                    _count_ended("dropped")

    def _end(self, error: KvmeshError) -> None:
        """The generation is over, and with it every room that is still here."""
        for _ in range(self.scheduler.open_rooms):
            _count_ended(error.label)


def _count_ended(reason: str) -> None:
    metrics.ROOMS_ENDED_TOTAL.labels(reason=reason).inc()
