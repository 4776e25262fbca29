"""Where the time of each room went at this stage: its wait at rank 0, its prefill, the sending of its KV.

Fed by the generation with what was applied and by the links with what was sent; keeps rooms until their terminal entry.
"""

from dataclasses import dataclass

from kvmesh.kv.layout import Shard
from kvmesh.protocol.ids import RoomId
from kvmesh.protocol.steps import RoomAdmitted, Work
from kvmesh.telemetry import traces
from services.prefill.worker import StepDone


@dataclass(slots=True)
class _Room:
    admitted: RoomAdmitted
    prefill: traces.Span | None = None
    send: traces.Span | None = None
    num_steps: int = 0
    compute_seconds: float = 0.0
    sent_bytes: int = 0

    def begin(self, name: str, begun: float) -> traces.Span:
        return traces.start(name, parent=traces.heard(self.admitted.trace), room=self.admitted.room, begun=begun)


class RoomSpans:
    """The rooms of one generation, at one stage."""

    def __init__(self, rank: int, shard: Shard) -> None:
        self._rank, self._shard = rank, shard
        self._rooms: dict[RoomId, _Room] = {}

    def applied(self, done: StepDone, now: float) -> None:
        """A step was applied; it took `done.seconds` until `now`."""
        begun = now - done.seconds
        for entry in done.step.entries:
            if isinstance(entry, RoomAdmitted):
                self._admit(entry, begun)
            else:
                self._end(entry.room, now)
        for work in done.step.work:
            self._work(work, done.seconds, begun, now)

    def sent(self, room: RoomId, num_bytes: int, now: float) -> None:
        """A frame of a room was written."""
        known = self._rooms.get(room)
        if known is None or not num_bytes:
            return
        known.send = known.send or known.begin("send", now)
        known.sent_bytes += num_bytes
        admitted = known.admitted
        if known.sent_bytes >= (admitted.prompt_len - admitted.cached_len) * self._shard.bytes_per_token:
            self._end_send(known, "", now)

    def close(self, why: str, now: float) -> None:
        """The generation is over."""
        for room in list(self._rooms):
            self._end(room, now, why)

    def _admit(self, entry: RoomAdmitted, begun: float) -> None:
        room = self._rooms[entry.room] = _Room(entry)
        if self._rank == 0:
            room.begin("queue", begun - entry.queued_seconds).end(ended=begun)

    def _work(self, work: Work, seconds: float, begun: float, now: float) -> None:
        room = self._rooms[work.room]
        room.prefill = room.prefill or room.begin("prefill", begun)
        room.num_steps += 1
        room.compute_seconds += seconds
        if work.end == room.admitted.prompt_len:
            self._end_prefill(room, "", now)

    def _end(self, number: RoomId, now: float, why: str = "the room ended") -> None:
        room = self._rooms.pop(number, None)
        if room is not None:
            self._end_prefill(room, why, now)
            self._end_send(room, why, now)

    def _end_prefill(self, room: _Room, why: str, now: float) -> None:
        if room.prefill is not None:
            tokens = room.admitted.prompt_len - room.admitted.cached_len
            room.prefill.attributes |= {"rank": self._rank, "tokens": tokens, "steps": room.num_steps}
            room.prefill.attributes["compute_seconds"] = room.compute_seconds
            room.prefill.end(why, ended=now)

    def _end_send(self, room: _Room, why: str, now: float) -> None:
        if room.send is not None:
            room.send.attributes |= {"rank": self._rank, "bytes": room.sent_bytes}
            room.send.end(why, ended=now)
