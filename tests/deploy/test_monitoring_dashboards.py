"""deploy/monitoring/dashboards: written from panels/, laid out without overlap, explained; every metric has its place."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from monitoring_files import (
    DASHBOARDS,
    MONITORING,
    asked_for,
    dashboard,
    panels,
    recorded,
    series_by_family,
)
from test_monitoring_rules import OF_PROMETHEUS

COLUMNS = 24
NOT_ASKED_FOR = {
    "kvmesh_queued_prefill_tokens": "shown in seconds, which compare across pipelines: kvmesh_queued_prefill_seconds",
}
"""Metrics of kvmesh that no panel and no rule uses, and why."""

each = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)


def test_they_are_what_panels_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, MONITORING / "panels", tmp_path], check=True, timeout=30)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {p.name: p.read_text() for p in DASHBOARDS}


def test_there_are_two_of_them_and_files_are_named_by_their_uid() -> None:
    assert {path.stem: dashboard(path)["uid"] for path in DASHBOARDS} == {n: n for n in ("kvmesh", "kvmesh-members")}


@each
def test_nothing_overlaps_and_nothing_sticks_out(path: Path) -> None:
    cells = [cell for panel in dashboard(path)["panels"] for cell in covered(panel["gridPos"])]
    assert len(cells) == len(set(cells))
    assert all(x < COLUMNS for x, _ in cells)


def covered(place: dict[str, int]) -> list[tuple[int, int]]:
    columns = range(place["x"], place["x"] + place["w"])
    return list(itertools.product(columns, range(place["y"], place["y"] + place["h"])))


@each
def test_every_panel_has_an_own_number_a_title_a_description_and_a_unit(path: Path) -> None:
    numbers = [panel["id"] for panel in dashboard(path)["panels"]]
    assert len(numbers) == len(set(numbers))
    for panel in panels(path):
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
    titles = [panel["title"] for panel in panels(path)]
    assert len(titles) == len(set(titles))


@each
def test_the_data_source_is_a_variable_everywhere(path: Path) -> None:
    whole = dashboard(path)
    assert [(v["name"], v["query"]) for v in whole["templating"]["list"] if v["type"] == "datasource"] == [
        ("datasource", "prometheus")
    ]
    asking = [*panels(path), *(t for p in panels(path) for t in p["targets"])]
    asking += [v for v in whole["templating"]["list"] if v["type"] == "query"]
    assert {a["datasource"]["uid"] for a in asking} == {"${datasource}"}


@each
def test_every_query_is_of_one_mesh(path: Path) -> None:
    """Two meshes in one Prometheus are never added up."""
    for panel in panels(path):
        for target in panel["targets"]:
            assert selectors(target["expr"])
            assert all('job="$job"' in found for found in selectors(target["expr"]))


def selectors(expr: str) -> list[str]:
    """What stands in braces behind a name."""
    return [part.partition("}")[0] for part in expr.split("{")[1:]]


@each
def test_every_variable_that_a_query_uses_is_there(path: Path) -> None:
    whole = dashboard(path)
    names = {v["name"] for v in whole["templating"]["list"]} | {"__rate_interval", "__range"}
    for panel in panels(path):
        for target in panel["targets"]:
            used = {word.split("]")[0].split('"')[0].split(",")[0] for word in target["expr"].split("$")[1:]}
            assert used <= names


@each
def test_links_lead_from_one_to_the_other(path: Path) -> None:
    (link,) = dashboard(path)["links"]
    assert link["tags"] == dashboard(path)["tags"] == ["kvmesh"]


# Metrics.


def test_what_is_asked_for_exists() -> None:
    known = {name for names in series_by_family().values() for name in names} | recorded().keys() | OF_PROMETHEUS
    assert {metric: who for metric, who in asked_for().items() if metric not in known} == {}


def families_asked_for() -> set[str]:
    return {family for family, names in series_by_family().items() if asked_for().keys() & set(names)}


@pytest.mark.parametrize("family", [name for name in series_by_family() if name.startswith("kvmesh_")])
def test_a_metric_is_in_a_panel_or_a_rule_or_it_is_said_why_not(family: str) -> None:
    assert (family in families_asked_for()) != (family in NOT_ASKED_FOR)


def thresholds(panel: dict[str, Any]) -> list[dict[str, Any]]:
    return panel["fieldConfig"]["defaults"]["thresholds"]["steps"]


@each
def test_limits_are_seen(path: Path) -> None:
    """Lines on a chart; elsewhere the colour, which a panel takes from its limits only if it is told to."""
    for panel in panels(path):
        field = panel["fieldConfig"]["defaults"]
        told = [
            p["value"]["steps"]
            for o in panel["fieldConfig"]["overrides"]
            for p in o["properties"]
            if p["id"] == "thresholds"
        ]
        if any(len(steps) > 1 for steps in (thresholds(panel), *told)):
            charted = panel["type"] == "timeseries" and field["custom"]["thresholdsStyle"]["mode"] != "off"
            assert charted or field["color"]["mode"] == "thresholds", panel["title"]


@each
def test_a_table_shows_no_label_that_discovery_in_a_cluster_adds(path: Path) -> None:
    for panel in panels(path):
        if panel["type"] == "table":
            (organized,) = [t["options"] for t in panel["transformations"] if t["id"] == "organize"]
            assert {"container", "endpoint", "namespace", "pod"} <= organized["excludeByName"].keys()


@each
def test_thresholds_begin_without_a_value_and_rise(path: Path) -> None:
    for panel in panels(path):
        first, *others = thresholds(panel)
        assert first["value"] is None
        assert sorted(s["value"] for s in others) == [s["value"] for s in others]
