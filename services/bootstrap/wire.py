"""The core's records and the messages of bootstrap.proto: what comes in is checked, what goes out is spelled.

Called by the servicer. A field that is missing or out of range is named here, before the core hears of it.
"""

import re

from kvmesh.errors import BadConfig, InvalidInput
from kvmesh.protocol.descriptors import Descriptor
from kvmesh.protocol.directives import (
    Admitted,
    DecoderAdmitted,
    Directive,
    Grant,
    LinkNext,
    WaitFor,
    WholePipelines,
    Withdrawn,
)
from kvmesh.protocol.ids import MAX_TERM, Generation, Incarnation, LeaseId, Rank, Term, term_of
from kvmesh.protocol.members import Decoder, Load, Member, Stage
from kvmesh.protocol.placement import RoomRequest
from kvmesh.rpc.address import parse
from kvmesh.v1 import bootstrap_pb2 as pb
from kvmesh.v1 import types_pb2

_PIPELINE_NAME = re.compile(r"[a-z0-9-]{1,63}")
_MAX_PP_SIZE = 256
"""Far above any pipeline; a roster has a seat for each."""
_MAX_NAME_CHARS = 256
"""Of a model's name or fingerprint; both are in every picture."""
_COUNTS = ("num_layers", "num_kv_heads", "head_dim", "page_size", "num_pages", "max_tokens", "vocab_size")
_DTYPES = {code: name.removeprefix("DTYPE_").lower() for name, code in types_pb2.DType.items() if code}


def stage_from(message: pb.StageRegistration, lease: LeaseId) -> Stage:
    """A stage's registration.

    Raises:
        InvalidInput: a field is missing or out of range; named.
    """
    if not _PIPELINE_NAME.fullmatch(message.pipeline):
        raise InvalidInput(f"pipeline is {message.pipeline[:64]!r}; [a-z0-9-]{{1,63}} is needed", field="pipeline")
    if not 1 <= message.pp_size <= _MAX_PP_SIZE:
        raise InvalidInput(f"pp_size is {message.pp_size}; 1 to {_MAX_PP_SIZE} is needed", field="pp_size")
    if message.rank >= message.pp_size:
        raise InvalidInput(f"rank is {message.rank}, pp_size {message.pp_size}; a lower rank is needed", field="rank")
    if message.held_generation and not 1 <= term_of(message.held_generation) <= MAX_TERM:
        raise InvalidInput("held_generation was minted by no registry", field="held_generation")
    return Stage(
        lease,
        _member_from(message.member),
        message.pipeline,
        Rank(message.rank),
        message.pp_size,
        _descriptor_from(message),
        _term_from(message),
        Generation(message.held_generation),
    )


def decoder_from(message: pb.DecoderRegistration, lease: LeaseId) -> Decoder:
    """A decoder's registration.

    Raises:
        InvalidInput: a field is missing or out of range; named.
    """
    descriptor = _descriptor_from(message)
    if descriptor.layer_begin != 0 or descriptor.layer_end != descriptor.num_layers:
        raise InvalidInput(
            f"a decoder holds all {descriptor.num_layers} layers; "
            f"this one has [{descriptor.layer_begin}, {descriptor.layer_end})",
            field="descriptor.layers",
        )
    return Decoder(lease, _member_from(message.member), descriptor, _term_from(message))


def load_from(message: pb.Heartbeat) -> Load:
    """A heartbeat."""
    return Load(
        message.waiting_rooms,
        message.running_rooms,
        message.free_pages,
        message.queued_tokens,
        message.draining,
        tuple(Generation(g) for g in message.paired_generations),
    )


def room_from(message: pb.AssignRoomRequest) -> RoomRequest:
    """A request for a room; the core checks it."""
    return RoomRequest(
        message.model,
        message.prompt_len,
        message.max_output_len,
        tuple(Generation(g) for g in message.lost_generations),
        tuple(Incarnation(d) for d in message.lost_decoders),
    )


def to_stage(directive: Directive, term: Term) -> pb.RegisterStageResponse:
    """A directive down a stage's lease."""
    message = pb.RegisterStageResponse(term=term)
    match directive:
        case WaitFor(peer):
            message.wait_for.peer = peer
        case LinkNext(peer, generation):
            message.link_next.CopyFrom(pb.LinkNext(next=member_to(peer), generation=generation))
        case Admitted(generation):
            message.admitted.generation = generation
        case Withdrawn(generation, reason):
            message.withdrawn.CopyFrom(pb.Withdrawn(generation=generation, reason=reason))
    return message


def to_decoder(directive: Directive, term: Term) -> pb.RegisterDecoderResponse:
    """A directive down a decoder's lease."""
    message = pb.RegisterDecoderResponse(term=term)
    match directive:
        case DecoderAdmitted():
            message.admitted.SetInParent()
        case WholePipelines(pipelines):
            message.pipelines.SetInParent()
            for whole in pipelines:
                stages = [member_to(stage) for stage in whole.stages]
                message.pipelines.pipelines.add(pipeline=whole.pipeline, generation=whole.generation, stages=stages)
    return message


def assignment_to(grant: Grant) -> types_pb2.RoomAssignment:
    """A minted room."""
    return types_pb2.RoomAssignment(
        room=grant.room, pipeline=grant.pipeline, generation=grant.generation, decoder=member_to(grant.decoder)
    )


def member_to(member: Member) -> types_pb2.Member:
    """A member."""
    return types_pb2.Member(incarnation=member.incarnation, address=member.address)


def _member_from(message: types_pb2.Member) -> Member:
    if message.incarnation == 0:
        raise InvalidInput("incarnation is 0 or missing", field="member.incarnation")
    try:
        address = parse(message.address, field="address")
    except BadConfig as error:
        raise InvalidInput(str(error), field="member.address") from error
    if address.is_wildcard or not address.port:
        raise InvalidInput(f"address is {address}; one that others can dial is needed", field="member.address")
    return Member(Incarnation(message.incarnation), str(address))


def _term_from(message: pb.StageRegistration | pb.DecoderRegistration) -> Term:
    if message.highest_term > MAX_TERM:
        raise InvalidInput(f"highest_term is {message.highest_term}; the limit is {MAX_TERM}", field="highest_term")
    return Term(message.highest_term)


def _descriptor_from(message: pb.StageRegistration | pb.DecoderRegistration) -> Descriptor:
    told = message.descriptor
    if not message.HasField("descriptor"):
        raise InvalidInput("descriptor is missing", field="descriptor")
    for name in _COUNTS:
        if getattr(told, name) == 0:
            raise InvalidInput(f"{name} is 0 or missing", field=f"descriptor.{name}")
    for name in ("model_name", "model_fingerprint"):
        if not 1 <= len(getattr(told, name)) <= _MAX_NAME_CHARS:
            raise InvalidInput(f"{name} is empty or over {_MAX_NAME_CHARS} characters", field=f"descriptor.{name}")
    if told.dtype not in _DTYPES:
        raise InvalidInput(f"dtype is {told.dtype}, which is unknown here", field="descriptor.dtype")
    layers = told.layers
    if not layers.begin < layers.end <= told.num_layers:
        raise InvalidInput(
            f"layers are [{layers.begin}, {layers.end}); a range within [0, {told.num_layers}) is needed",
            field="descriptor.layers",
        )
    return Descriptor(
        protocol_version=told.protocol_version,
        model_name=told.model_name,
        model_fingerprint=told.model_fingerprint,
        dtype=_DTYPES[told.dtype],
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
