"""What to expect of a mesh: so many pipelines and decoders at so many requests a second."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from kvmesh.sizing.given import Given
from kvmesh.sizing.lengths import QUANTILE, Z
from kvmesh.sizing.queues import Occupancy, Waiting, sharing, waiting, work_seconds

Cure = Literal["pipeline", "decoder"]
Unit = Literal["tokens/s", "s", "rooms", "pages", "MB/s"]

_HALVINGS = 30


@dataclass(frozen=True)
class Gauge:
    """One thing that may be full."""

    name: str
    expected: float
    limit: float
    unit: Unit
    cure: Cure
    """What there should be one more of."""

    @property
    def used(self) -> float:
        """Share of the limit."""
        return self.expected / self.limit

    @property
    def holds(self) -> bool:
        """Within the limit."""
        return self.expected <= self.limit


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What to expect. Infinite: more and more, or many times what may be."""

    rate: float
    pipelines: int | None
    """None: as many as it takes."""
    decoders: int | None
    first_token_parts: dict[str, float]
    """Mean seconds of the time to the first token by part: they add up."""
    first_token_p95: float
    token_gap_mean: float
    token_gap_p95: float
    queued_prefill_seconds: float
    """Of a pipeline: the mean of kvmesh_queued_prefill_seconds."""
    rooms: float
    """Mean that hold pages of a decoder: kvmesh_rooms_running."""
    pages: float
    """Mean that are not free at a decoder."""
    gauges: tuple[Gauge, ...]

    @property
    def first_token_mean(self) -> float:
        """Seconds."""
        return sum(self.first_token_parts.values())

    @property
    def over(self) -> list[Gauge]:
        """What does not hold."""
        return [gauge for gauge in self.gauges if not gauge.holds]

    @property
    def holds(self) -> bool:
        """Everything is within its limit."""
        return not self.over


def outlook(given: Given, rate: float, pipelines: int | None, decoders: int | None) -> Outlook:
    """What to expect.

    Args:
        given: all the rest.
        rate: requests a second.
        pipelines: None: as many as it takes.
        decoders: the same.
    """
    prompt, step = given.prompt, given.step_seconds
    share = rate / decoders if decoders else 0.0
    """Requests a second of a decoder."""
    seconds = prompt.mean / given.prefill_rate
    wait = waiting(rate, seconds, prompt.variation, pipelines)
    link_wait = waiting(share, given.link_seconds(prompt.mean), prompt.variation, 1).mean_seconds
    running = sharing(share * (given.output_tokens - 1), step, given.max_running_rooms)
    # A complete room joins after the step that runs: half a step on average, where one runs.
    join = running.mean_of(step) / 2 if running else math.inf
    prefills = [given.prefill_seconds(length) for length in prompt.points]
    tails = [given.transfer_tail_seconds(length) + link_wait for length in prompt.points]
    parts = {
        "wait": wait.mean_seconds,
        "prefill": fmean(prefills),
        "transfer": fmean(tails),
        "join": join,
        "overhead": given.overhead_seconds,
    }
    before = [a + b + join + given.overhead_seconds for a, b in zip(prefills, tails, strict=True)]
    receiving = share * (parts["wait"] + parts["prefill"] + parts["transfer"] + join) if share else 0.0
    rooms, rooms_p95, pages, pages_p95 = _held(given, receiving, running)
    gap_mean, gap_p95 = _gaps(given, running)
    per_pipeline = rate / pipelines if pipelines else 0.0
    first_token_p95 = _first_token_quantile(wait, before, QUANTILE)
    in_pipeline = [(a + b) * given.prompt_pages(n) for a, b, n in zip(prefills, tails, prompt.points, strict=True)]
    kv_megabytes = prompt.mean * given.kv_bytes_per_token / 1e6
    link = given.link_bytes_per_second / 1e6
    gauges = [
        Gauge("first token, 95 % within", first_token_p95, given.first_token_seconds, "s", "pipeline"),
        Gauge("token gap, 95 % within", gap_p95, given.token_gap_seconds, "s", "decoder"),
        Gauge("prefill of a pipeline", per_pipeline * prompt.mean, given.prefill_rate, "tokens/s", "pipeline"),
        Gauge("pages of a stage", per_pipeline * fmean(in_pipeline), given.pipeline_pages, "pages", "pipeline"),
        Gauge("pages of a decoder, 95 % of the time", pages_p95, given.decoder_pages, "pages", "decoder"),
        Gauge("rooms of a decoder, 95 % of the time", rooms_p95, given.max_running_rooms, "rooms", "decoder"),
        Gauge("KV out of a stage", per_pipeline * kv_megabytes / given.num_stages, link, "MB/s", "pipeline"),
        Gauge("KV into a decoder", share * kv_megabytes, link, "MB/s", "decoder"),
    ]
    return Outlook(
        rate=rate,
        pipelines=pipelines,
        decoders=decoders,
        first_token_parts=parts,
        first_token_p95=first_token_p95,
        token_gap_mean=gap_mean,
        token_gap_p95=gap_p95,
        queued_prefill_seconds=_queued_seconds(given, per_pipeline, wait),
        rooms=rooms,
        pages=pages,
        gauges=tuple(gauges),
    )


def _queued_seconds(given: Given, per_pipeline: float, wait: Waiting) -> float:
    """Mean prefill that a pipeline has accepted and that is not through all stages: a step counts until its last one."""
    if per_pipeline == 0:
        return 0.0
    prompt, rate = given.prompt, given.prefill_rate
    work = work_seconds(per_pipeline, prompt.mean / rate, prompt.variation, wait.mean_seconds)
    in_steps = prompt.mean_of(lambda n: n * min(n, given.step_tokens) * (given.num_stages - 0.5) / rate**2)
    return work + per_pipeline * in_steps


def _held(given: Given, receiving: float, running: Occupancy | None) -> tuple[float, float, float, float]:
    """Rooms that hold pages of a decoder and those pages, each as mean and 95th percentile.

    Rooms that wait, prefill and receive are Poisson, those that run are as `sharing` says, and pages differ from room to room.
    """
    if running is None or math.isinf(receiving):
        return (math.inf,) * 4
    each = [given.room_pages(length) for length in given.prompt.points]
    each_mean = fmean(each)
    each_variance = fmean((pages - each_mean) ** 2 for pages in each)
    rooms, variance = receiving + running.mean, receiving + running.variance
    pages, spread = rooms * each_mean, rooms * each_variance + variance * each_mean**2
    return rooms, _high(rooms, variance), pages, _high(pages, spread)


def _high(mean: float, variance: float) -> float:
    """The 95th percentile of what is about gamma distributed (Wilson and Hilferty, 1931)."""
    if mean == 0:
        return 0.0
    ninth = variance / (9 * mean**2)
    return mean * (1 - ninth + Z * math.sqrt(ninth)) ** 3


def _gaps(given: Given, running: Occupancy | None) -> tuple[float, float]:
    """Mean and 95th percentile of the seconds between two tokens of a room."""
    if running is None:
        return math.inf, math.inf
    step = given.step_seconds
    tokens = running.mean_of(lambda n: n / step(n))
    return running.mean / tokens if tokens else step(1), running.gap_quantile(step, QUANTILE)


def _first_token_quantile(wait: Waiting, before: Sequence[float], quantile: float) -> float:
    """That share of first tokens comes within so many seconds, when a room waits, and takes one of `before` besides."""
    if math.isinf(wait.mean_seconds) or math.isinf(max(before)):
        return math.inf

    def late(seconds: float) -> float:
        return fmean(wait.exceeds(seconds - rest) for rest in before)

    low, high = 0.0, max(before) + wait.mean_seconds
    while late(high) > 1 - quantile:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if late(middle) > 1 - quantile else (low, middle)
    return high
