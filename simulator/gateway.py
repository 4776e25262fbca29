"""A gateway: `kvmesh.protocol.request` with streams to the registry and to decoders, as services/gateway has them.

It owns its requests; a client's cancel and a request's deadline are its own timers.
"""

from dataclasses import dataclass

from kvmesh.errors import DeadlineExceeded, Fault, Retry, Unavailable
from kvmesh.protocol.directives import Grant
from kvmesh.protocol.placement import RoomRequest
from kvmesh.protocol.request import Request
from simulator.messages import Assigned, AssignRoom, Closed, Generate, Message, Tokens
from simulator.process import Process, Stream

AWAY = ("unreachable", "stopping")
"""Reasons by which a registry is away: another one, or the same, comes back."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client asks for."""

    number: int
    arrives: float
    prompt_len: int
    output_len: int
    deadline_seconds: float
    cancelled_after: float | None = None
    """From its arrival; None for never."""
    gateway: int = 0


@dataclass(slots=True)
class Served:
    """A request at the gateway."""

    wish: Wish
    request: Request
    assigning: Stream | None = None
    generating: Stream | None = None


class GatewayProcess(Process):
    """One process."""

    def __init__(self, world: object, name: str, address: str, incarnation: int, max_attempts: int) -> None:
        super().__init__(world, name, address, incarnation)
        self.max_attempts = max_attempts
        self.open: dict[int, Served] = {}
        self.by_stream: dict[int, Served] = {}

    def ask(self, wish: Wish) -> None:
        """A client's request comes."""
        served = self.open[wish.number] = Served(wish, Request(wish.output_len, self.max_attempts))
        self.after(wish.deadline_seconds, f"deadline {wish.number}")
        if wish.cancelled_after is not None:
            self.after(wish.cancelled_after, f"cancel {wish.number}")
        self._assign(served)

    def cancel(self, number: int) -> None:
        """The client leaves."""
        served = self.open.get(number)
        if served is not None:
            self._end(served, "cancelled")

    def _assign(self, served: Served) -> None:
        wish, request = served.wish, served.request
        room = RoomRequest(
            "",
            wish.prompt_len + len(request.output),
            request.left,
            tuple(generation for generation, _ in request.rooms),
            tuple(decoder for _, decoder in request.rooms),
        )
        served.assigning = self.dial("registry", "assign", AssignRoom(room))
        self.by_stream[served.assigning.number] = served

    def _generate(self, served: Served, grant: Grant) -> None:
        wish, request = served.wish, served.request
        request.begin_attempt(grant.generation, grant.decoder.incarnation)
        generate = Generate(
            grant.room,
            grant.generation,
            grant.decoder.incarnation,
            wish.number,
            wish.prompt_len + len(request.output),
            len(request.output),
            wish.output_len,
        )
        self.world.witness.granted(self, wish.number, grant)
        served.generating = self.dial(grant.decoder.address, "generate", generate)
        self.by_stream[served.generating.number] = served

    def opened(self, stream: Stream, first: Message) -> None:
        """Nobody dials it here; clients are timers."""
        raise AssertionError(first)

    def heard(self, stream: Stream, message: Message) -> None:
        """A room, or tokens."""
        served = self.by_stream.get(stream.number)
        if served is None:
            return
        if isinstance(message, Assigned):
            served.assigning = None
            self._hang_up(stream)
            self._generate(served, message.grant)
            return
        assert isinstance(message, Tokens)
        try:
            served.request.take(message.index, message.tokens, last=message.last)
        except Fault as error:
            self.close(stream, Closed.by(error))
            self.lost(stream, Closed.by(error))
            return
        self.world.witness.delivered(self, served.wish, message)
        if served.request.finished:
            self._end(served, "")

    def lost(self, stream: Stream, end: Closed) -> None:
        """No room, or a room lost: asks again where that may help."""
        served = self.by_stream.pop(stream.number, None)
        if served is None:
            return
        error = end.raised() if end.error else Unavailable("it ended without its last token", reason="room_lost")
        if stream is served.assigning:
            served.assigning = None
            if error.reason in AWAY or (served.request.attempts and error.retry is Retry.ROOM):
                self.after(self.world.pause(), f"ask again {served.wish.number}")
            else:
                self._end(served, error.reason)
        else:
            served.generating = None
            if served.request.failed(error):
                self.after(self.world.pause(), f"ask again {served.wish.number}")
            else:
                self._end(served, error.reason)

    def _hang_up(self, stream: Stream | None) -> None:
        if stream is not None:
            self.by_stream.pop(stream.number, None)
            self.close(stream, Closed("Cancelled", "cancelled"))

    def _end(self, served: Served, reason: str) -> None:
        number = served.wish.number
        for timer in ("deadline", "cancel", "ask again"):
            self.cancel_timer(f"{timer} {number}")
        self._hang_up(served.assigning)
        self._hang_up(served.generating)
        del self.open[number]
        self.world.witness.answered(self, served.wish, reason, served.request)

    def take(self, kind: str, item: object) -> None:
        """It has no thread."""
        raise AssertionError(kind)

    def fired(self, timer: str) -> None:
        """A pause, a cancel or a deadline is over."""
        name, _, number = timer.rpartition(" ")
        served = self.open.get(int(number))
        if served is None:
            return
        if name == "ask again":
            self._assign(served)
        elif name == "cancel":
            self._end(served, "cancelled")
        else:
            self._end(served, DeadlineExceeded.default_reason)
