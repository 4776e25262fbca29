"""A registry's core, its members and all it asked for; for the tests of the registry."""

from itertools import count

from registry_peers import descriptor

from kvmesh.errors import KvmeshError
from kvmesh.protocol.directives import (
    Action,
    Deny,
    Grant,
    LinkNext,
    Refuse,
    RequestId,
    Tell,
)
from kvmesh.protocol.ids import Incarnation, LeaseId, Rank, Term
from kvmesh.protocol.members import Decoder, Load, Member, Stage
from kvmesh.protocol.placement import RoomRequest
from kvmesh.protocol.registry import Registry, RegistryLimits

ROOM = RoomRequest("", 10, 10)
LIMITS = RegistryLimits(lease_seconds=2.0, heartbeat_seconds=0.5, max_waiting_rooms=4)


class Mesh:
    """A registry in term 3, its members, and all it ever asked for."""

    def __init__(self) -> None:
        self.registry = Registry(Term(3), LIMITS, now=0.0)
        self.now = 0.0
        self.actions: list[Action] = []
        self._numbers = count(1)
        self._incarnations = count(100)
        self.incarnation: dict[str, int] = {}
        self.lease: dict[str, LeaseId] = {}

    def stage(self, pipeline: str, rank: int = 0, pp_size: int = 1, **changes: object) -> LeaseId:
        """A stage registers (again, if it did before), and links if told to."""
        given = {n: changes.pop(n) for n in ("highest_term", "held_generation") if n in changes}
        member, lease = self._member(f"{pipeline}/{rank}")
        registration = Stage(
            lease,
            member,
            pipeline,
            Rank(rank),
            pp_size,
            descriptor(rank, pp_size, **changes),
            **given,  # type: ignore[arg-type]
        )
        for action in self.hear(self.registry.register_stage(registration, self.now)):
            if isinstance(action, Tell) and isinstance(action.directive, LinkNext):
                self.hear(self.registry.linked(action.lease, action.directive.generation, self.now))
        return lease

    def decoder(self, name: str, **changes: object) -> LeaseId:
        member, lease = self._member(name)
        self.hear(self.registry.register_decoder(Decoder(lease, member, descriptor(**changes)), self.now))
        return lease

    def _member(self, name: str) -> tuple[Member, LeaseId]:
        self.incarnation.setdefault(name, next(self._incarnations))
        self.lease[name] = lease = LeaseId(next(self._numbers))
        return Member(Incarnation(self.incarnation[name]), f"{name}:1"), lease

    def beat(self, name: str, **load: object) -> None:
        if not name.count("/"):
            load = {"paired_generations": tuple(w.generation for w in self.registry.mesh.whole().pipelines)} | load
        told = Load(**({"free_pages": 64} | load))  # type: ignore[arg-type]
        self.hear(self.registry.heartbeat(self.lease[name], told, self.now))

    def ask(self, room: RoomRequest = ROOM, hold_seconds: float = 5.0) -> RequestId:
        request = RequestId(next(self._numbers))
        self.hear(self.registry.assign(request, room, hold_seconds, self.now))
        return request

    def answer(self, request: RequestId) -> Grant | KvmeshError | None:
        """None while it is held."""
        answers = [a for a in self.actions if isinstance(a, Grant | Deny) and a.request == request]
        assert len(answers) <= 1, "answered twice"
        if not answers:
            return None
        return answers[0].error if isinstance(answers[0], Deny) else answers[0]

    def granted(self, room: RoomRequest = ROOM) -> Grant:
        answer = self.answer(self.ask(room))
        assert isinstance(answer, Grant), answer
        return answer

    def said(self, lease: LeaseId) -> list[object]:
        """Everything said down a lease."""
        return [a.directive for a in self.actions if isinstance(a, Tell) and a.lease == lease]

    def refused(self, lease: LeaseId) -> KvmeshError | None:
        return next((a.error for a in self.actions if isinstance(a, Refuse) and a.lease == lease), None)

    def pass_time(self, until: float) -> None:
        while self.registry.due <= until:
            self.now = self.registry.due
            self.hear(self.registry.tick(self.now))
        self.now = until

    def hear(self, actions: list[Action]) -> list[Action]:
        self.actions += actions
        return actions


def paired() -> Mesh:
    mesh = Mesh()
    mesh.stage("p0")
    mesh.decoder("d0")
    mesh.beat("d0")
    return mesh
