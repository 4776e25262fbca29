"""What a stage's page shows between two generations as in one: its pages, its worker's age, and that there is no generation.

Called by the generation and by the stage's life.
"""

from collections.abc import Callable

from kvmesh.telemetry import metrics


def show_pages(free_pages: int, num_pages: int) -> None:
    """Sets the gauges of the pool."""
    metrics.PAGES.labels(state="free").set(free_pages)
    metrics.PAGES.labels(state="held").set(num_pages - free_pages)


def show_age(age_seconds: Callable[[], float | None]) -> None:
    """The page asks the worker itself, from a thread of its own: so it tells the truth also while this loop stands still, and
    between two generations."""
    metrics.LOG_AGE_SECONDS.set_function(lambda: age_seconds() or 0.0)


def show_no_generation(num_pages: int) -> None:
    """Sets the gauges of a stage that is part of no generation."""
    show_pages(num_pages, num_pages)
    for gauge in (
        metrics.ROOMS_OPEN,
        metrics.ROOMS_WAITING,
        metrics.ROOMS_RUNNING,
        metrics.QUEUED_PREFILL_TOKENS,
        metrics.QUEUED_PREFILL_SECONDS,
        metrics.STEPS_IN_FLIGHT,
        metrics.LOG_STEPS_RECEIVED,
        metrics.LOG_STEPS_APPLIED,
        metrics.LOG_STEPS_CONFIRMED,
        metrics.LOG_DIGEST,
        metrics.LOG_LAG_STEPS,
    ):
        gauge.set(0)
