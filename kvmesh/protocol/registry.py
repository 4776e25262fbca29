"""The registry's core: leases of stages and decoders, rosters, rooms. Events in, directives out.

Called by the bootstrap service; a simulator can drive it as well. It holds no room: it mints one, names its pair, and forgets
it. Knows no stream; `now` comes in.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvmesh.errors import UnknownModel
from kvmesh.protocol.descriptors import Descriptor, check_same_mesh
from kvmesh.protocol.ids import Generation, Incarnation, LeaseId, RoomId, Term, compose
from kvmesh.protocol.placement import Load, Pair, least_loaded
from kvmesh.protocol.roster import Directive, Registrant, Roster


@dataclass(frozen=True, slots=True)
class DecoderRegistrant:
    """A decoder, as it registers."""

    lease: LeaseId
    incarnation: Incarnation
    address: str
    descriptor: Descriptor


@dataclass(slots=True)
class _Lease:
    """One lease stream."""

    heard_at: float
    descriptor: Descriptor
    who: str
    pipeline: str = ""
    """Empty: a decoder."""
    load: Load = field(default_factory=Load)


@dataclass(frozen=True, slots=True)
class Placed:
    """A minted room and where it goes."""

    room: RoomId
    pair: Pair
    decoder: DecoderRegistrant


@dataclass(frozen=True, slots=True)
class MeshLimits:
    """What every member that serves now can hold; zero and empty while nobody does."""

    max_tokens: int = 0
    max_prompt_tokens: int = 0
    model_name: str = ""
    model_fingerprint: str = ""


class Registry:
    """All that a registry knows, in one term."""

    def __init__(self, term: Term, *, lease_seconds: float, heartbeat_seconds: float, max_waiting_rooms: int) -> None:
        self.term = term
        self.rooms_minted = 0
        self.rosters: dict[str, Roster] = {}
        self.decoders: dict[Incarnation, DecoderRegistrant] = {}
        self._lease_seconds, self._heartbeat_seconds = lease_seconds, heartbeat_seconds
        self._max_waiting_rooms = max_waiting_rooms
        self._leases: dict[LeaseId, _Lease] = {}
        self._generations = 0
        self._orders = 0
        self._ticked_at: float | None = None

    # Events.

    def register_stage(self, pipeline: str, stage: Registrant, now: float) -> list[Directive]:
        """A stage opens a lease. Its older lease, if any, is replaced.

        Raises:
            Misfit: it does not fit the mesh or its pipeline; nothing is changed.
        """
        who = f"rank {stage.rank} of {pipeline}"
        self._check_mesh(who, stage.descriptor)
        roster = self.rosters.get(pipeline) or Roster(pipeline, stage.pp_size, self._mint_generation, self._next_order)
        said = roster.register(stage)
        self.rosters[pipeline] = roster
        self._leases[stage.lease] = _Lease(now, stage.descriptor, who, pipeline)
        return said

    def register_decoder(self, decoder: DecoderRegistrant, now: float) -> None:
        """A decoder opens a lease. Its older lease, if any, is replaced.

        Raises:
            Misfit: it does not fit the mesh; nothing is changed.
        """
        self._check_mesh("the decoder", decoder.descriptor)
        older = self.decoders.get(decoder.incarnation)
        if older is not None:
            self._leases.pop(older.lease, None)
        self.decoders[decoder.incarnation] = decoder
        self._leases[decoder.lease] = _Lease(now, decoder.descriptor, "a decoder")

    def linked(self, lease: LeaseId, generation: Generation, now: float) -> list[Directive]:
        """A stage opened its step stream."""
        known = self._heard(lease, now)
        roster = self.rosters.get(known.pipeline) if known is not None else None
        return roster.linked(lease, generation) if roster is not None else []

    def beat(self, lease: LeaseId, load: Load, now: float) -> None:
        """A heartbeat. Of a lease that is over: nothing."""
        known = self._heard(lease, now)
        if known is not None:
            known.load = load

    def lease_lost(self, lease: LeaseId) -> list[Directive]:
        """A lease stream ended. Unknown: nothing."""
        known = self._leases.pop(lease, None)
        if known is None:
            return []
        if not known.pipeline:
            self.decoders = {i: d for i, d in self.decoders.items() if d.lease != lease}
            return []
        roster = self.rosters.get(known.pipeline)
        if roster is None:
            return []
        said = roster.lease_lost(lease)
        if roster.empty:
            del self.rosters[known.pipeline]
        return said

    def tick(self, now: float) -> list[LeaseId]:
        """Leases that are over, to be told to `lease_lost`; called at least every heartbeat.

        A registry that was itself late by a heartbeat knows nothing of the silence: it starts every lease anew.
        """
        late = self._ticked_at is not None and now - self._ticked_at > 2 * self._heartbeat_seconds
        self._ticked_at = now
        if late:
            for lease in self._leases.values():
                lease.heard_at = now
        return [i for i, lease in self._leases.items() if now - lease.heard_at > self._lease_seconds]

    # Rooms.

    def assign(self, model: str, prompt_len: int) -> Placed | None:
        """Mints a room on the least loaded standing pair; None while there is none.

        Raises:
            UnknownModel: members serve, and another model.
            Full: every pair's queue is at its limit.
        """
        served = self.limits.model_name
        if model and served and model != served:
            raise UnknownModel(f"model {model[:80]!r} is not served; {served!r} is", field="model")
        pair = least_loaded(self.pairs(), self._max_waiting_rooms)
        if pair is None:
            return None
        pair.head.place(prompt_len)
        pair.tail.place(prompt_len)
        self.rooms_minted += 1
        return Placed(RoomId(compose(self.term, self.rooms_minted)), pair, self.decoders[pair.decoder])

    def pairs(self) -> Iterator[Pair]:
        """Every pair that stands: a whole pipeline, and a decoder that says it is paired with that generation."""
        for name, roster in sorted(self.rosters.items()):
            head = roster.seats[0].holder
            if not roster.generation or head is None:
                continue
            for incarnation, decoder in sorted(self.decoders.items()):
                tail = self.load(decoder.lease)
                if roster.generation in tail.paired_generations:
                    yield Pair(name, roster.generation, incarnation, self.load(head.lease), tail)

    # The picture.

    @property
    def whole(self) -> list[Roster]:
        """The pipelines that are whole, by name."""
        return [r for _, r in sorted(self.rosters.items()) if r.generation]

    @property
    def limits(self) -> MeshLimits:
        """The smallest limits of all members."""
        members = [lease.descriptor for lease in self._leases.values()]
        if not members:
            return MeshLimits()
        max_tokens = min(d.max_tokens for d in members)
        stages = [d.num_pages * d.page_size for d in self._descriptors(stages=True)]
        decoders = [d.num_pages * d.page_size for d in self._descriptors(stages=False)]
        return MeshLimits(
            max_tokens=min([max_tokens, *decoders]),
            max_prompt_tokens=min([max_tokens - 1, *stages]),
            model_name=members[0].model_name,
            model_fingerprint=members[0].model_fingerprint,
        )

    def load(self, lease: LeaseId) -> Load:
        """The load last told over a lease."""
        known = self._leases.get(lease)
        return known.load if known is not None else Load()

    def age(self, lease: LeaseId, now: float) -> float:
        """Seconds since a lease was heard."""
        known = self._leases.get(lease)
        return max(0.0, now - known.heard_at) if known is not None else 0.0

    def _descriptors(self, *, stages: bool) -> list[Descriptor]:
        return [lease.descriptor for lease in self._leases.values() if bool(lease.pipeline) is stages]

    def _heard(self, lease: LeaseId, now: float) -> _Lease | None:
        known = self._leases.get(lease)
        if known is not None:
            known.heard_at = now
        return known

    def _check_mesh(self, who: str, descriptor: Descriptor) -> None:
        for lease in self._leases.values():
            check_same_mesh(who, descriptor, lease.who, lease.descriptor)

    def _mint_generation(self) -> Generation:
        self._generations += 1
        return Generation(compose(self.term, self._generations))

    def _next_order(self) -> int:
        self._orders += 1
        return self._orders
