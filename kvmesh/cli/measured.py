"""What a mesh has shown lately, asked of the Prometheus that reads it: load and rates for `kvmesh size`.

Everything is found by the metrics' own names; which process is a stage or a decoder shows in what it tells. What can't be
found is left out, with the reason.
"""

import json
import math
import re
from dataclasses import dataclass, field
from statistics import linear_regression
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from kvmesh.errors import BadConfig, Unavailable

ANSWER_SECONDS = 10.0
SPAN_SECONDS = 60.0
"""Decode steps are averaged over spans of this length: four scrapes of the shipped configuration."""
_LEAST_DIFFERENCE_ROOMS = 1.0
"""Between the smallest and the largest batch that a line is drawn through."""
_UNITS = {"m": 60, "h": 3600, "d": 86400}

# Of each flag: its query; {j} is the mesh's job, {w} the window.
_QUERIES = {
    "rate": "sum(rate(kvmesh_prompt_tokens_count{{{j}}}[{w}]))",
    "prompt_tokens": "sum(rate(kvmesh_prompt_tokens_sum{{{j}}}[{w}])) / sum(rate(kvmesh_prompt_tokens_count{{{j}}}[{w}]))",
    "output_tokens": "sum(rate(kvmesh_output_tokens_sum{{{j}}}[{w}])) / sum(rate(kvmesh_output_tokens_count{{{j}}}[{w}]))",
    # The slowest stage of each pipeline bounds it; while it waits for work, no time counts.
    "prefill_rate": """avg(min by (pipeline) (
        rate(kvmesh_prefill_tokens_total{{{j}}}[{w}]) / (rate(kvmesh_step_seconds_sum{{{j}}}[{w}]) > 0)
        * on (job, instance) group_left (pipeline) kvmesh_stage_info{{{j}}}))""",
    "pp": "max(count by (pipeline) (kvmesh_stage_info{{{j}}}))",
    "prefill_pages": "min(sum by (job, instance) (kvmesh_pages{{{j}}}) and on (job, instance) kvmesh_stage_info)",
    "num_pages": "min(sum by (job, instance) (kvmesh_pages{{{j}}}) and on (job, instance) kvmesh_pairings_standing)",
    "overhead": """sum(rate(kvmesh_time_to_first_token_part_seconds_sum{{{j},part=~"assign|other|{transfer}"}}[{w}]))
        / sum(rate(kvmesh_time_to_first_token_seconds_count{{{j}}}[{w}]))""",
}
_WHOLE = {"pp", "prefill_pages", "num_pages"}
_BATCH = "rate(kvmesh_decode_tokens_total{{{j}}}[{w}]) / (rate(kvmesh_decode_step_seconds_count{{{j}}}[{w}]) > 0)"
_STEP = "rate(kvmesh_decode_step_seconds_sum{{{j}}}[{w}]) / (rate(kvmesh_decode_step_seconds_count{{{j}}}[{w}]) > 0)"


@dataclass
class Measured:
    """What was found."""

    values: dict[str, Any] = field(default_factory=dict)
    """By the flag that would say it, dashes as underscores."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why there is no value."""


def window_seconds(text: str) -> float:
    """Of a window as Prometheus writes it.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"([1-9]\d{0,5})([mhd])", text)
    if found is None:
        raise ValueError(text)
    return int(found[1]) * _UNITS[found[2]]


def measure(url: str, job: str, seconds: float, *, with_transfer: bool, span_seconds: float = SPAN_SECONDS) -> Measured:
    """Asks for everything.

    Args:
        url: of Prometheus, without the path of its API.
        job: label of the mesh's targets.
        seconds: how far to look back.
        with_transfer: the overhead of a first token includes the transfer of KV.
        span_seconds: over which decode steps are averaged, to tell small batches from large ones.

    Raises:
        BadConfig: the address is none.
        Unavailable: Prometheus does not answer, or not as it should.
    """
    if not url.startswith(("http://", "https://")):
        raise BadConfig(f"--prometheus is {url!r}; something like http://127.0.0.1:9090 is needed")
    names = f"job={json.dumps(job)}"
    found = Measured()
    filled = {"j": names, "w": f"{seconds:.0f}s", "transfer": "transfer_tail" if with_transfer else ""}
    for flag, query in _QUERIES.items():
        series = _ask(url, query.format(**filled))
        value = float(series[0]["value"][1]) if series else math.nan
        if not math.isfinite(value) or (value <= 0 and flag != "overhead"):
            found.missing[flag] = f"Prometheus has no such figure of job {job!r}"
        else:
            found.values[flag] = round(value) if flag in _WHOLE else value
    steps = _steps(url, names, seconds, span_seconds)
    if isinstance(steps, str):
        found.missing["step"] = steps
    else:
        found.values["step"] = steps
    return found


def _steps(url: str, names: str, seconds: float, span_seconds: float) -> list[tuple[float, float]] | str:
    """Two points of a line through the decode steps of each decoder and span; or why there is none."""
    by_place: list[dict[tuple[str, float], float]] = []
    for query in (_BATCH, _STEP):
        # A subquery: each span of the window, up to the moment that Prometheus takes for now.
        spans = query.format(j=names, w=f"{span_seconds:.0f}s")
        series = _ask(url, f"({spans})[{seconds:.0f}s:{span_seconds:.0f}s]")
        by_place.append({(one["metric"]["instance"], at): float(v) for one in series for at, v in one["values"]})
    batches, times = by_place
    pairs = [(batches[place], times[place]) for place in batches.keys() & times.keys()]
    points = [pair for pair in pairs if math.isfinite(sum(pair))]
    low, high = min((b for b, _ in points), default=0.0), max((b for b, _ in points), default=0.0)
    if high - low < _LEAST_DIFFERENCE_ROOMS:
        return f"batches of {low:.1f} to {high:.1f} rooms are too alike to tell how a step grows; put more load on it"
    slope, at_none = linear_regression(*zip(*points, strict=True))
    ends = [(rooms, at_none + slope * rooms) for rooms in (low, high)]
    if slope <= 0 or ends[0][1] <= 0:
        return f"steps did not grow with their batches ({low:.1f} to {high:.1f} rooms): something else made them differ"
    return ends


def _ask(url: str, query: str) -> list[dict[str, Any]]:
    """The series of an answer."""
    try:
        with urlopen(f"{url.rstrip('/')}/api/v1/query?{urlencode({'query': query})}", timeout=ANSWER_SECONDS) as answer:
            return list(json.load(answer)["data"]["result"])
    except HTTPError as error:
        raise Unavailable(f"Prometheus at {url} answers with {error.code} {error.reason}") from None
    except (URLError, TimeoutError, OSError) as error:
        raise Unavailable(f"Prometheus at {url} does not answer: {getattr(error, 'reason', error)}") from None
    except (ValueError, KeyError, TypeError):
        raise Unavailable(f"{url} does not answer as Prometheus does") from None
