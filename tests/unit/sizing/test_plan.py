import random
from dataclasses import replace
from itertools import pairwise

import pytest
from sizings import ROUND, some

from kvmesh.errors import BadConfig
from kvmesh.sizing.outlook import outlook
from kvmesh.sizing.plan import MOST, fewest, full_first, highest_rate, signs

SEEDS = range(5)


def drawn(seed: int) -> tuple[random.Random, float]:
    chance = random.Random(seed)
    return chance, chance.choice([0.3, 2.0, 9.0])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_mesh_bears_the_rate_and_no_smaller_one_does(seed: int) -> None:
    chance, rate = drawn(seed)
    given = some(chance)
    found = fewest(given, rate)
    assert found.holds
    assert found.pipelines is not None
    assert found.decoders is not None
    assert found.pipelines >= rate * given.prompt.mean / given.prefill_rate, "never below what computing alone takes"
    size = found.pipelines * given.num_stages + found.decoders
    for pipelines in range(1, found.pipelines + 3):
        decoders = size - 1 - pipelines * given.num_stages
        assert decoders < 1 or not outlook(given, rate, pipelines, decoders).holds


@pytest.mark.parametrize("seed", SEEDS)
def test_a_higher_rate_never_takes_less_and_never_looks_better(seed: int) -> None:
    chance, rate = drawn(seed)
    given = some(chance)
    rates = [rate, 1.3 * rate, 2 * rate]
    sizes = [(f.pipelines or 0) * given.num_stages + (f.decoders or 0) for f in (fewest(given, r) for r in rates)]
    assert sizes == sorted(sizes)
    fixed = [outlook(given, r, 20, 20) for r in rates]
    for before, after in pairwise(fixed):
        assert all(a.expected <= b.expected for a, b in zip(before.gauges, after.gauges, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_highest_rate_and_the_fewest_processes_agree(seed: int) -> None:
    chance, rate = drawn(seed)
    given = some(chance)
    found = fewest(given, rate)
    assert found.pipelines is not None
    assert found.decoders is not None
    highest = highest_rate(given, found.pipelines, found.decoders)
    assert highest >= rate
    again = fewest(given, highest)
    assert (again.pipelines, again.decoders) == (found.pipelines, found.decoders)
    assert full_first(given, highest, found.pipelines, found.decoders).over


@pytest.mark.parametrize("seed", SEEDS)
def test_more_of_either_never_bears_less(seed: int) -> None:
    chance, _ = drawn(seed)
    given = some(chance)
    pipelines, decoders = chance.randint(1, 5), chance.randint(1, 5)
    highest = highest_rate(given, pipelines, decoders) * (1 - 1e-9)  # it is found by halving
    assert highest_rate(given, pipelines + 1, decoders) >= highest
    assert highest_rate(given, pipelines, decoders + 1) >= highest


def test_the_highest_rate_of_prompts_that_are_alike_is_that_of_the_formula() -> None:
    """95 % within 2.5 s: 0.6 s of prefill, so 1.9 s are left. M/D/1 at 0.66 of its load: 0.66 of the prompts wait, 0.736 s in
    the mean, and 5 % of all longer than 0.736 s x ln(0.66 / 0.05)."""
    highest = highest_rate(replace(ROUND, output_tokens=1), 1, None)
    found = outlook(replace(ROUND, output_tokens=1), highest, 1, None)
    assert found.first_token_p95 == pytest.approx(2.5, rel=1e-6)
    assert highest == pytest.approx(1.321, abs=1e-3)


def test_what_is_full_first_is_what_is_short() -> None:
    enough = replace(ROUND, token_gap_seconds=0.1, decoder_pages=10**6, max_running_rooms=10**4)
    for change, name in (
        ({}, "first token"),
        ({"decoder_pages": 60}, "pages of a decoder"),
        ({"max_running_rooms": 3}, "rooms of a decoder"),
        ({"token_gap_seconds": 0.0105}, "token gap"),
        ({"pipeline_pages": 20}, "pages of a stage"),
    ):
        given = replace(enough, **change)  # type: ignore[arg-type]
        over = full_first(given, highest_rate(given, 1, 1), 1, 1).over
        assert [g.name for g in over if g.name.startswith(name)], (name, over)


def test_the_signs_are_what_is_seen_at_the_highest_rate_of_that_side() -> None:
    small = replace(ROUND, decoder_pages=400)
    found = signs(small, 2, 3)
    assert found == signs(small, 2, 3)
    at_most = outlook(small, highest_rate(small, None, 3), None, 3)
    assert found.pages == pytest.approx(at_most.pages / 400)
    assert 0.3 < found.pages < 0.8, "95 % of the time it is all"
    assert found.rooms == pytest.approx(at_most.rooms)
    assert found.queued_prefill_seconds == pytest.approx(
        outlook(small, highest_rate(small, 2, None), 2, None).queued_prefill_seconds
    )


def test_a_load_for_thousands_is_refused() -> None:
    with pytest.raises(BadConfig, match=f"more than {MOST}"):
        fewest(ROUND, 1e6)
