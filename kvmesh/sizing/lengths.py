"""How long prompts are: a lognormal distribution, from its mean and its 95th percentile."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist, fmean
from typing import Self

QUANTILE = 0.95
"""What targets and limits are meant for: 95 % of first tokens, of token gaps, of the time."""
Z = NormalDist().inv_cdf(QUANTILE)
MOST_P95_OF_MEAN = math.exp(Z * Z / 2)
"""No lognormal has its 95th percentile farther above its mean: 3.87 times."""

_POINTS = 100
_ASSUMED_SIGMA = math.sqrt(math.log(2))
"""Spread as widely as an exponential distribution: a standard deviation as large as the mean."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the prompts."""

    mean: float
    sigma: float = _ASSUMED_SIGMA
    """Standard deviation of the logarithm; 0: all alike."""

    @classmethod
    def of(cls, mean: float, p95: float) -> Self:
        """The one with this mean and 95th percentile.

        Raises:
            ValueError: there is none: `p95` lies below the mean, or over MOST_P95_OF_MEAN times above.
        """
        if not mean <= p95 <= mean * MOST_P95_OF_MEAN:
            raise ValueError(f"{p95:g} is outside [{mean:g}, {mean * MOST_P95_OF_MEAN:g}]")
        # ln p95 = μ + z σ and ln mean = μ + σ²/2; of the two solutions the one with the smaller spread.
        return cls(mean, Z - math.sqrt(max(0.0, Z * Z - 2 * math.log(p95 / mean))))

    @property
    def p95(self) -> float:
        """95 % are at most this long."""
        return self.mean * math.exp(Z * self.sigma - self.sigma**2 / 2)

    @property
    def variation(self) -> float:
        """Variance by the square of the mean: 0 when all are alike, 1 for an exponential distribution."""
        return math.expm1(self.sigma**2)

    @cached_property
    def points(self) -> tuple[float, ...]:
        """Equally likely lengths that stand for all, their mean exact."""
        normal = NormalDist()
        raw = [math.exp(self.sigma * normal.inv_cdf((i + 0.5) / _POINTS)) for i in range(_POINTS)]
        return tuple(length * self.mean / fmean(raw) for length in raw)

    def mean_of(self, value: Callable[[float], float]) -> float:
        """The mean of what depends on the length."""
        return fmean(value(length) for length in self.points)
