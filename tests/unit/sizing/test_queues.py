import math

import pytest

from kvmesh.sizing.given import StepTimes
from kvmesh.sizing.queues import Occupancy, erlang_c, sharing, waiting, work_seconds


@pytest.mark.parametrize(("servers", "load", "share"), [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (3, 2.0, 4 / 9)])
def test_the_share_that_waits_is_that_of_the_tables(servers: int, load: float, share: float) -> None:
    assert erlang_c(servers, load) == pytest.approx(share)


@pytest.mark.parametrize(
    ("rate", "variation", "servers", "seconds"),
    [
        (0.5, 0, 1, 0.5),  # M/D/1: ρ / 2(1 - ρ)
        (0.5, 1, 1, 1.0),  # M/M/1: ρ / (1 - ρ)
        (0.8, 3, 1, 8.0),  # Pollaczek and Khinchine: 4 times (1 + 3) / 2
        (1.0, 1, 2, 1 / 3),  # M/M/2: a third waits, for 1 / (2 - 1)
    ],
)
def test_the_mean_wait_is_that_of_the_tables(rate: float, variation: float, servers: int, seconds: float) -> None:
    assert waiting(rate, 1.0, variation, servers).mean_seconds == pytest.approx(seconds)


def test_the_wait_falls_off_exponentially_and_its_mean_is_the_area() -> None:
    wait = waiting(1.0, 1.0, 1.0, 2)
    assert wait.exceeds(-0.1) == 1
    assert wait.exceeds(0) == pytest.approx(wait.share)
    assert wait.exceeds(1.0) == pytest.approx(wait.share / math.e)
    assert sum(wait.exceeds(n / 1000) for n in range(20_000)) / 1000 == pytest.approx(wait.mean_seconds, rel=1e-2)


def test_nobody_waits_without_load_or_for_servers_without_end() -> None:
    for wait in (waiting(0, 1, 1, 1), waiting(99, 1, 1, None)):
        assert (wait.mean_seconds, wait.exceeds(0)) == (0, 0)


@pytest.mark.parametrize("rate", [2.0, 5.0])
def test_servers_that_get_more_than_they_can_do_are_waited_for_without_end(rate: float) -> None:
    wait = waiting(rate, 1.0, 0.0, 2)
    assert wait.mean_seconds == math.inf
    assert wait.exceeds(1e9) == 1


def test_work_in_a_single_queue_is_what_an_arrival_waits_for() -> None:
    for variation in (0.0, 1.0, 2.5):
        wait = waiting(0.7, 1.0, variation, 1).mean_seconds
        assert work_seconds(0.7, 1.0, variation, wait) == pytest.approx(wait)


def test_rooms_whose_step_is_always_as_long_are_poisson() -> None:
    rooms = sharing(100.0, StepTimes(((1, 0.02), (2, 0.02))), 64)
    assert rooms is not None
    assert (rooms.mean, rooms.variance) == (pytest.approx(2), pytest.approx(2))
    assert rooms.shares[0] == pytest.approx(math.exp(-2))


def test_rooms_whose_step_grows_with_each_share_one_server() -> None:
    rooms = sharing(50.0, StepTimes(((1, 0.01), (2, 0.02))), 64)
    assert rooms is not None
    assert rooms.shares[:3] == pytest.approx((0.5, 0.25, 0.125))
    assert rooms.mean == pytest.approx(1)


@pytest.mark.parametrize("steps_a_second", [100.0, 150.0, 99.99])
def test_rooms_that_are_more_and_more_are_told_as_none(steps_a_second: float) -> None:
    assert sharing(steps_a_second, StepTimes(((1, 0.01), (2, 0.02))), 64) is None


def test_thousands_of_rooms_are_no_trouble() -> None:
    rooms = sharing(100_000.0, StepTimes(((1, 0.02), (2, 0.02))), 4000)
    assert rooms is not None
    assert rooms.mean == pytest.approx(2000)


def test_a_gap_counts_once_for_each_of_its_tokens() -> None:
    step = StepTimes(((1, 0.01), (9, 0.09)))
    half_alone = Occupancy((0.0, 0.5, *[0.0] * 7, 0.5))
    # 50 tokens a second alone, and 50 in steps of nine: half of the gaps are short.
    assert half_alone.gap_quantile(step, 0.49) == 0.01
    assert half_alone.gap_quantile(step, 0.51) == pytest.approx(0.09)
    assert Occupancy((1.0,)).gap_quantile(step, 0.95) == 0.01


def test_steps_are_lines_between_what_was_measured_level_before_and_on_behind() -> None:
    step = StepTimes(((2, 0.02), (4, 0.03), (8, 0.04)))
    assert [step(n) for n in (1, 2, 3, 4, 6, 8, 12)] == pytest.approx([0.02, 0.02, 0.025, 0.03, 0.035, 0.04, 0.05])
