"""Steps between the log's records and the messages of prefill.proto. Called where step streams are read and written."""

from collections.abc import Iterator

from kvmesh.errors import InvalidInput
from kvmesh.protocol.ids import Generation, Incarnation, PageId, PairingNumber, Rank, RoomId, StepNumber
from kvmesh.protocol.life import Opening
from kvmesh.protocol.steps import Entry, RoomAdmitted, RoomDone, RoomDropped, Sampling, Step, Work
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1 import types_pb2

PIECE_BYTES = 1 << 20
"""Activations travel in pieces of this size, so that progress shows while a large step is under way."""


def sampling_from(message: types_pb2.Sampling) -> Sampling:
    """How a token is drawn; top_p absent is 1."""
    return Sampling(message.temperature, message.top_k, message.top_p or 1.0, message.seed)


def step_to_messages(step: Step, activations: bytes, num_written: int) -> Iterator[pb.StepsRequest]:
    """One Step and its activations in pieces.

    Args:
        num_written: steps that rank 0 had written, as far as is known here.
    """
    yield pb.StepsRequest(
        step=pb.Step(
            number=step.number,
            entries=[_entry_to(e) for e in step.entries],
            work=[_work_to(w) for w in step.work],
            activation_bytes=len(activations),
            num_written=num_written,
        )
    )
    for at in range(0, len(activations), PIECE_BYTES):
        yield pb.StepsRequest(activations=pb.Activations(payload=activations[at : at + PIECE_BYTES]))


def opening_from(message: pb.StepOpen) -> Opening:
    """How a step stream opens."""
    return Opening(
        message.pipeline, Generation(message.generation), Rank(message.from_rank), Incarnation(message.to_incarnation)
    )


def step_from(message: pb.Step) -> Step:
    """The log's record of a message.

    Raises:
        InvalidInput: an entry of a kind this version does not know. Unlike elsewhere it can't be passed over: the log is
            whole or it is not the log.
    """
    return Step(
        StepNumber(message.number),
        tuple(_entry_from(e) for e in message.entries),
        tuple(_work_from(w) for w in message.work),
    )


def _work_to(work: Work) -> pb.StepWork:
    message = pb.StepWork(room=work.room, begin=work.begin, end=work.end)
    if work.queued_seconds:
        message.queued.FromNanoseconds(int(work.queued_seconds * 1e9))
    return message


def _work_from(message: pb.StepWork) -> Work:
    return Work(RoomId(message.room), message.begin, message.end, message.queued.ToNanoseconds() / 1e9)


def _entry_to(entry: Entry) -> pb.StepEntry:
    if isinstance(entry, RoomDone):
        return pb.StepEntry(done=entry.room)
    if isinstance(entry, RoomDropped):
        return pb.StepEntry(drop=entry.room)
    return pb.StepEntry(
        admit=pb.RoomAdmitted(
            room=entry.room,
            pairing=entry.pairing,
            decoder=entry.decoder,
            prompt_len=entry.prompt_len,
            cached_len=entry.cached_len,
            pages=entry.pages,
            sampling=types_pb2.Sampling(
                temperature=entry.sampling.temperature,
                top_k=entry.sampling.top_k,
                top_p=entry.sampling.top_p,
                seed=entry.sampling.seed,
            ),
            output_index=entry.output_index,
            traceparent=entry.trace,
        )
    )


def _entry_from(message: pb.StepEntry) -> Entry:
    kind = message.WhichOneof("entry")
    if kind == "done":
        return RoomDone(RoomId(message.done))
    if kind == "drop":
        return RoomDropped(RoomId(message.drop))
    if kind != "admit":
        raise InvalidInput("a step holds an entry of an unknown kind", field="step.entries")
    admit = message.admit
    return RoomAdmitted(
        RoomId(admit.room),
        PairingNumber(admit.pairing),
        Incarnation(admit.decoder),
        admit.prompt_len,
        admit.cached_len,
        tuple(PageId(p) for p in admit.pages),
        sampling_from(admit.sampling),
        admit.output_index,
        admit.traceparent,
    )
