"""The way back: what is confirmed, and who is silent."""

import pytest

from kvmesh.errors import Fault
from kvmesh.protocol.chain import Chain, LogPosition
from kvmesh.protocol.ids import Rank, StepNumber

A, B = b"aaaaaaaa", b"bbbbbbbb"


def chain(*, is_last: bool = False) -> Chain:
    return Chain(Rank(1), is_last, heard_at=0.0)


def test_the_last_rank_confirms_what_it_applies() -> None:
    own = chain(is_last=True)
    assert own.applied_here(StepNumber(0), A, 1.0)
    assert own.confirmed == LogPosition(1, A)


def test_a_step_is_confirmed_when_the_rank_behind_applied_it() -> None:
    own = chain()
    assert not own.applied_here(StepNumber(0), A, 1.0)
    assert own.confirmed == LogPosition()
    own.applied_behind(StepNumber(0), A, 2.0)
    assert own.confirmed == LogPosition(1, A)


def test_another_digest_is_a_fault_at_that_very_step_and_names_the_rank() -> None:
    """F-P4, F-P6: two logs that differ are found at once."""
    own = chain()
    own.applied_here(StepNumber(0), A, 1.0)
    with pytest.raises(Fault, match=r"rank 2 applied another step 0"):
        own.applied_behind(StepNumber(0), B, 2.0)
    assert own.confirmed == LogPosition()


@pytest.mark.parametrize("number", [0, 2])
def test_a_confirmation_out_of_order_is_a_fault(number: int) -> None:
    own = chain()
    for step in (0, 1):
        own.applied_here(StepNumber(step), A, 1.0)
    own.applied_behind(StepNumber(0), A, 1.0)
    with pytest.raises(Fault, match="not the next to confirm"):
        own.applied_behind(StepNumber(number), A, 2.0)


def test_silence_counts_from_when_something_is_owed() -> None:
    """F-T9: a rank that owes nothing may be silent for ever; one that owes a step may not."""
    own = chain()
    assert not own.is_behind_silent(1000.0, 2.0)
    own.applied_here(StepNumber(0), A, 1000.0)
    assert not own.is_behind_silent(1002.0, 2.0)
    assert own.is_behind_silent(1002.1, 2.0)
    own.heard(1002.0)
    assert not own.is_behind_silent(1003.9, 2.0)
    own.applied_behind(StepNumber(0), A, 1003.0)
    assert not own.is_behind_silent(2000.0, 2.0)
