"""The registry's core: events in, actions out; the driver carries those out in order.

Called by the bootstrap service, or a simulator. It mints a room, names its pair, and forgets it. `now` comes in with each
event, numbers of leases and requests come from the driver; what is late (of a lease or request that is over) changes nothing.
"""

from dataclasses import dataclass

from kvmesh.errors import Fenced, Full, InvalidInput, KvmeshError, Misfit, Unavailable, UnknownModel
from kvmesh.protocol.directives import (
    Action,
    DecoderAdmitted,
    Deny,
    Grant,
    Refuse,
    RequestId,
    Superseded,
    Tell,
    WaitFor,
    WholePipelines,
)
from kvmesh.protocol.ids import Generation, LeaseId, Term, term_of
from kvmesh.protocol.leases import Leases
from kvmesh.protocol.members import Decoder, Load, Stage
from kvmesh.protocol.mesh import Mesh
from kvmesh.protocol.mint import Mint
from kvmesh.protocol.picture import MeshPicture
from kvmesh.protocol.placement import Pair, RoomRequest, least_loaded


@dataclass(frozen=True, slots=True)
class RegistryLimits:
    """What a registry keeps to."""

    lease_seconds: float = 2.0
    heartbeat_seconds: float = 0.5
    max_waiting_rooms: int = 256
    """At a pipeline or a decoder, before it is passed by; and held here, while no pair stands."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A call for a room that waits for a pair."""

    request: RequestId
    room: RoomRequest
    until: float


class Registry:
    """One registry in one term."""

    def __init__(self, term: Term, limits: RegistryLimits, now: float) -> None:
        self.limits = limits
        self.version = 0
        """Rises with every change of the picture but the passing of time."""
        leases = Leases(lease_seconds=limits.lease_seconds, heartbeat_seconds=limits.heartbeat_seconds, now=now)
        self.mesh = Mesh(Mint(term), leases)
        self._held: list[_Held] = []
        self._told: dict[LeaseId, str | WholePipelines] = {}
        """What was said last: to a stage whom it waits for, to a decoder which pipelines are whole."""
        self._stopped = False

    @property
    def term(self) -> Term:
        """Its term."""
        return self.mesh.mint.term

    @property
    def due(self) -> float:
        """When `tick` is to be called next. A call later than that by a heartbeat renews every lease."""
        return min([self.mesh.leases.due, *(h.until for h in self._held)])

    @property
    def num_held(self) -> int:
        """Calls for a room that wait for a pair."""
        return len(self._held)

    def view(self, now: float) -> MeshPicture:
        """The live picture."""
        return self.mesh.picture(now)

    # Leases.

    def register_stage(self, stage: Stage, now: float) -> list[Action]:
        """A stage opens a lease; an older one of the same incarnation is replaced."""
        refusal = self._check_entry(stage)
        if refusal is not None:
            return refusal
        roster = self.mesh.roster_for(stage)
        older = self.mesh.member_of(stage.member.incarnation)
        try:
            self.mesh.check_fit(stage)
            actions = roster.register(stage)
        except (Misfit, InvalidInput) as error:
            return [Refuse(stage.lease, error)]
        self.mesh.rosters[stage.pipeline] = roster
        return self._settle([*self._open(stage, older, now), *actions])

    def register_decoder(self, decoder: Decoder, now: float) -> list[Action]:
        """A decoder opens a lease; an older one of the same incarnation is replaced."""
        refusal = self._check_entry(decoder)
        if refusal is not None:
            return refusal
        older = self.mesh.member_of(decoder.member.incarnation)
        try:
            self.mesh.check_fit(decoder)
        except (Misfit, InvalidInput) as error:
            return [Refuse(decoder.lease, error)]
        self.mesh.decoders[decoder.member.incarnation] = decoder
        return self._settle([*self._open(decoder, older, now), Tell(decoder.lease, DecoderAdmitted())])

    def linked(self, lease: LeaseId, generation: Generation, now: float) -> list[Action]:
        """A stage's step stream to the next higher rank stands."""
        running = self.mesh.leases.heard(lease, now)
        if running is None or not isinstance(running.member, Stage):
            return []
        return self._settle(self.mesh.rosters[running.member.pipeline].linked(lease, generation))

    def heartbeat(self, lease: LeaseId, load: Load, now: float) -> list[Action]:
        """A member lives, and tells its load."""
        running = self.mesh.leases.heard(lease, now)
        if running is None:
            return []
        changed = running.load != load
        running.load = running.expected = load
        return self._settle([]) if changed else []

    def heard(self, lease: LeaseId, now: float) -> None:
        """A member said something that is no event: it lives."""
        self.mesh.leases.heard(lease, now)

    def lease_lost(self, lease: LeaseId) -> list[Action]:
        """A lease stream ended."""
        return self._settle(self._lose(lease)) if self.mesh.leases.get(lease) is not None else []

    def tick(self, now: float) -> list[Action]:
        """Time has passed: silent leases and calls held for too long are over."""
        actions: list[Action] = []
        for running in self.mesh.leases.expired(now):
            silence = f"nothing was heard for {now - running.heard_at:.1f} s"
            actions.append(Refuse(running.member.lease, Unavailable(silence, reason="lease_expired")))
            actions += self._lose(running.member.lease)
        for held in [h for h in self._held if h.until <= now]:
            self._held.remove(held)
            actions.append(Deny(held.request, self._no_pair()))
        return self._settle(actions) if actions else []

    def stop(self) -> list[Action]:
        """The registry leaves: everyone is refused, now and from now on. Members come back to the next one."""
        self._stopped = True
        actions: list[Action] = [Deny(h.request, _stopping()) for h in self._held]
        actions += [Refuse(lease.member.lease, _stopping()) for lease in self.mesh.leases.all()]
        for lease in self.mesh.leases.all():
            self.mesh.leases.end(lease.member.lease)
        self._held.clear()
        self.mesh.rosters.clear()
        self.mesh.decoders.clear()
        self._told.clear()
        self.version += 1
        return actions

    # Rooms.

    def assign(self, request: RequestId, room: RoomRequest, hold_seconds: float, now: float) -> list[Action]:
        """Somebody asks for a room: granted or denied here and now, or held until a pair stands.

        Args:
            hold_seconds: how long it may be held.
        """
        try:
            if self._stopped:
                raise _stopping()
            for name in ("prompt_len", "max_output_len"):
                if getattr(room, name) < 1:
                    raise InvalidInput(f"{name} is {getattr(room, name)}; at least 1 is needed", field=name)
            granted = self._grant(request, room)
        except KvmeshError as error:
            return [Deny(request, error)]
        if granted is not None:
            return [granted]
        if hold_seconds <= 0:
            return [Deny(request, self._no_pair())]
        if len(self._held) >= self.limits.max_waiting_rooms:
            full = Full(f"{len(self._held)} requests for a room wait already", retry_after_seconds=1.0)
            return [Deny(request, full)]
        self._held.append(_Held(request, room, now + hold_seconds))
        return []

    def forget(self, request: RequestId) -> None:
        """Who asked for a room has left."""
        self._held = [h for h in self._held if h.request != request]

    def _grant(self, request: RequestId, room: RoomRequest) -> Grant | None:
        """A room on the least loaded pair; None while no pair stands.

        Raises:
            UnknownModel, InvalidInput, Full: it can't be had here, or not now.
        """
        served = self.mesh.limits.model_name
        if room.model and served and room.model != served:
            raise UnknownModel(f"model {room.model[:64]!r} is not served here; {served!r} is", field="model")
        pairs = self.mesh.pairs()
        if not pairs:
            return None
        limits = self.limits
        pair: Pair = least_loaded(pairs, room, limits.max_waiting_rooms, limits.heartbeat_seconds)
        pair.place(room)
        self.version += 1
        return Grant(request, self.mesh.mint.room(), pair.pipeline, pair.generation, pair.decoder.member.member)

    def _no_pair(self) -> Unavailable:
        retry = self.limits.heartbeat_seconds
        return Unavailable("no pipeline and decoder are paired", reason="no_pair", retry_after_seconds=retry)

    # What every event shares.

    def _check_entry(self, member: Stage | Decoder) -> list[Action] | None:
        """Why nobody, or not this member, may register now; None when it may."""
        if self._stopped:
            return [Refuse(member.lease, _stopping())]
        held = member.held_generation if isinstance(member, Stage) else Generation(0)
        seen = max(member.highest_term, term_of(held))
        if seen <= self.term:
            return None
        stale = Fenced(f"{member.name} obeys term {seen}; this registry has {self.term}", reason="stale_term")
        return [Refuse(member.lease, stale), *self.stop(), Superseded(seen)]

    def _open(self, member: Stage | Decoder, older: Stage | Decoder | None, now: float) -> list[Action]:
        self.mesh.leases.open(member, now)
        if older is None or self.mesh.leases.end(older.lease) is None:
            return []
        return [Refuse(older.lease, Unavailable("a newer stream of this member took over", reason="lease_replaced"))]

    def _lose(self, lease: LeaseId) -> list[Action]:
        lost = self.mesh.leases.end(lease)
        if lost is None:
            return []
        if isinstance(lost.member, Decoder):
            del self.mesh.decoders[lost.member.member.incarnation]
            return []
        return self.mesh.rosters[lost.member.pipeline].lease_lost(lease)

    def _settle(self, actions: list[Action]) -> list[Action]:
        """What follows from any change: empty pipelines are forgotten; who waits is told for whom, decoders are told which
        pipelines are whole; held calls get their room."""
        self.version += 1
        self.mesh.rosters = {name: roster for name, roster in self.mesh.rosters.items() if roster.stages}
        self._told = {lease: said for lease, said in self._told.items() if self.mesh.leases.get(lease) is not None}
        return [*actions, *self._tell_waiting(), *self._tell_decoders(), *self._grant_held()]

    def _tell_waiting(self) -> list[Action]:
        told: list[Action] = []
        for _, roster in sorted(self.mesh.rosters.items()):
            for stage in roster.stages:
                peer = roster.waits_for(stage.lease)
                if self.mesh.leases.get(stage.lease) is not None and peer != self._told.get(stage.lease, ""):
                    self._told[stage.lease] = peer
                    if peer:
                        told.append(Tell(stage.lease, WaitFor(peer)))
        return told

    def _tell_decoders(self) -> list[Action]:
        whole, told = self.mesh.whole(), list[Action]()
        for _, decoder in sorted(self.mesh.decoders.items()):
            if self._told.get(decoder.lease) != whole:
                self._told[decoder.lease] = whole
                told.append(Tell(decoder.lease, whole))
        return told

    def _grant_held(self) -> list[Action]:
        """First come, first served."""
        answers: list[Action] = []
        while self._held:
            first = self._held[0]
            try:
                answer: Action | None = self._grant(first.request, first.room)
            except KvmeshError as error:
                answer = Deny(first.request, error)
            if answer is None:
                break
            self._held.pop(0)
            answers.append(answer)
        return answers


def _stopping() -> Unavailable:
    return Unavailable("the registry is stopping", reason="stopping")
