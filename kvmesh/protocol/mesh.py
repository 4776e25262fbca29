"""Who is there: the members of one mesh, their leases, and what can be seen from them. Facts; the registry makes the events.

Called by the registry's core. All members serve one model; which one, the first member says.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.errors import InvalidInput
from kvmesh.protocol.descriptors import check_same_mesh, check_version
from kvmesh.protocol.directives import WholePipeline, WholePipelines
from kvmesh.protocol.ids import Incarnation
from kvmesh.protocol.leases import Lease, Leases
from kvmesh.protocol.members import Decoder, Load, Stage
from kvmesh.protocol.mint import Mint
from kvmesh.protocol.picture import DecoderPicture, MeshLimits, MeshPicture, PipelinePicture, SeatPicture
from kvmesh.protocol.placement import Pair
from kvmesh.protocol.roster import Roster
from kvmesh.protocol.seats import Seat


@dataclass(slots=True)
class Mesh:
    """Pipelines by name, decoders by incarnation, and the leases of both."""

    mint: Mint
    leases: Leases
    rosters: dict[str, Roster] = field(default_factory=dict)
    decoders: dict[Incarnation, Decoder] = field(default_factory=dict)

    def member_of(self, incarnation: Incarnation) -> Stage | Decoder | None:
        """Whoever registered under an incarnation, leased or not."""
        return next((m for m in self._members() if m.member.incarnation == incarnation), None)

    def roster_for(self, stage: Stage) -> Roster:
        """The pipeline a stage belongs to; a new one, not kept yet, where there is none."""
        return self.rosters.get(stage.pipeline) or Roster(stage.pipeline, stage.pp_size, self.mint)

    def check_fit(self, member: Stage | Decoder) -> None:
        """Compares a member that registers with the mesh.

        Raises:
            Misfit: it can't serve the mesh's model, or speaks another protocol; both values.
            InvalidInput: its incarnation is that of another member.
        """
        check_version(member.name, member.descriptor)
        for other in self._members(first=member.pipeline if isinstance(member, Stage) else ""):
            if other.member.incarnation != member.member.incarnation:
                check_same_mesh(member.name, member.descriptor, other.name, other.descriptor)
            elif other.name != member.name:
                raise InvalidInput(f"this incarnation is registered as {other.name}", field="member.incarnation")

    def pairs(self) -> list[Pair]:
        """Every pair that stands and may be given a room, by pipeline's name, then decoder's incarnation."""
        pairs = []
        decoders = [lease for lease in self._decoder_leases() if not lease.load.draining]
        for name, roster in sorted(self.rosters.items()):
            stages = self._leases_of(roster.holders)
            if roster.whole and not any(lease.load.draining for lease in stages):
                paired = [d for d in decoders if roster.whole in d.load.paired_generations]
                pairs += [Pair(name, roster.whole, head=stages[0], decoder=decoder) for decoder in paired]
        return pairs

    def whole(self) -> WholePipelines:
        """The pipelines that serve."""
        whole = [(name, roster) for name, roster in sorted(self.rosters.items()) if roster.whole]
        return WholePipelines(
            tuple(WholePipeline(name, r.whole, tuple(holder.member for holder in r.holders)) for name, r in whole)
        )

    @property
    def limits(self) -> MeshLimits:
        """What every leased member can hold."""
        return MeshLimits.of(self.leases.all())

    def picture(self, now: float) -> MeshPicture:
        """All of it."""
        return MeshPicture(
            term=self.mint.term,
            pipelines=tuple(self._pipeline(roster) for _, roster in sorted(self.rosters.items())),
            decoders=tuple(
                DecoderPicture(lease.member.member, lease.load, max(0.0, now - lease.heard_at))
                for lease in self._decoder_leases()
            ),
            rooms_minted=self.mint.rooms,
            limits=self.limits,
        )

    def _pipeline(self, roster: Roster) -> PipelinePicture:
        return PipelinePicture(roster.name, roster.whole, tuple(self._seat(roster, seat) for seat in roster.seats))

    def _seat(self, roster: Roster, seat: Seat) -> SeatPicture:
        lease = self.leases.get(seat.holder.lease) if seat.holder is not None else None
        return SeatPicture(
            state=seat.state,
            holder=seat.holder,
            waits_for=roster.waits_for(seat.holder.lease) if seat.holder is not None else "",
            admitted_order=seat.admitted_order,
            load=lease.load if lease is not None else Load(),
        )

    def _decoder_leases(self) -> list[Lease]:
        return self._leases_of([decoder for _, decoder in sorted(self.decoders.items())])

    def _leases_of(self, members: Sequence[Stage | Decoder]) -> list[Lease]:
        return [lease for member in members if (lease := self.leases.get(member.lease)) is not None]

    def _members(self, first: str = "") -> list[Stage | Decoder]:
        """All, leased or not, in one order whatever they arrived in: the stages of pipeline `first` lead."""
        rosters = sorted(self.rosters.items(), key=lambda item: (item[0] != first, item[0]))
        stages = [stage for _, roster in rosters for stage in roster.stages]
        return [*stages, *(decoder for _, decoder in sorted(self.decoders.items()))]
