"""The tail of a room's transfer, from the spans of its stages and its decoder. All of one host: their times compare."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvmesh.v1.trace_pb2 import ListSpansResponse, Span


@dataclass(frozen=True, slots=True)
class Tail:
    """What of a room's transfer no compute hides, in seconds, and its parts."""

    send: float
    """From the end of the last compute until that stage has written its last frame."""
    arrive: float
    """On until the last frame of any stage is at the decoder. Negative where it was there before `send` was noted."""
    write: float
    """On until all is verified and written."""

    @property
    def seconds(self) -> float:
        """From the end of the last compute until decode may start."""
        return self.send + self.arrive + self.write


def tail_of(answers: Iterable[ListSpansResponse], room: int) -> Tail:
    """The tail of a room that was answered.

    Raises:
        ValueError: a stop of it is not told, or told twice.
    """
    spans = {span.span_id: (answer.process, span) for answer in answers for span in answer.spans if span.room == room}
    prefills = {process: span for process, span in spans.values() if span.name == "prefill"}
    sends = {process: span for process, span in spans.values() if span.name == "send"}
    receives = [span for _, span in spans.values() if span.name == "receive"]
    if not prefills or prefills.keys() != sends.keys() or len(receives) != 1:
        raise ValueError(f"room {room}: {len(prefills)} prefill, {len(sends)} send, {len(receives)} receive")
    last = max(prefills, key=lambda process: _ended(prefills[process]))
    computed, sent, received = _ended(prefills[last]), _ended(sends[last]), _ended(receives[0])
    return Tail(sent - computed, received - sent, float(receives[0].attributes["write_seconds"]))


def _ended(span: Span) -> float:
    """Seconds after the epoch would lose the microseconds: after the epoch's last thousand seconds."""
    return (span.start.ToNanoseconds() + span.duration.ToNanoseconds()) % 10**12 / 1e9
