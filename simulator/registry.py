"""The registry: `kvmesh.protocol.registry` at the end of leases and calls for rooms. One process has one term.

The highest term ever used is durable; it belongs to the world, as a file belongs to a disk.
"""

from dataclasses import replace

from kvmesh.protocol.directives import Action, Deny, Grant, Refuse, RequestId, Superseded, Tell
from kvmesh.protocol.ids import LeaseId, Term
from kvmesh.protocol.registry import Registry, RegistryLimits
from simulator.messages import (
    Assigned,
    AssignRoom,
    Closed,
    Directed,
    Heartbeat,
    Linked,
    Message,
    RegisterDecoder,
    RegisterStage,
)
from simulator.process import Process, Stream

TICK = "tick"


class RegistryProcess(Process):
    """One process."""

    def __init__(
        self, world: object, name: str, address: str, incarnation: int, limits: RegistryLimits, hold_seconds: float
    ) -> None:
        super().__init__(world, name, address, incarnation)
        self.term: Term = self.world.next_term()
        self.registry = Registry(self.term, limits, self.now)
        self.hold_seconds = hold_seconds
        self.leases: dict[LeaseId, Stream] = {}
        self.asking: dict[RequestId, Stream] = {}

    def start(self) -> None:
        """Keeps time."""
        self._tick_later()

    def opened(self, stream: Stream, first: Message) -> None:
        """A member registers, or a gateway asks."""
        match first:
            case RegisterStage(stage):
                lease = LeaseId(stream.number)
                self.leases[lease] = stream
                self._carry_out(self.registry.register_stage(replace(stage, lease=lease), self.now))
            case RegisterDecoder(decoder):
                lease = LeaseId(stream.number)
                self.leases[lease] = stream
                self._carry_out(self.registry.register_decoder(replace(decoder, lease=lease), self.now))
            case AssignRoom(room):
                request = RequestId(stream.number)
                self.asking[request] = stream
                self._carry_out(self.registry.assign(request, room, self.hold_seconds, self.now))

    def heard(self, stream: Stream, message: Message) -> None:
        """A member's sign of life, or of a link."""
        lease = LeaseId(stream.number)
        match message:
            case Heartbeat(load):
                self._carry_out(self.registry.heartbeat(lease, load, self.now))
            case Linked(generation):
                self._carry_out(self.registry.linked(lease, generation, self.now))

    def lost(self, stream: Stream, end: Closed) -> None:
        """A lease is over, or who asked has left."""
        if self.leases.pop(LeaseId(stream.number), None) is not None:
            self._carry_out(self.registry.lease_lost(LeaseId(stream.number)))
        elif self.asking.pop(RequestId(stream.number), None) is not None:
            self.registry.forget(RequestId(stream.number))

    def take(self, kind: str, item: object) -> None:
        """It has no thread."""
        raise AssertionError(kind)

    def fired(self, timer: str) -> None:
        """Time has passed."""
        self._carry_out(self.registry.tick(self.now))
        self._tick_later()

    def _tick_later(self) -> None:
        self.after(max(0.0, self.registry.due - self.now), TICK)

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Tell(lease, directive):
                    if lease in self.leases:
                        self.send(self.leases[lease], Directed(self.term, directive))
                case Refuse(lease, error):
                    self.close(self.leases.pop(lease, None), Closed.by(error))
                case Grant(request):
                    stream = self.asking.pop(request, None)
                    self.send(stream, Assigned(action))
                    self.close(stream)
                case Deny(request, error):
                    self.close(self.asking.pop(request, None), Closed.by(error))
                case Superseded(term):
                    self.world.superseded(self, term)
