"""A real Prometheus scrapes a real mesh: every query of every panel has an answer there, and every rule evaluates.

The mesh lives once, under load, with an abort, refused requests and a stage that stands still for a while. What Prometheus and
the services said is kept in one record, and the tests look at that.
"""

import asyncio
import re
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any

import httpx
import pytest
from monitoring_files import (
    PROMTOOL,
    PanelQuery,
    asked_for,
    needs_prometheus,
    panel_queries,
    recorded,
    rules,
    series_by_family,
    variable_queries,
)
from monitoring_server import LOOK_BACK_SECONDS, Prometheus, Series, figures, quickened
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.client import Client
from kvmesh.errors import InvalidInput
from tests.mesh.harness import Mesh

pytestmark = [needs_prometheus, pytest.mark.deep, pytest.mark.slice, pytest.mark.timeout(180)]

CLIENTS = 3
PARTS = {"assign", "reserve", "queue", "prefill", "transfer_tail", "join", "other"}
MAY_BE_EMPTY = {
    ("kvmesh", "Alerts"): "no alert fires in a mesh that is whole",
}
"""Panels whose honest answer is nothing, and why."""
NOT_THERE = {
    "ALERTS": "no alert fires in a mesh that is whole",
}


@dataclass
class Record:
    """What was seen of one mesh."""

    services: dict[str, str] = field(default_factory=dict)
    """Of each process: its service."""
    pages: dict[str, str] = field(default_factory=dict)
    """Of each process: its metrics page as text."""
    targets: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[PanelQuery, list[Series]] = field(default_factory=dict)
    choices: dict[str, list[str]] = field(default_factory=dict)
    """Of each variable's query: what one can choose."""
    names: set[str] = field(default_factory=set)
    """Of all series in Prometheus."""
    rules: dict[str, dict[str, Any]] = field(default_factory=dict)
    exemplars: list[dict[str, Any]] = field(default_factory=list)
    counted: dict[str, dict[str, float]] = field(default_factory=dict)
    """Counters by a label, once the load is over."""


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Record:
    return asyncio.run(watched(tiny_model_dir, tmp_path_factory.mktemp("monitored")))


async def watched(model: Path, directory: Path) -> Record:
    """Runs a mesh and a Prometheus and asks both."""
    record = Record()
    async with Mesh(model, directory, pp=2) as mesh:
        record.services = {name: mesh.child(name).spec.module.rpartition(".")[2] for name in mesh.names}
        config = quickened(directory, pages_by_service(mesh, record))
        async with Prometheus(config, directory) as prometheus, Client(mesh.gateway) as client:
            async with load(client):
                await abort(client)
                await be_refused(client)
                await stand_still(mesh, "p0 rank 1")
                await ask_panels(prometheus, record)
                await ask_rules(prometheus, record)
            await ask_the_rest(prometheus, record)
        await read_pages(mesh, record)
    return record


def pages_by_service(mesh: Mesh, record: Record) -> dict[str, list[str]]:
    pages: dict[str, list[str]] = {}
    for name, service in record.services.items():
        pages.setdefault(service, []).append(metrics_page(mesh, name))
    return pages


def metrics_page(mesh: Mesh, name: str) -> str:
    where = mesh.child(name).where
    assert where is not None
    return where.metrics


# What happens to the mesh.


@asynccontextmanager
async def load(client: Client) -> AsyncIterator[None]:
    """Clients that ask one question after the other until the block ends."""
    stopped = asyncio.Event()

    async def keep_asking(number: int) -> None:
        while not stopped.is_set():
            prompt = [(7 * number + i) % 256 for i in range(60 + 40 * number)]
            async for _ in client.generate(tokens=prompt, max_output_tokens=30, ignore_eos=True, timeout_seconds=60):
                pass

    async with asyncio.TaskGroup() as clients:
        for number in range(CLIENTS):
            clients.create_task(keep_asking(number))
        yield
        stopped.set()


async def abort(client: Client) -> None:
    """A client that goes away after its first token."""
    async with aclosing(client.generate(tokens=[1, 2, 3], max_output_tokens=400, ignore_eos=True)) as pieces:
        await anext(pieces)


async def be_refused(client: Client) -> None:
    """A prompt that is too long."""
    with suppress(InvalidInput):
        async for _ in client.generate(tokens=[1] * 5000, max_output_tokens=1):
            raise AssertionError("it was answered")


async def stand_still(mesh: Mesh, stage: str) -> None:
    """A stage hangs until its generation is over and rooms were lost; then it goes on."""
    mesh.signal(stage, signal.SIGSTOP)
    try:
        while not sum(v for k, v in (await mesh.metrics("gateway")).items() if "attempts_failed_total" in k):
            pass
    finally:
        mesh.signal(stage, signal.SIGCONT)
    await mesh.paired()


# What is asked.


def substituted(expr: str) -> str:
    """A panel's query as Grafana would send it, with the only mesh, everything chosen, and seconds for minutes."""
    values = {
        "$__rate_interval": f"{LOOK_BACK_SECONDS}s",
        "$__range": f"{LOOK_BACK_SECONDS}s",
        "$job": "kvmesh",
        "$pipeline": ".*",
        "$instance": ".*",
    }
    for variable, value in values.items():
        expr = expr.replace(variable, value)
    assert "$" not in expr
    return expr


async def ask_panels(prometheus: Prometheus, record: Record) -> None:
    async def ask(query: PanelQuery) -> None:
        if (query.dashboard, query.panel) in MAY_BE_EMPTY:
            record.answers[query] = await prometheus.now(substituted(query.expr))
        else:
            record.answers[query] = await prometheus.answered(substituted(query.expr), instant=query.instant)

    await asyncio.gather(*map(ask, panel_queries()))


async def ask_rules(prometheus: Prometheus, record: Record) -> None:
    """Waits for each recording rule's answer, then for the state of all rules."""
    await asyncio.gather(*(prometheus.answered(name) for name in recorded()))
    groups = (await prometheus.ask("rules"))["groups"]
    record.rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    for name, rule in record.rules.items():
        rule["series"] = await prometheus.now(name) if rule["type"] == "recording" else rule["alerts"]


async def ask_the_rest(prometheus: Prometheus, record: Record) -> None:
    record.targets = (await prometheus.ask("targets"))["activeTargets"]
    record.names = set(await prometheus.ask("label/__name__/values"))
    for series, label in variable_queries():
        chosen = await prometheus.ask(f"label/{label}/values", **{"match[]": substituted(series)})
        record.choices[f"{series} {label}"] = chosen
    for metric in ("kvmesh_time_to_first_token_seconds_bucket", "kvmesh_request_seconds_bucket"):
        asked = {"query": metric, "start": prometheus.began, "end": time()}
        record.exemplars += await prometheus.ask("query_exemplars", **asked)
    for counter, label in (("kvmesh_requests_total", "code"), ("kvmesh_attempts_failed_total", "reason")):
        counted = await prometheus.now(f"sum by ({label}) ({counter})")
        record.counted[counter] = {one["metric"][label]: figures(one)[0] for one in counted}


async def read_pages(mesh: Mesh, record: Record) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        for name in record.services:
            record.pages[name] = (await client.get(f"http://{metrics_page(mesh, name)}/metrics")).text


# What was seen.


def test_every_process_of_the_mesh_is_scraped(record: Record) -> None:
    assert sorted(t["labels"]["service"] for t in record.targets) == sorted(record.services.values())
    assert {(t["labels"]["job"], t["health"], t["lastError"]) for t in record.targets} == {("kvmesh", "up", "")}


def test_promtool_finds_nothing_on_any_page(record: Record) -> None:
    for name, page in record.pages.items():
        done = subprocess.run(
            [str(PROMTOOL), "check", "metrics"], input=page, capture_output=True, text=True, timeout=30, check=False
        )
        assert (name, done.returncode, done.stdout + done.stderr) == (name, 0, "")


@pytest.mark.parametrize("panel", dict.fromkeys((q.dashboard, q.panel) for q in panel_queries()), ids=": ".join)
def test_every_query_of_a_panel_has_an_answer(record: Record, panel: tuple[str, str]) -> None:
    empty = [q.expr for q, series in record.answers.items() if (q.dashboard, q.panel) == panel and not series]
    assert not empty or panel in MAY_BE_EMPTY


def test_every_variable_has_something_to_choose(record: Record) -> None:
    assert set(record.choices) == {f"{series} {label}" for series, label in variable_queries()}
    for choices in record.choices.values():
        assert choices
    assert ["p0"] in record.choices.values()
    assert ["kvmesh"] in record.choices.values()


def test_every_metric_that_is_asked_for_is_there(record: Record) -> None:
    missing = asked_for().keys() - record.names
    assert missing <= NOT_THERE.keys()


def test_every_metric_of_the_services_is_there(record: Record) -> None:
    missing = {
        family
        for family, names in series_by_family().items()
        if family.startswith("kvmesh_") and not record.names & set(names)
    }
    assert missing == set()


@pytest.mark.parametrize("name", [rule.get("alert") or rule["record"] for rule in rules()])
def test_a_rule_evaluates(record: Record, name: str) -> None:
    rule = record.rules[name]
    assert (rule["health"], rule.get("lastError", "")) == ("ok", "")
    assert rule["series"] or rule["type"] == "alerting"


def test_no_alert_that_waits_for_nothing_fires(record: Record) -> None:
    assert [name for name, rule in record.rules.items() if rule.get("state") == "firing"] == []


def test_an_exemplar_names_the_room_of_a_request(record: Record) -> None:
    metrics = {found["seriesLabels"]["__name__"] for found in record.exemplars}
    assert metrics == {"kvmesh_time_to_first_token_seconds_bucket", "kvmesh_request_seconds_bucket"}
    for found in record.exemplars:
        for exemplar in found["exemplars"]:
            assert re.fullmatch(r"\S+", exemplar["labels"]["room"])


def test_the_parts_of_the_time_to_the_first_token_add_up(record: Record) -> None:
    parts = record.rules["part:kvmesh_time_to_first_token_part_seconds:mean5m"]["series"]
    assert {one["metric"]["part"] for one in parts} == PARTS
    (ratio,) = record.rules["job:kvmesh_time_to_first_token_parts_of_whole:ratio5m"]["series"]
    # Of each series rate() adds up to one scrape, of the twenty that it sees, but never more than brings it to 0.
    assert figures(ratio)[0] == pytest.approx(1, abs=0.06)
    page = text_string_to_metric_families(record.pages["gateway"])
    sums = {(s.name, s.labels.get("part")): s.value for f in page for s in f.samples if s.name.endswith("_sum")}
    whole = sums["kvmesh_time_to_first_token_seconds_sum", None]
    assert sum(sums["kvmesh_time_to_first_token_part_seconds_sum", p] for p in PARTS) == pytest.approx(whole, abs=0.001)


def test_the_slowest_stage_is_named_by_pipeline_and_rank(record: Record) -> None:
    (slowest,) = record.rules["pipeline:kvmesh_slowest_stage_seconds_per_token:mean5m"]["series"]
    assert slowest["metric"]["pipeline"] == "p0"
    assert slowest["metric"]["rank"] in ("0", "1")
    ratios = record.rules["stage:kvmesh_step_seconds_per_token_of_others:ratio5m"]["series"]
    of_others = {one["metric"]["rank"]: figures(one)[0] for one in ratios}
    assert of_others["0"] * of_others["1"] == pytest.approx(1)


def test_what_happened_is_counted(record: Record) -> None:
    requests = record.counted["kvmesh_requests_total"]
    assert requests["OK"] >= CLIENTS
    assert requests["CANCELLED"] == 1
    assert requests["INVALID_ARGUMENT"] == 1
    assert sum(record.counted["kvmesh_attempts_failed_total"].values()) >= 1
