"""The only retries of the system. A room (the gateway's alone), a lease (without end).

Never two layers that retry the same thing: a room's attempt makes its calls without a policy. Each is a tenacity object:
`async for attempt in policy: with attempt: …`, and what can't be tried again comes out as it was raised.
"""

from collections.abc import Callable

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_before_delay
from tenacity.wait import wait_base, wait_random_exponential

from kvmesh.errors import InvalidInput, KvmeshError, Misfit
from kvmesh.telemetry import metrics

FIRST_WAIT_SECONDS = 0.05
"""Upper edge of the first pause: above a round trip, below what a person notices."""
LONGEST_WAIT_SECONDS = 1.0
"""Half of the watchdog's default time, so that a peer that came back is found before others give up on it."""


class _Pause(wait_base):
    """Full jitter, and never earlier than the peer asked for."""

    def __init__(self) -> None:
        self._jitter = wait_random_exponential(multiplier=FIRST_WAIT_SECONDS, max=LONGEST_WAIT_SECONDS)

    def __call__(self, retry_state: RetryCallState) -> float:
        error = retry_state.outcome.exception() if retry_state.outcome is not None else None
        asked = error.retry_after_seconds if isinstance(error, KvmeshError) else None
        return (asked or 0.0) + self._jitter(retry_state)


def room_policy(may_try_again: Callable[[BaseException], bool], deadline_seconds: float) -> AsyncRetrying:
    """For the gateway: another room after one was lost.

    Args:
        may_try_again: the request's own judgement of an attempt's error.
        deadline_seconds: the request's time left; no attempt begins after it.
    """
    return AsyncRetrying(
        retry=retry_if_exception(may_try_again),
        stop=stop_before_delay(deadline_seconds),
        wait=_Pause(),
        reraise=True,
    )


def is_transient(error: BaseException) -> bool:
    """Whether a lease lost by this error may be opened again."""
    return isinstance(error, KvmeshError) and not isinstance(error, Misfit | InvalidInput)


def reconnect_policy(may_reopen: Callable[[BaseException], bool] = is_transient) -> AsyncRetrying:
    """For leases and watches: jittered, without end.

    Args:
        may_reopen: whether to go on after this error.
    """
    return AsyncRetrying(
        retry=retry_if_exception(may_reopen),
        wait=_Pause(),
        before_sleep=lambda _: metrics.RECONNECTS_TOTAL.inc(),
        reraise=True,
    )
