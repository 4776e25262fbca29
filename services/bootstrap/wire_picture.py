"""The live picture as a message of bootstrap.proto. Called by the servicer for everyone who watches."""

from google.protobuf.duration_pb2 import Duration

from kvmesh.protocol.members import Load
from kvmesh.protocol.picture import MeshPicture, PipelinePicture, SeatPicture
from kvmesh.protocol.seats import SeatState
from kvmesh.v1 import bootstrap_pb2 as pb
from kvmesh.v1 import types_pb2
from services.bootstrap.wire import member_to

SEAT_STATES = {
    SeatState.EMPTY: pb.SEAT_STATE_EMPTY,
    SeatState.WAITING: pb.SEAT_STATE_WAITING,
    SeatState.LINKING: pb.SEAT_STATE_LINKING,
    SeatState.ADMITTED: pb.SEAT_STATE_ADMITTED,
    SeatState.LOST: pb.SEAT_STATE_LOST,
    SeatState.ENDING: pb.SEAT_STATE_WAITING,
}
"""A stage whose generation is over waits for its own end, as `waits_for` says."""


def picture_to(picture: MeshPicture) -> pb.WatchMeshResponse:
    """The whole picture."""
    return pb.WatchMeshResponse(
        term=picture.term,
        pipelines=[_pipeline_to(p) for p in picture.pipelines],
        decoders=[
            pb.DecoderView(
                member=member_to(d.member), load=_load_to(d.load), heartbeat_age=_duration(d.heartbeat_age_seconds)
            )
            for d in picture.decoders
        ],
        rooms_minted=picture.rooms_minted,
        limits=pb.MeshLimits(
            max_tokens=picture.limits.max_tokens,
            model_name=picture.limits.model_name,
            max_prompt_tokens=picture.limits.max_prompt_tokens,
            model_fingerprint=picture.limits.model_fingerprint,
        ),
    )


def _pipeline_to(pipeline: PipelinePicture) -> pb.PipelineView:
    return pb.PipelineView(
        pipeline=pipeline.name, generation=pipeline.generation, seats=[_seat_to(seat) for seat in pipeline.seats]
    )


def _seat_to(seat: SeatPicture) -> pb.SeatView:
    view = pb.SeatView(
        state=SEAT_STATES[seat.state],
        waits_for=seat.waits_for,
        admitted_order=seat.admitted_order,
        load=_load_to(seat.load),
    )
    if seat.holder is not None:
        layers = seat.holder.descriptor
        view.member.CopyFrom(member_to(seat.holder.member))
        view.layers.CopyFrom(types_pb2.LayerRange(begin=layers.layer_begin, end=layers.layer_end))
    return view


def _load_to(load: Load) -> pb.Heartbeat:
    return pb.Heartbeat(
        waiting_rooms=load.waiting_rooms,
        running_rooms=load.running_rooms,
        free_pages=load.free_pages,
        queued_tokens=load.queued_tokens,
        draining=load.draining,
        paired_generations=load.paired_generations,
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration
