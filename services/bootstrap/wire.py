"""Registrations, loads and pictures between the core's records and the messages of bootstrap.proto; checks what comes in."""

import re

from google.protobuf.duration_pb2 import Duration

from kvmesh.errors import InvalidInput, Misfit
from kvmesh.protocol.descriptors import Descriptor
from kvmesh.protocol.ids import Generation, Incarnation, LeaseId, Rank
from kvmesh.protocol.placement import Load
from kvmesh.protocol.registry import DecoderRegistrant, Registry
from kvmesh.protocol.roster import Ask, Directive, Registrant, Roster, Seat, SeatState
from kvmesh.protocol.version import PROTOCOL_VERSION
from kvmesh.v1 import bootstrap_pb2 as pb
from kvmesh.v1 import types_pb2

_PIPELINE_NAME = re.compile(r"[a-z0-9-]{1,63}")
_MAX_PP_SIZE = 256

SEAT_STATES = {
    SeatState.EMPTY: pb.SEAT_STATE_EMPTY,
    SeatState.WAITING: pb.SEAT_STATE_WAITING,
    SeatState.LINKING: pb.SEAT_STATE_LINKING,
    SeatState.ADMITTED: pb.SEAT_STATE_ADMITTED,
    SeatState.LOST: pb.SEAT_STATE_LOST,
}


def stage_from(message: pb.StageRegistration, lease: LeaseId) -> Registrant:
    """A stage's registration, checked.

    Raises:
        InvalidInput: a field is missing or out of range; named.
        Misfit: another protocol version.
    """
    _check_member(message.member)
    if not _PIPELINE_NAME.fullmatch(message.pipeline):
        raise InvalidInput("pipeline must match [a-z0-9-]{1,63}", field="pipeline")
    if not 1 <= message.pp_size <= _MAX_PP_SIZE:
        raise InvalidInput(f"pp_size is {message.pp_size}; 1 to {_MAX_PP_SIZE} is allowed", field="pp_size")
    if message.rank >= message.pp_size:
        raise InvalidInput(f"rank {message.rank} is not below pp_size {message.pp_size}", field="rank")
    return Registrant(
        lease,
        Incarnation(message.member.incarnation),
        message.member.address,
        Rank(message.rank),
        message.pp_size,
        _descriptor_from(message),
        Generation(message.held_generation),
    )


def decoder_from(message: pb.DecoderRegistration, lease: LeaseId) -> DecoderRegistrant:
    """A decoder's registration, checked.

    Raises:
        InvalidInput, Misfit: see stage_from.
    """
    _check_member(message.member)
    descriptor = _descriptor_from(message)
    if (descriptor.layer_begin, descriptor.layer_end) != (0, descriptor.num_layers):
        held = f"[{descriptor.layer_begin}, {descriptor.layer_end})"
        raise InvalidInput(
            f"a decoder holds all of {descriptor.num_layers} layers, not {held}", field="descriptor.layers"
        )
    return DecoderRegistrant(lease, Incarnation(message.member.incarnation), message.member.address, descriptor)


def _check_member(member: types_pb2.Member) -> None:
    if member.incarnation == 0:
        raise InvalidInput("incarnation is missing", field="member.incarnation")
    if not member.address:
        raise InvalidInput("address is missing", field="member.address")


def _descriptor_from(message: pb.StageRegistration | pb.DecoderRegistration) -> Descriptor:
    told = message.descriptor
    if not message.HasField("descriptor"):
        raise InvalidInput("descriptor is missing", field="descriptor")
    if told.protocol_version != PROTOCOL_VERSION:
        raise Misfit(
            f"protocol_version: the member speaks {told.protocol_version}, the registry {PROTOCOL_VERSION}",
            field="protocol_version",
        )
    for name in (
        "num_layers",
        "num_kv_heads",
        "head_dim",
        "page_size",
        "num_pages",
        "max_tokens",
        "vocab_size",
        "dtype",
    ):
        if getattr(told, name) == 0:
            raise InvalidInput(f"{name} is 0 or missing", field=f"descriptor.{name}")
    if not told.model_name or not told.model_fingerprint:
        raise InvalidInput("model_name and model_fingerprint are needed", field="descriptor.model_name")
    layers = told.layers
    if not layers.begin < layers.end <= told.num_layers:
        raise InvalidInput(
            f"layers [{layers.begin}, {layers.end}) lie outside the model's {told.num_layers}",
            field="descriptor.layers",
        )
    return Descriptor(
        protocol_version=told.protocol_version,
        model_name=told.model_name,
        model_fingerprint=told.model_fingerprint,
        dtype=told.dtype,
        num_layers=told.num_layers,
        num_kv_heads=told.num_kv_heads,
        head_dim=told.head_dim,
        page_size=told.page_size,
        num_pages=told.num_pages,
        max_tokens=told.max_tokens,
        layer_begin=layers.begin,
        layer_end=layers.end,
        vocab_size=told.vocab_size,
    )


def load_from(message: pb.Heartbeat) -> Load:
    """A heartbeat's load."""
    return Load(
        message.waiting_rooms,
        message.running_rooms,
        message.free_pages,
        message.queued_tokens,
        message.draining,
        tuple(Generation(g) for g in message.paired_generations),
    )


def directive_to(said: Directive, term: int) -> pb.RegisterStageResponse:
    """A directive down a stage's lease."""
    message = pb.RegisterStageResponse(term=term)
    if said.ask is Ask.LINK and said.next is not None:
        member = types_pb2.Member(incarnation=said.next.incarnation, address=said.next.address)
        message.link_next.CopyFrom(pb.LinkNext(next=member, generation=said.generation))
    elif said.ask is Ask.ADMIT:
        message.admitted.CopyFrom(pb.Admitted(generation=said.generation))
    elif said.ask is Ask.WITHDRAW:
        message.withdrawn.CopyFrom(pb.Withdrawn(generation=said.generation, reason=said.reason))
    return message


def whole_to(registry: Registry) -> pb.WholePipelines:
    """The live list for decoders."""
    return pb.WholePipelines(
        pipelines=[
            pb.WholePipeline(
                pipeline=roster.name,
                generation=roster.generation,
                stages=[_member_to(seat.holder) for seat in roster.seats if seat.holder is not None],
            )
            for roster in registry.whole
        ]
    )


def picture_to(registry: Registry, now: float) -> pb.WatchMeshResponse:
    """The whole picture."""
    limits = registry.limits
    return pb.WatchMeshResponse(
        term=registry.term,
        pipelines=[_pipeline_to(registry, r) for _, r in sorted(registry.rosters.items())],
        decoders=[
            pb.DecoderView(
                member=_member_to(decoder),
                load=_load_to(registry.load(decoder.lease)),
                heartbeat_age=_duration(registry.age(decoder.lease, now)),
            )
            for _, decoder in sorted(registry.decoders.items())
        ],
        rooms_minted=registry.rooms_minted,
        limits=pb.MeshLimits(
            max_tokens=limits.max_tokens,
            model_name=limits.model_name,
            max_prompt_tokens=limits.max_prompt_tokens,
            model_fingerprint=limits.model_fingerprint,
        ),
    )


def _pipeline_to(registry: Registry, roster: Roster) -> pb.PipelineView:
    return pb.PipelineView(
        pipeline=roster.name,
        generation=roster.generation,
        seats=[_seat_to(registry, roster, seat) for seat in roster.seats],
    )


def _seat_to(registry: Registry, roster: Roster, seat: Seat) -> pb.SeatView:
    view = pb.SeatView(state=SEAT_STATES[seat.state], admitted_order=seat.admitted_order)
    if seat.holder is not None:
        view.member.CopyFrom(_member_to(seat.holder))
        view.waits_for = roster.waits_for(seat.holder.lease)
        layers = seat.holder.descriptor
        view.layers.CopyFrom(types_pb2.LayerRange(begin=layers.layer_begin, end=layers.layer_end))
        view.load.CopyFrom(_load_to(registry.load(seat.holder.lease)))
    return view


def _member_to(member: Registrant | DecoderRegistrant) -> types_pb2.Member:
    return types_pb2.Member(incarnation=member.incarnation, address=member.address)


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
