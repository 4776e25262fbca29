"""Where the time of each room went at this stage: its wait at rank 0, its prefill, the sending of its KV.

Fed by rank 0's head with who waits, by the generation with what was applied, and by the links with what was sent. A wait ends
where the worker takes up the room's first tokens; steps carry it to the last rank, which tells the decoder. Decides nothing.
"""

from dataclasses import dataclass, replace

from kvmesh.kv.layout import Shard
from kvmesh.protocol.ids import RoomId
from kvmesh.protocol.steps import RoomAdmitted, RoomDone, Step, Work
from kvmesh.telemetry import metrics, traces
from services.prefill.worker import StepDone


@dataclass(slots=True)
class _Room:
    admitted: RoomAdmitted
    prefill: traces.Span | None = None
    send: traces.Span | None = None
    queued_seconds: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    """Computed: also those that its decoder has."""
    compute_seconds: float = 0.0
    sent_bytes: int = 0

    def begin(self, name: str, begun: float) -> traces.Span:
        return _begin(name, self.admitted.room, self.admitted.trace, begun)


class RoomSpans:
    """The rooms of one generation, at one stage."""

    def __init__(self, rank: int, shard: Shard) -> None:
        self._rank, self._shard = rank, shard
        self._rooms: dict[RoomId, _Room] = {}
        self._waiting: dict[RoomId, traces.Span] = {}
        """At rank 0, until the worker takes up their first tokens."""

    # At rank 0.

    def arrived(self, room: RoomId, trace: str, now: float) -> None:
        """A decoder's Admit for a room was taken."""
        self._waiting[room] = _begin("queue", room, trace, now)

    def left(self, room: RoomId, why: str, now: float) -> None:
        """A room ended that the log never knew."""
        self._end_wait(room, why, now)

    def told(self, step: Step) -> Step:
        """The step as the last rank needs it: with the last tokens of a room, how long the room waited."""
        return replace(step, work=tuple(self._work_told(work) for work in step.work)) if self._rank == 0 else step

    def _work_told(self, work: Work) -> Work:
        room = self._rooms[work.room]
        is_last = work.end == room.admitted.prompt_len
        return replace(work, queued_seconds=room.queued_seconds) if is_last else work

    # At every stage.

    def begun(self, step: Step) -> None:
        """A step is applied and still computes: KV of its rooms may be sent. Repeated: nothing."""
        for entry in step.entries:
            if isinstance(entry, RoomAdmitted) and entry.room not in self._rooms:
                self._rooms[entry.room] = _Room(entry)

    def applied(self, done: StepDone) -> None:
        """A step was applied and computed."""
        self.begun(done.step)
        for entry in done.step.entries:
            if not isinstance(entry, RoomAdmitted):
                self._end(entry.room, "" if isinstance(entry, RoomDone) else "dropped", done.ended)
        for work in done.step.work:
            self._work(work, done)

    def to_send(self, room: RoomId, now: float) -> None:
        """A link has KV of a room to send."""
        known = self._rooms[room]
        known.send = known.send or known.begin("send", now)

    def sent(self, room: RoomId, num_bytes: int, now: float) -> None:
        """A frame of a room was written."""
        known = self._rooms.get(room)
        if known is None or not num_bytes:
            return
        known.sent_bytes += num_bytes
        admitted = known.admitted
        if known.sent_bytes >= (admitted.prompt_len - admitted.cached_len) * self._shard.bytes_per_token:
            self._end_send(known, "", now)

    def close(self, why: str, now: float) -> None:
        """The generation is over."""
        for room in [*self._waiting, *self._rooms]:
            self._end(room, why, now)

    def _work(self, work: Work, done: StepDone) -> None:
        room = self._rooms[work.room]
        if room.prefill is None:
            room.prefill = room.begin("prefill", done.began)
            room.queued_seconds = self._end_wait(work.room, "", done.began)
            if self._rank == 0:
                metrics.ADMISSION_SECONDS.observe(room.queued_seconds)
        room.num_steps += 1
        room.num_tokens += work.end - work.begin
        room.compute_seconds += done.ended - done.began
        if work.end == room.admitted.prompt_len:
            self._end_prefill(room, "", done.ended)

    def _end(self, number: RoomId, why: str, now: float) -> None:
        self._end_wait(number, why, now)
        room = self._rooms.pop(number, None)
        if room is not None:
            self._end_prefill(room, why, now)
            self._end_send(room, why, now)

    def _end_wait(self, room: RoomId, why: str, now: float) -> float:
        """Returns how long the room waited; 0 where none waits."""
        span = self._waiting.pop(room, None)
        if span is None:
            return 0.0
        span.end(why, ended=now)
        return max(0.0, now - span.begun)

    def _end_prefill(self, room: _Room, why: str, now: float) -> None:
        if room.prefill is not None:
            room.prefill.attributes |= {"rank": self._rank, "tokens": room.num_tokens, "steps": room.num_steps}
            room.prefill.attributes["compute_seconds"] = room.compute_seconds
            room.prefill.end(why, ended=now)

    def _end_send(self, room: _Room, why: str, now: float) -> None:
        if room.send is not None:
            room.send.attributes |= {"rank": self._rank, "bytes": room.sent_bytes}
            room.send.end(why, ended=now)


def _begin(name: str, room: RoomId, trace: str, begun: float) -> traces.Span:
    return traces.start(name, parent=traces.heard(trace), room=room, begun=begun)
