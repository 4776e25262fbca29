"""Two queues: prompts that wait for one of several pipelines, and rooms that share the steps of a decoder.

* `waiting`: M/G/k, first come first served. One server: the formula of Pollaczek and Khinchine, exact. Several: that of Allen
  and Cunneen (Allen, "Probability, Statistics, and Queueing Theory", 1990), the wait of M/M/k (Erlang's C) times half of one
  plus the variation of the services. The registry places each room where the fewest prompt tokens wait, and queues of which
  each arrival takes the one with the least work are one queue (Harchol-Balter, "Performance Modeling and Design of Computer
  Systems", 2013, chapter 24). Who waits at all waits about exponentially long (Kingman, 1961).
* `sharing`: rooms come at random, and each makes progress at a rate that depends on how many there are. Their number depends on
  the mean of their lengths only, not on the distribution (Cohen, "The multiple phase service network with generalized processor
  sharing", 1979).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Waiting:
    """How long arrivals wait for a server."""

    share: float = 0.0
    """Of arrivals that wait at all."""
    mean_seconds: float = 0.0
    """Over all arrivals; infinite where the servers are overloaded."""

    def exceeds(self, seconds: float) -> float:
        """The share of arrivals that wait longer."""
        if seconds < 0:
            return 1.0
        return self.share * math.exp(-seconds * self.share / self.mean_seconds) if self.share else 0.0


def erlang_c(servers: int, load: float) -> float:
    """The share of arrivals that find all servers of M/M/k busy; `load` in servers' worth, below `servers`."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def waiting(rate: float, service_seconds: float, variation: float, servers: int | None) -> Waiting:
    """The wait in M/G/k.

    Args:
        rate: arrivals a second, at random.
        service_seconds: their mean.
        variation: of the services: variance by the square of the mean.
        servers: None: as many as it takes, so that nobody waits.
    """
    load = rate * service_seconds
    if servers is None or load == 0:
        return Waiting()
    if load >= servers:
        return Waiting(1.0, math.inf)
    share = erlang_c(servers, load)
    return Waiting(share, share * service_seconds / (servers - load) * (1 + variation) / 2)


def work_seconds(rate: float, service_seconds: float, variation: float, wait_seconds: float) -> float:
    """Mean work in the system, seconds of one server: what waits, and what is left of what is served (Brumelle, 1971)."""
    return rate * service_seconds * (wait_seconds + service_seconds * (1 + variation) / 2)


@dataclass(frozen=True)
class Occupancy:
    """How many rooms share a decoder's steps."""

    shares: tuple[float, ...]
    """Of the time with 0, 1, 2 … rooms."""

    @property
    def mean(self) -> float:
        """Rooms."""
        return sum(n * share for n, share in enumerate(self.shares))

    @property
    def variance(self) -> float:
        """Rooms, squared."""
        return sum(n * n * share for n, share in enumerate(self.shares)) - self.mean**2

    def mean_of(self, value: Callable[[int], float]) -> float:
        """The mean over time of what depends on the number of rooms; 0 while there is none."""
        return sum(share * value(n) for n, share in enumerate(self.shares) if n)

    def gap_quantile(self, step_seconds: Callable[[float], float], quantile: float) -> float:
        """That share of all tokens comes at most so many seconds after the one before it."""
        tokens = [share * n / step_seconds(n) for n, share in enumerate(self.shares) if n]
        whole = sum(tokens)
        sums = accumulate(tokens)
        return next(
            (step_seconds(n) for n, so_far in enumerate(sums, 1) if so_far >= quantile * whole), step_seconds(1)
        )


_NEGLIGIBLE = -30.0
"""Logarithm of the share of time that is as good as none."""
_MORE_ROOMS = 1000
"""Considered beyond four times the rooms that may run."""


def sharing(steps_a_second: float, step_seconds: Callable[[float], float], max_rooms: int) -> Occupancy | None:
    """Rooms at a decoder, or None where they are more and more, or many times what may run.

    Args:
        steps_a_second: that the rooms of one second need, all together.
        step_seconds: of a step with so many rooms.
        max_rooms: that may run.
    """
    if steps_a_second == 0:
        return Occupancy((1.0,))
    logs = [0.0]
    top = 0.0
    for n in range(1, 4 * max_rooms + _MORE_ROOMS):
        logs.append(logs[-1] + math.log(steps_a_second * step_seconds(n) / n))
        top = max(top, logs[-1])
        if logs[-1] < top + _NEGLIGIBLE:
            break
    else:
        return None
    weights = [math.exp(one - top) for one in logs]
    whole = sum(weights)
    return Occupancy(tuple(weight / whole for weight in weights))
