"""The questions of a sizing: the smallest mesh for a rate, the highest rate of a mesh, and when to add to it."""

from collections.abc import Callable
from dataclasses import dataclass

from kvmesh.errors import BadConfig
from kvmesh.sizing.given import Given
from kvmesh.sizing.outlook import Outlook, outlook

MOST = 1000
"""Pipelines or decoders of one mesh that are looked at."""
_HALVINGS = 40
_A_LITTLE_MORE = 1.001
"""Above the highest rate: what is over its limit there is what is full first."""


@dataclass(frozen=True)
class Signs:
    """When to add to a mesh: means at the highest rate that one side bears."""

    queued_prefill_seconds: float
    """Of a pipeline: where it is usually longer, add pipelines."""
    pages: float
    """Of a decoder, as a share of all: where it is usually more, add decoders."""
    rooms: float
    """Of a decoder: the same."""


def fewest(given: Given, rate: float) -> Outlook:
    """The mesh of the fewest processes, stages and decoders, that bears a rate.

    Raises:
        BadConfig: MOST pipelines and decoders do not bear it.
    """
    pipelines = _smallest(lambda n: outlook(given, rate, n, None).holds, 1, MOST)
    least = _smallest(lambda n: outlook(given, rate, None, n).holds, 1, MOST)
    best: Outlook | None = None
    best_size = MOST * given.num_stages + MOST
    while pipelines and least and pipelines <= MOST and pipelines * given.num_stages + least < best_size:
        most = min(MOST, best_size - 1 - pipelines * given.num_stages)
        decoders = _decoders_for(given, rate, pipelines, least, most)
        if decoders:
            best = outlook(given, rate, pipelines, decoders)
            best_size = pipelines * given.num_stages + decoders
        pipelines += 1
    if best is None:
        raise BadConfig(f"{rate:g} requests a second need more than {MOST} pipelines or decoders: size a part of it")
    return best


def highest_rate(given: Given, pipelines: int | None, decoders: int | None) -> float:
    """Requests a second that a mesh bears; 0 where it does not even bear a single request.

    Args:
        given: all the rest.
        pipelines: None: as many as it takes. One of the two is a number.
        decoders: the same.
    """
    low, high = 0.0, 1e-6
    while outlook(given, high, pipelines, decoders).holds:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if outlook(given, middle, pipelines, decoders).holds else (low, middle)
    return low


def full_first(given: Given, rate: float, pipelines: int, decoders: int) -> Outlook:
    """What to expect just above the highest rate."""
    return outlook(given, rate * _A_LITTLE_MORE, pipelines, decoders)


def signs(given: Given, pipelines: int, decoders: int) -> Signs:
    """When to add to a mesh of this size."""
    prefill = outlook(given, highest_rate(given, pipelines, None), pipelines, None)
    decode = outlook(given, highest_rate(given, None, decoders), None, decoders)
    return Signs(prefill.queued_prefill_seconds, decode.pages / given.decoder_pages, decode.rooms)


def _decoders_for(given: Given, rate: float, pipelines: int, least: int, most: int) -> int | None:
    return _smallest(lambda n: outlook(given, rate, pipelines, n).holds, least, most)


def _smallest(holds: Callable[[int], bool], least: int, most: int) -> int | None:
    """The smallest number from `least` to `most` that holds, where every larger one holds as well."""
    low, high = least - 1, least
    while high < most and not holds(high):
        low, high = high, min(most, 2 * high)
    if high > most or not holds(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
