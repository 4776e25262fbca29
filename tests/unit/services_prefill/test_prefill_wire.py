import pytest

from kvmesh.errors import InvalidInput
from kvmesh.protocol.ids import Incarnation, PageId, PairingNumber, RoomId, StepNumber
from kvmesh.protocol.steps import RoomAdmitted, RoomDone, RoomDropped, Sampling, Step, Work
from kvmesh.v1 import prefill_pb2 as pb
from services.prefill.wire import PIECE_BYTES, step_from, step_to_messages

BIG = (1 << 63) - 1


def step() -> Step:
    admitted = RoomAdmitted(
        RoomId(BIG),
        PairingNumber(BIG - 1),
        Incarnation(BIG - 2),
        prompt_len=70,
        cached_len=16,
        pages=(PageId(9), PageId(2)),
        sampling=Sampling(temperature=0.5, top_k=3, top_p=0.25, seed=(1 << 64) - 1),
        output_index=4,
    )
    entries = (RoomDone(RoomId(5)), RoomDropped(RoomId(6)), admitted)
    return Step(StepNumber(7), entries, (Work(RoomId(BIG), 0, 32, queued_seconds=0.25), Work(RoomId(8), 3, 4)))


def test_a_step_crosses_the_wire_unchanged() -> None:
    """F-R7: ids keep all their bits."""
    (message,) = step_to_messages(step(), b"", 7)
    read = step_from(pb.StepsRequest.FromString(message.SerializeToString()).step)
    assert read == step()
    assert read.canonical() == step().canonical()


@pytest.mark.parametrize("size", [1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_activations_travel_in_pieces_that_add_up(size: int) -> None:
    sent = bytes(range(256)) * (size // 256 + 1)
    head, *pieces = step_to_messages(step(), sent[:size], 7)
    assert head.step.activation_bytes == size
    assert b"".join(p.activations.payload for p in pieces) == sent[:size]
    assert max(len(p.activations.payload) for p in pieces) <= PIECE_BYTES


def test_an_entry_of_an_unknown_kind_is_a_fault_since_the_log_is_whole_or_nothing() -> None:
    with pytest.raises(InvalidInput, match="unknown kind"):
        step_from(pb.Step(number=0, entries=[pb.StepEntry()]))
