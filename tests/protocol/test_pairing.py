from itertools import permutations

import pytest

from kvmesh.errors import Misfit
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import Generation, PairingNumber, Rank
from kvmesh.protocol.pairing import Ask, Pairing, PairingState

LAYERS = 6


def pairing(pp_size: int) -> Pairing:
    return Pairing(PairingNumber(1), Generation(1), pp_size, LAYERS, 2)


def shard(rank: int, pp_size: int) -> ShardSpan:
    return ShardSpan(rank * LAYERS // pp_size, (rank + 1) * LAYERS // pp_size, 0, 2)


def test_a_single_stage_is_dialled_as_the_head() -> None:
    one = pairing(1)
    assert one.start() == [Ask.DIAL_HEAD]
    assert one.linked(Rank(0), [shard(0, 1)]) == [Ask.OPEN_CONTROL]
    assert one.control_opened() == [Ask.ANNOUNCE]


@pytest.mark.parametrize("order", list(permutations([1, 2, 3])))
def test_rank_0_is_asked_only_when_every_other_rank_has_answered(order: tuple[int, ...]) -> None:
    four = pairing(4)
    assert four.start() == [Ask.DIAL_TAIL]
    for rank in order[:-1]:
        assert four.linked(Rank(rank), [shard(rank, 4)]) == []
    assert four.linked(Rank(order[-1]), [shard(order[-1], 4)]) == [Ask.DIAL_HEAD]
    assert four.linked(Rank(0), [shard(0, 4)]) == [Ask.OPEN_CONTROL], "control is opened last"
    assert four.state is PairingState.OPENING_CONTROL


@pytest.mark.parametrize("answered", [0, 1, 2, 3])
def test_one_stream_lost_ends_the_whole_pairing_at_every_point(answered: int) -> None:
    two = pairing(2)
    two.start()
    steps = [lambda: two.linked(Rank(1), [shard(1, 2)]), lambda: two.linked(Rank(0), [shard(0, 2)]), two.control_opened]
    for step in steps[:answered]:
        step()
    assert two.lost() == [Ask.CLOSE_ALL]
    assert two.lost() == []
    assert two.state is PairingState.ENDED


def test_a_late_answer_of_an_ended_pairing_asks_nothing() -> None:
    two = pairing(2)
    two.start()
    two.lost()
    assert two.linked(Rank(1), [shard(1, 2)]) == []
    assert two.control_opened() == []


def test_shards_that_do_not_tile_the_model_end_in_a_misfit() -> None:
    """F-M4: any cut of the layers is fine, a gap is not."""
    two = pairing(2)
    two.start()
    two.linked(Rank(1), [ShardSpan(4, 6, 0, 2)])
    with pytest.raises(Misfit, match="layer 3"):
        two.linked(Rank(0), [ShardSpan(0, 3, 0, 2)])


def test_uneven_shards_that_tile_are_accepted() -> None:
    two = pairing(2)
    two.start()
    two.linked(Rank(1), [ShardSpan(1, 6, 0, 2)])
    assert two.linked(Rank(0), [ShardSpan(0, 1, 0, 2)]) == [Ask.OPEN_CONTROL]


def test_shards_of_heads_tile_together_with_those_of_other_stages() -> None:
    whole, torn = pairing(2), pairing(2)
    for own in (whole, torn):
        own.start()
        own.linked(Rank(1), [ShardSpan(1, 6, 1, 2), ShardSpan(1, 6, 0, 1)])
    assert whole.linked(Rank(0), [ShardSpan(0, 1, 0, 2)]) == [Ask.OPEN_CONTROL]
    with pytest.raises(Misfit, match="head 0 is sent twice"):
        torn.linked(Rank(0), [ShardSpan(0, 1, 0, 2), ShardSpan(0, 1, 0, 1)])
