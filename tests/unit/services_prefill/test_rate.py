import pytest

from kvmesh.protocol.ids import RoomId, StepNumber
from kvmesh.protocol.steps import Step, Work
from services.prefill.rate import PrefillRate


def step(number: int, num_tokens: int) -> Step:
    return Step(StepNumber(number), (), (Work(RoomId(1), 0, num_tokens),) if num_tokens else ())


def test_before_any_step_nothing_is_claimed() -> None:
    assert PrefillRate().seconds_per_token == 0


def test_steps_in_flight_together_count_each_second_once() -> None:
    rate = PrefillRate()
    for number, now in ((1, 10.0), (2, 10.1), (3, 10.2)):
        rate.written(step(number, 100), now)
    assert rate.tokens_in_flight == 300
    rate.applied(StepNumber(1), 11.0)
    rate.applied(StepNumber(3), 13.0)
    assert rate.tokens_in_flight == 0
    assert rate.seconds_per_token == pytest.approx((1 * 0.9 + 2) / (100 * 0.9 + 200))


def test_idle_time_does_not_count() -> None:
    rate = PrefillRate()
    rate.written(step(1, 100), 0.0)
    rate.applied(StepNumber(1), 1.0)
    rate.written(step(2, 100), 1000.0)
    rate.applied(StepNumber(2), 1001.0)
    assert rate.seconds_per_token == pytest.approx(0.01)


def test_a_step_that_only_ends_rooms_changes_no_rate() -> None:
    rate = PrefillRate()
    rate.written(step(1, 100), 0.0)
    rate.applied(StepNumber(1), 1.0)
    rate.written(step(2, 0), 2.0)
    rate.applied(StepNumber(2), 9.0)
    assert rate.seconds_per_token == pytest.approx(0.01)


def test_the_rate_follows_what_the_pipeline_does_now() -> None:
    rate, now = PrefillRate(), 0.0
    for number in range(1, 61):
        rate.written(step(number, 10), now)
        now += 0.1 if number <= 30 else 1.0
        rate.applied(StepNumber(number), now)
    assert rate.seconds_per_token == pytest.approx(0.1, rel=0.1)
