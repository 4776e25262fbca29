"""The median of a sample and an exact interval for the median it was drawn from. Called by `__main__`; knows no mesh."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and between what it lies."""

    median: float
    low: float
    high: float
    confidence: float
    """How sure that is: at least what was asked for; order statistics come in steps."""


def of_median(sample: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The interval between two order statistics, for any distribution: each draw is as likely below the median as above.

    Raises:
        ValueError: the sample is too small to be so sure.
    """
    ordered, size = sorted(sample), len(sample)
    within = [(cut, _confidence(size, cut)) for cut in range((size + 1) // 2)]
    sure = [(cut, reached) for cut, reached in within if reached >= confidence]
    if not sure:
        raise ValueError(f"{size} values are too few for a confidence of {confidence:g}")
    cut, reached = sure[-1]
    return Interval(median(ordered), ordered[cut], ordered[size - 1 - cut], reached)


def _confidence(size: int, cut: int) -> float:
    """How likely the median lies within, when so many values are cut off at either end."""
    return float(1 - 2 * sum(comb(size, k) for k in range(cut + 1)) / 2**size)
