import asyncio
import re
import subprocess
import sys
import urllib.request
from typing import Any

import pytest
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from kvmesh import errors
from kvmesh.client import TIMING_PARTS
from kvmesh.telemetry import metrics
from kvmesh.telemetry.page import MetricsPage

METRICS: dict[str, Any] = {n: m for n, m in vars(metrics).items() if isinstance(m, Counter | Gauge | Histogram)}
UNITS = ("seconds", "bytes", "tokens", "pages", "rooms", "total")


def read_page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as response:
        return str(response.read().decode())


def shown(service: str) -> set[str]:
    return {m.name for m in metrics.page_of(service).collect() if m.name.startswith("kvmesh_")}


def test_every_name_is_there_once() -> None:
    names = [m._name for m in METRICS.values()]
    assert len(names) == len(set(names)) == len(shown("all of them"))


@pytest.mark.parametrize("constant", METRICS)
def test_a_metric_is_called_in_code_what_it_is_called_outside(constant: str) -> None:
    metric = METRICS[constant]
    outside = metric._name + ("_total" if isinstance(metric, Counter) else "")
    assert outside == f"kvmesh_{constant.lower()}"
    assert re.fullmatch(r"[a-z_]+", outside)


@pytest.mark.parametrize("constant", [n for n, m in METRICS.items() if isinstance(m, Histogram)])
def test_every_histogram_names_its_unit(constant: str) -> None:
    assert METRICS[constant]._name.endswith(UNITS)


def at_the_start(service: str) -> dict[str, dict[str, float]]:
    """The page of a process that has done nothing: of each family with labels, what it counts, by its samples' labels."""
    code = (
        "from prometheus_client import generate_latest; from kvmesh.telemetry.metrics import page_of; "
        f"print(generate_latest(page_of({service!r})).decode())"
    )
    page = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30).stdout
    return {
        family.name: {
            ",".join(s.labels.values()): s.value for s in family.samples if s.name.endswith(("_total", "_count"))
        }
        for family in text_string_to_metric_families(page)
        if family.type in ("counter", "histogram")
    }


def test_what_is_counted_by_a_label_begins_at_0_with_the_process() -> None:
    """Prometheus can't see a series begin: the first events of each reason would be in no rate."""
    fresh = at_the_start("every service")
    assert {name for name, samples in fresh.items() if not samples} == {"kvmesh_rpc_errors"}, "by method as well"
    assert {v for name, samples in fresh.items() if name.startswith("kvmesh_") for v in samples.values()} == {0.0}
    assert fresh["kvmesh_requests"].keys() == {*errors.CODES, "OK"}
    assert fresh["kvmesh_frames"].keys() == {"written", "repeated", "late", "foreign", "corrupt"}
    assert fresh["kvmesh_time_to_first_token_part_seconds"].keys() == set(TIMING_PARTS)
    for by_reason in ("attempts_failed", "generations_ended", "pairings_ended", "leases_ended"):
        assert fresh[f"kvmesh_{by_reason}"].keys() == {*errors.REASONS, errors.OTHER}


def test_no_label_is_unbounded() -> None:
    labels = {label for m in METRICS.values() for label in m._labelnames}
    about_the_process = {"version", "pipeline", "rank", "pp_size"}
    assert labels <= {"method", "code", "reason", "outcome", "role", "state", "part"} | about_the_process


@pytest.mark.parametrize("service", metrics.EVERY)
def test_a_service_shows_its_own_metrics_and_those_of_all(service: str) -> None:
    assert {"kvmesh_ready", "kvmesh_live"} <= shown(service)
    assert ("kvmesh_term" in shown(service)) == (service == "bootstrap")
    assert ("kvmesh_pages" in shown(service)) == (service in ("prefill", "decode"))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_the_page_is_served_and_its_port_is_closed_at_the_end(host: str) -> None:
    async with MetricsPage("decode", host, 0) as page:
        metrics.PAGES.labels(state="free").set(17)
        name = f"[{host}]" if ":" in host else host
        url = f"http://{name}:{page.address[1]}/metrics"
        assert 'kvmesh_pages{state="free"} 17.0' in await asyncio.to_thread(read_page, url)
    with pytest.raises(OSError):
        await asyncio.to_thread(read_page, url)


def test_a_duration_that_varies_is_a_histogram() -> None:
    """F-O7: a gauge shows how late or how old something is now; what each request took has a distribution."""
    durations = {name for name in METRICS if name.endswith("_SECONDS")}
    now = {"LOOP_LAG_SECONDS", "LOG_AGE_SECONDS", "QUEUED_PREFILL_SECONDS"}
    assert {name for name in durations - now if not isinstance(METRICS[name], Histogram)} == set()
    assert len(durations - now) >= 5
