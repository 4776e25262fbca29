"""Recompute or move: each time is the sum that it says, and the break-even is where both are equal."""

import math
import random

import pytest

from kvmesh.sizing.reuse import Compute, Move, break_even_tokens


def test_computing_adds_up_token_by_token_and_step_by_step() -> None:
    compute = Compute(token_seconds=0.001, context_seconds=1e-6, step_seconds=0.02, step_tokens=100)
    steps = sum(0.02 + sum(0.001 + 1e-6 * (begin + i + 0.5) for i in range(100)) for begin in range(0, 1000, 100))
    assert compute.seconds(1000) == pytest.approx(steps)
    assert compute.rate(500) == pytest.approx(1000 / compute.seconds(1000)), "a line: the middle's rate is the mean's"


def test_moving_takes_its_fixed_time_once_and_nothing_for_nothing() -> None:
    move = Move(link_bytes_per_second=1e9, kv_bytes_per_token=1e5, latency_seconds=0.01, tail_seconds=0.002)
    assert move.seconds(0) == 0
    assert move.seconds(1000) == pytest.approx(0.012 + 0.1)


@pytest.mark.parametrize("seed", range(200))
def test_below_the_break_even_computing_is_shorter_and_above_it_moving(seed: int) -> None:
    rng = random.Random(seed)
    compute = Compute(
        token_seconds=10 ** rng.uniform(-6, -2),
        context_seconds=rng.choice((0.0, 10 ** rng.uniform(-11, -5))),
        step_seconds=rng.choice((0.0, 10 ** rng.uniform(-4, -1))),
    )
    move = Move(
        link_bytes_per_second=10 ** rng.uniform(6, 11),
        kv_bytes_per_token=10 ** rng.uniform(3, 6),
        latency_seconds=10 ** rng.uniform(-5, -1),
    )
    even = break_even_tokens(compute, move)
    assert even > 0
    if math.isinf(even):
        assert compute.context_seconds == 0
        assert all(compute.seconds(n) < move.seconds(n) for n in (1, 10**3, 10**6, 10**9))
    else:
        assert compute.seconds(even * 0.99) < move.seconds(even * 0.99)
        assert compute.seconds(even * 1.01) > move.seconds(even * 1.01)


def test_a_transfer_that_costs_nothing_before_its_bytes_pays_from_the_first_token_on_a_fast_link() -> None:
    assert break_even_tokens(Compute(token_seconds=0.001), Move(link_bytes_per_second=1e9, kv_bytes_per_token=1e5)) == 0
