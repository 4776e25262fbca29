import random
from itertools import pairwise

import pytest

from kvmesh.errors import Corrupt, Misfit
from kvmesh.protocol.coverage import Arrival, Coverage, ShardSpan, Spans, check_tiling
from kvmesh.protocol.ids import Rank

SHARDS = {Rank(0): ShardSpan(0, 2, 0, 4), Rank(1): ShardSpan(2, 5, 0, 4)}


def cover(begin: int = 0, end: int = 8) -> Coverage:
    return Coverage({rank: [shard] for rank, shard in SHARDS.items()}, begin, end)


def piece(first: int, last: int) -> ShardSpan:
    return ShardSpan(first, last, 0, 4)


def test_complete_means_every_shard_and_not_any_one() -> None:
    """F-C1: two stages with the same token ranges do not count for each other."""
    coverage = cover()
    assert coverage.offer(Rank(0), piece(0, 2), 0, 8) is Arrival.NEW
    assert not coverage.complete
    assert coverage.offer(Rank(1), piece(2, 5), 0, 4) is Arrival.NEW
    assert not coverage.complete
    assert coverage.offer(Rank(1), piece(2, 5), 4, 8) is Arrival.NEW
    assert coverage.complete


def test_a_repeat_is_not_to_be_written() -> None:
    coverage = cover()
    coverage.offer(Rank(0), piece(0, 2), 0, 8)
    for begin, end in ((0, 8), (2, 5)):
        assert coverage.offer(Rank(0), piece(0, 1), begin, end) is Arrival.REPEAT
    assert not coverage.complete


@pytest.mark.parametrize(
    ("rank", "what", "begin", "end"),
    [
        (0, piece(0, 3), 0, 8),
        (0, piece(2, 5), 0, 8),
        (1, piece(0, 2), 0, 8),
        (1, piece(2, 2), 0, 8),
        (0, piece(0, 2), 0, 9),
        (0, piece(0, 2), 1, 3),
        (0, piece(0, 2), 4, 4),
        (0, ShardSpan(0, 2, 0, 2), 2, 8),
        (2, piece(0, 2), 0, 8),
    ],
)
def test_what_lies_outside_the_plan_is_refused(rank: int, what: ShardSpan, begin: int, end: int) -> None:
    """F-C3: layers are told by their global ids, never by position. Tokens [2, 8) are planned."""
    coverage = cover(2, 8)
    with pytest.raises(Corrupt, match=r"plan|shard"):
        coverage.offer(Rank(rank), what, begin, end)
    coverage.offer(Rank(0), piece(0, 2), 2, 8)
    coverage.offer(Rank(1), piece(2, 5), 2, 8)
    assert coverage.complete


@pytest.mark.parametrize(("layers", "begin", "end"), [((0, 2), 3, 6), ((0, 1), 0, 8), ((1, 2), 3, 5)])
def test_a_partial_overlap_is_refused_and_counts_nothing(layers: tuple[int, int], begin: int, end: int) -> None:
    coverage = cover()
    coverage.offer(Rank(0), piece(0, 2), 0, 4)
    with pytest.raises(Corrupt, match="again in part"):
        coverage.offer(Rank(0), piece(*layers), begin, end)
    coverage.offer(Rank(0), piece(0, 2), 4, 8)
    coverage.offer(Rank(1), piece(2, 5), 0, 8)
    assert coverage.complete


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_any_cut_completes_exactly_with_the_last_piece(seed: int) -> None:
    rng = random.Random(seed)
    length = rng.randint(1, 40)
    pieces: list[tuple[Rank, ShardSpan, int, int]] = []
    for rank, shard in SHARDS.items():
        layer_cuts = sorted({shard.layer_begin, shard.layer_end, rng.randint(shard.layer_begin, shard.layer_end)})
        for low, high in pairwise(layer_cuts):
            token_cuts = sorted({0, length, *(rng.randint(0, length) for _ in range(4))})
            pieces += [(rank, piece(low, high), a, b) for a, b in pairwise(token_cuts)]
    rng.shuffle(pieces)
    coverage = cover(0, length)
    for at, (rank, what, begin, end) in enumerate(pieces):
        assert coverage.complete is False
        assert coverage.offer(rank, what, begin, end) is Arrival.NEW, at
    assert coverage.complete


def test_shards_that_tile_the_model_are_accepted() -> None:
    check_tiling(list(SHARDS.values()), 5, 4)
    check_tiling([ShardSpan(0, 2, 0, 2), ShardSpan(2, 5, 0, 4), ShardSpan(0, 2, 2, 4)], 5, 4)


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        ([ShardSpan(0, 2, 0, 4)], "layer 2"),
        ([ShardSpan(0, 3, 0, 4), ShardSpan(2, 5, 0, 4)], "layer 2: head 0 is sent twice"),
        ([ShardSpan(0, 5, 0, 3)], r"decoder holds \[0, 4\)"),
        ([ShardSpan(0, 5, 1, 4)], "head 0 is not sent"),
        ([ShardSpan(0, 6, 0, 4)], "outside the model's 5"),
        ([], "layer 0"),
        ([ShardSpan(0, 5, 0, 4), ShardSpan(0, 5, 4, 4)], r"heads \[4, 4\) are none"),
    ],
)
def test_a_gap_or_an_overlap_of_shards_is_a_misfit(shards: list[ShardSpan], says: str) -> None:
    with pytest.raises(Misfit, match=says):
        check_tiling(shards, 5, 4)


@pytest.mark.parametrize("seed", range(20))
def test_spans_agree_with_a_plain_set(seed: int) -> None:
    rng = random.Random(seed)
    spans, plain = Spans(), set()
    for _ in range(60):
        begin = rng.randint(0, 50)
        end = begin + rng.randint(1, 8)
        inside = len(plain & set(range(begin, end)))
        assert spans.overlap(begin, end) == inside
        if inside == 0:
            spans.add(begin, end)
            plain |= set(range(begin, end))


def test_two_ranks_that_send_the_same_layers_count_apart() -> None:
    """F-C2: halves of the heads. Whoever sends a piece is told by the link it came on."""
    halves = {Rank(0): ShardSpan(0, 5, 0, 2), Rank(1): ShardSpan(0, 5, 2, 4)}
    coverage = Coverage({rank: [half] for rank, half in halves.items()}, 0, 8)
    assert coverage.offer(Rank(0), halves[Rank(0)], 0, 8) is Arrival.NEW
    assert coverage.offer(Rank(0), halves[Rank(0)], 0, 8) is Arrival.REPEAT
    assert not coverage.complete
    with pytest.raises(Corrupt):
        coverage.offer(Rank(0), halves[Rank(1)], 0, 8)
    assert coverage.offer(Rank(1), halves[Rank(1)], 0, 8) is Arrival.NEW
    assert coverage.complete


def test_the_shards_of_one_stage_count_apart_and_a_frame_carries_exactly_one() -> None:
    shards = [ShardSpan(0, 5, 0, 1), ShardSpan(0, 5, 1, 4)]
    coverage = Coverage({Rank(0): shards}, 0, 8)
    for heads in ((0, 4), (1, 3), (0, 2), (1, 2)):
        with pytest.raises(Corrupt, match=r"plan of layers \[0, 5\) heads \[0, 1\), layers"):
            coverage.offer(Rank(0), ShardSpan(0, 5, *heads), 0, 8)
    assert coverage.offer(Rank(0), shards[0], 0, 8) is Arrival.NEW
    assert coverage.offer(Rank(0), shards[0], 0, 8) is Arrival.REPEAT
    assert coverage.offer(Rank(0), ShardSpan(0, 2, 1, 4), 0, 8) is Arrival.NEW
    assert not coverage.complete
    assert coverage.offer(Rank(0), ShardSpan(2, 5, 1, 4), 0, 8) is Arrival.NEW
    assert coverage.complete
