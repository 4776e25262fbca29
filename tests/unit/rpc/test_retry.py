import asyncio
from time import monotonic

import pytest

from kvmesh.errors import Fenced, Full, InvalidInput, KvmeshError, Misfit, Unavailable
from kvmesh.rpc import retry
from kvmesh.rpc.retry import is_transient, reconnect_policy, room_policy


async def attempts(policy: retry.AsyncRetrying, errors: list[Exception]) -> int:
    """Runs under a policy what raises these errors, one each time, then succeeds; how often it ran."""
    ran = 0
    async for attempt in policy:
        with attempt:
            ran += 1
            if errors:
                raise errors.pop(0)
    return ran


def always(error: BaseException) -> bool:
    return isinstance(error, KvmeshError)


@pytest.mark.parametrize("error", [InvalidInput("x"), Misfit("x"), ValueError("x")], ids=lambda e: type(e).__name__)
async def test_what_fails_again_is_not_tried_again(error: Exception) -> None:
    left = [error, error]
    with pytest.raises(type(error)):
        await attempts(reconnect_policy(), left)
    assert len(left) == 1


async def test_a_room_stops_before_the_requests_deadline_with_the_last_error() -> None:
    began = monotonic()
    with pytest.raises(Unavailable, match="away"):
        await attempts(room_policy(always, 0.3), [Unavailable("away")] * 1000)
    assert monotonic() - began < 0.3 + 0.05


async def test_the_request_itself_says_whether_another_room_is_tried() -> None:
    judged: list[BaseException] = []

    def twice(error: BaseException) -> bool:
        judged.append(error)
        return len(judged) < 2

    with pytest.raises(Fenced, match="b"):
        await attempts(room_policy(twice, 10), [Unavailable("a"), Fenced("b"), Unavailable("c")])
    assert [str(e) for e in judged] == ["a", "b"], "each error is judged once"


async def test_a_bug_is_no_failed_attempt() -> None:
    with pytest.raises(ValueError, match="bug"):
        await attempts(room_policy(always, 10), [ValueError("bug")])


async def test_a_peers_wish_when_to_come_back_is_kept_within_the_deadline() -> None:
    began = monotonic()
    assert await attempts(room_policy(always, 10), [Full("x", retry_after_seconds=0.2)]) == 2
    assert monotonic() - began >= 0.2
    with pytest.raises(Full):
        await attempts(room_policy(always, 0.1), [Full("x", retry_after_seconds=0.2)])


async def test_a_lease_is_opened_again_without_end() -> None:
    assert await attempts(reconnect_policy(), [Unavailable("x")] * 4) == 5


async def test_whoever_holds_a_lease_says_when_to_stop() -> None:
    left: list[Exception] = [Unavailable("x"), Unavailable("y")]
    with pytest.raises(Unavailable, match="x"):
        await attempts(reconnect_policy(lambda error: False), left)


async def test_being_cancelled_is_never_an_attempt_that_failed() -> None:
    async def hold() -> None:
        async for attempt in reconnect_policy():
            with attempt:
                await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await hold()


def test_pauses_are_jittered_and_never_longer_than_half_the_watchdogs_time() -> None:
    policy = reconnect_policy()
    state = retry.RetryCallState(policy, None, (), {})
    state.attempt_number = 30
    pauses = {policy.wait(state) for _ in range(20)}
    assert len(pauses) > 1
    assert all(0 <= p <= retry.LONGEST_WAIT_SECONDS for p in pauses)


@pytest.mark.parametrize(
    ("error", "transient"), [(Unavailable("x"), True), (Misfit("x"), False), (ValueError("x"), False)]
)
def test_only_what_may_pass_is_transient(error: Exception, transient: bool) -> None:
    assert is_transient(error) is transient
    assert isinstance(error, KvmeshError) or not transient
