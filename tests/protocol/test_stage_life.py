"""Which directives and which step stream a stage obeys."""

import pytest

from kvmesh.errors import Fenced, Unavailable
from kvmesh.protocol.fence import Fence
from kvmesh.protocol.ids import Generation, Incarnation, Rank
from kvmesh.protocol.life import LifeState, Opening, StageLife, Verdict

G5, G6 = Generation(5), Generation(6)
OWN = Incarnation(77)


def life(rank: int, pp_size: int = 3, fence: Fence | None = None) -> StageLife:
    return StageLife(OWN, "p0", Rank(rank), pp_size, fence or Fence())


def opening(rank: int, generation: Generation = G5, *, pipeline: str = "p0", to: Incarnation = OWN) -> Opening:
    return Opening(pipeline, generation, Rank(rank - 1), to)


def linked(rank: int, generation: Generation = G5, pp_size: int = 3) -> StageLife:
    own = life(rank, pp_size)
    own.ordered(generation)
    assert own.linked()
    return own


def test_the_last_rank_waits_for_the_registrys_word_and_then_begins() -> None:
    own = life(2)
    assert own.judge(opening(2)) is Verdict.WAIT
    own.admitted(G5)
    assert own.judge(opening(2)) is Verdict.BEGIN
    own.begin(G5)
    assert own.serving
    assert own.held == G5


def test_the_last_rank_takes_no_generation_that_was_minted_for_an_earlier_life() -> None:
    own = life(2)
    own.admitted(G6)
    with pytest.raises(Fenced, match="is part of"):
        own.judge(opening(2, G5))


def test_a_middle_rank_takes_only_the_generation_it_linked_under() -> None:
    own = linked(1)
    with pytest.raises(Fenced):
        own.judge(opening(1, G6))
    assert own.judge(opening(1, G5)) is Verdict.BEGIN


def test_a_middle_rank_that_is_not_linked_refuses() -> None:
    with pytest.raises(Fenced, match="not linked"):
        life(1).judge(opening(1))


@pytest.mark.parametrize(
    "wrong",
    [opening(1, pipeline="p1"), opening(1, to=Incarnation(78)), opening(2)],
    ids=["pipeline", "process", "rank"],
)
def test_a_stream_meant_for_another_is_refused(wrong: Opening) -> None:
    """F-D7: another process at the same address is another peer."""
    with pytest.raises(Fenced, match="meant for"):
        linked(1).judge(wrong)


def test_a_higher_generation_ends_the_one_that_runs_and_an_equal_or_lower_one_is_refused() -> None:
    own = linked(1)
    own.begin(G5)
    assert own.judge(opening(1, G6)) is Verdict.GIVE_WAY
    for stale in (G5, Generation(4)):
        with pytest.raises(Fenced):
            own.judge(opening(1, stale))


def test_a_generation_never_begins_twice_in_one_process() -> None:
    fence = Fence()
    first = life(2, fence=fence)
    first.admitted(G5)
    first.begin(G5)
    second = life(2, fence=fence)
    second.admitted(G5)
    with pytest.raises(Fenced, match="was here before"):
        second.judge(opening(2, G5))


def test_rank_0_begins_with_its_admission_and_only_under_the_generation_it_linked() -> None:
    own = linked(0)
    with pytest.raises(Fenced):
        own.admitted(G6)
    assert own.admitted(G5)
    assert own.serving
    assert not own.admitted(G5), "said again after a lease was lost: it serves already"


def test_rank_0_that_is_not_linked_does_not_begin() -> None:
    with pytest.raises(Fenced):
        life(0).admitted(G5)


def test_a_pipeline_of_one_stage_begins_with_its_admission() -> None:
    own = life(0, pp_size=1)
    assert own.admitted(G5)
    assert own.held == G5


def test_a_stage_ordered_to_link_twice_ends_its_life() -> None:
    own = linked(1)
    with pytest.raises(Unavailable, match="twice"):
        own.ordered(G6)


def test_a_life_that_ended_while_it_linked_is_not_linked() -> None:
    own = life(1)
    own.ordered(G5)
    own.end()
    assert not own.linked()
    assert own.state is LifeState.OVER
    assert own.held == 0


def test_only_the_generation_that_runs_is_served() -> None:
    own = linked(1)
    with pytest.raises(Fenced, match="not served"):
        own.require_serving(G5)
    own.begin(G5)
    own.require_serving(G5)
    with pytest.raises(Fenced, match="not served"):
        own.require_serving(G6)
    own.end()
    with pytest.raises(Fenced, match="not served"):
        own.require_serving(G5)
