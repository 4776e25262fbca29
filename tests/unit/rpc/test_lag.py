"""How late a loop is, also while it stands still. The clock is a test's."""

import pytest

from kvmesh.rpc.lag import LoopLag
from kvmesh.telemetry import metrics


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def late() -> float:
    return metrics.page_of("prefill").get_sample_value("kvmesh_loop_late_seconds_total") or 0.0


def test_a_loop_that_beats_in_time_is_not_late(clock: Clock) -> None:
    lag, before = LoopLag(clock), late()
    assert lag.seconds == 0
    for _ in range(3):
        lag.expect(0.5)
        assert lag.left == 0.5
        clock.now += 0.5
        lag.beat()
        assert lag.seconds == 0
    assert late() == before


def test_a_beat_that_is_due_counts_before_it_came(clock: Clock) -> None:
    lag = LoopLag(clock)
    lag.expect(0.5)
    clock.now += 0.25
    assert (lag.seconds, lag.left) == (0, 0.25)
    clock.now += 9.25
    assert (lag.seconds, lag.left) == (9.0, 0)


def test_a_late_beat_shows_until_the_next_and_is_added_up_for_good(clock: Clock) -> None:
    lag, before = LoopLag(clock), late()
    lag.expect(0.5)
    clock.now += 9.5
    lag.beat()
    lag.expect(0.5)
    assert lag.seconds == 9.0
    clock.now += 0.5
    lag.beat()
    lag.expect(0.5)
    assert lag.seconds == 0
    assert late() == before + 9.0


def test_a_loop_that_has_stopped_is_not_late(clock: Clock) -> None:
    lag = LoopLag(clock)
    lag.expect(0.5)
    lag.stop()
    clock.now += 60
    assert lag.seconds == 0
