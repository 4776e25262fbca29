"""What changed between two pictures of the mesh, as lines for people, in the order it happened. Pure.

Called by `kvmesh up` and `kvmesh status --watch`. A picture is the registry's WatchMesh message; several things may have
happened between two, and the admission order that the registry counts puts them right.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvmesh.protocol.ids import short
from kvmesh.v1 import bootstrap_pb2 as pb


def decoder_name(incarnation: int) -> str:
    """A decoder for people: the first digits of its incarnation, as in its log lines."""
    return f"decoder {incarnation:016x}"[:14]


@dataclass(slots=True)
class News:
    """The picture told last."""

    _told: pb.WatchMeshResponse = field(default_factory=pb.WatchMeshResponse)

    def since(self, picture: pb.WatchMeshResponse) -> list[str]:
        """What happened between the picture told last and this one."""
        before, self._told = self._told, picture
        lines = []
        if before.term and picture.term != before.term:
            lines.append(f"the registry restarted: term {picture.term}")
        known = {p.pipeline: p for p in before.pipelines}
        for pipeline in picture.pipelines:
            old = known.get(pipeline.pipeline, pb.PipelineView())
            lines += _losses(old, pipeline)
            lines += _arrivals(old, pipeline)
        lines += _admissions(known, picture)
        lines += _decoders(before, picture)
        return lines


def _losses(old: pb.PipelineView, new: pb.PipelineView) -> Iterator[str]:
    for rank, (before, seat) in enumerate(_seats(old, new)):
        gone = seat.member.incarnation != before.member.incarnation
        lost = seat.state == pb.SEAT_STATE_LOST and before.state != pb.SEAT_STATE_LOST
        if before.member.incarnation and (gone or lost):
            yield f"{new.pipeline} rank {rank} lost"
    if old.generation and new.generation != old.generation:
        yield f"{new.pipeline} generation {short(old.generation)} is over"


def _arrivals(old: pb.PipelineView, new: pb.PipelineView) -> Iterator[str]:
    for rank, (before, seat) in enumerate(_seats(old, new)):
        who = f"{new.pipeline} rank {rank}"
        if seat.member.incarnation and seat.member.incarnation != before.member.incarnation:
            layers = f"layers {seat.layers.begin}:{seat.layers.end}"
            yield f"{who} registered ({layers})"
        if seat.load.draining and not before.load.draining:
            yield f"{who} drains"
        if seat.waits_for and seat.waits_for != before.waits_for:
            yield f"{who} waits for {seat.waits_for}"


def _admissions(known: dict[str, pb.PipelineView], picture: pb.WatchMeshResponse) -> Iterator[str]:
    admitted = []
    for new in picture.pipelines:
        old = known.get(new.pipeline, pb.PipelineView())
        for rank, (before, seat) in enumerate(_seats(old, new)):
            if seat.admitted_order and seat.admitted_order != before.admitted_order:
                admitted.append((seat.admitted_order, new, rank))
    for _, new, rank in sorted(admitted, key=lambda a: a[0]):
        whole = f" → {new.pipeline} whole (generation {short(new.generation)})" if rank == 0 and new.generation else ""
        yield f"{new.pipeline} rank {rank} admitted{whole}"


def _decoders(before: pb.WatchMeshResponse, picture: pb.WatchMeshResponse) -> Iterator[str]:
    names = {p.generation: p.pipeline for m in (before, picture) for p in m.pipelines if p.generation}
    known = {d.member.incarnation: d for d in before.decoders}
    present = {d.member.incarnation for d in picture.decoders}
    for incarnation in known:
        if incarnation not in present:
            yield f"{decoder_name(incarnation)} lost"
    for decoder in picture.decoders:
        who, old = decoder_name(decoder.member.incarnation), known.get(decoder.member.incarnation)
        if old is None:
            yield f"{who} registered"
        paired, was = set(decoder.load.paired_generations), set(old.load.paired_generations if old else ())
        for generation in sorted(was - paired):
            yield f"{who} parted from {names.get(generation, 'a pipeline')} (generation {short(generation)})"
        for generation in sorted(paired - was):
            yield f"{who} paired with {names.get(generation, 'a pipeline')} (generation {short(generation)})"
        if decoder.load.draining and not (old and old.load.draining):
            yield f"{who} drains"


def _seats(old: pb.PipelineView, new: pb.PipelineView) -> Iterator[tuple[pb.SeatView, pb.SeatView]]:
    """Seats by rank: before and now."""
    for rank, seat in enumerate(new.seats):
        yield (old.seats[rank] if rank < len(old.seats) else pb.SeatView()), seat
