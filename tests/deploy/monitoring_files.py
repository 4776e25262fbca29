"""What deploy/monitoring ships, read for tests: rules, alerts, panels and their queries, the metrics they name."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvmesh.telemetry.metrics import page_of

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
RULES = sorted((MONITORING / "rules").glob("*.rules.yaml"))
RULE_TESTS = sorted((Path(__file__).parent / "monitoring").glob("*.test.yaml"))
DASHBOARDS = sorted((MONITORING / "dashboards").glob("*.json"))

PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian: apt-get install prometheus)")
needs_prometheus = pytest.mark.skipif(
    None in (PROMTOOL, PROMETHEUS), reason="needs prometheus and promtool (Debian: apt-get install prometheus)"
)

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "info": ("_info",)}
"""What a family's series are called, by its type."""

Rule = dict[str, Any]


@cache
def rules() -> list[Rule]:
    """Every rule, recording and alerting."""
    return [rule for path in RULES for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, Rule]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def recorded() -> dict[str, Rule]:
    return {rule["record"]: rule for rule in rules() if "record" in rule}


@dataclass(frozen=True)
class PanelQuery:
    """A query of a panel, as it is shipped."""

    dashboard: str
    panel: str
    expr: str
    instant: bool


def dashboard(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def panels(path: Path) -> list[dict[str, Any]]:
    """The panels of a dashboard, headings left out."""
    return [panel for panel in dashboard(path)["panels"] if panel["type"] != "row"]


@cache
def panel_queries() -> list[PanelQuery]:
    return [
        PanelQuery(path.stem, panel["title"], target["expr"], target["instant"])
        for path in DASHBOARDS
        for panel in panels(path)
        for target in panel["targets"]
    ]


def variable_queries() -> Iterator[tuple[str, str]]:
    """Series and label that each variable of a dashboard takes its choices from."""
    for path in DASHBOARDS:
        for variable in dashboard(path)["templating"]["list"]:
            if variable["type"] == "query":
                found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
                assert found is not None
                yield found[1], found[2]


def metrics_in(expr: str) -> set[str]:
    """Names of the metrics in a query; what stands in quotes or braces names none."""
    bare = re.sub(r"\{[^{}]*\}", "", re.sub(r'"[^"]*"', '""', expr))
    return set(re.findall(r"\b(?:(?:kvmesh|process|python)_\w+|\w+:kvmesh\w*:\w+|up\b|ALERTS\b)", bare))


@cache
def series_by_family() -> dict[str, tuple[str, ...]]:
    """The metrics of kvmesh/telemetry/metrics.py and of the process itself: each with the names of its series."""
    families = page_of("every service").collect()
    return {f.name: tuple(f.name + suffix for suffix in SUFFIXES[f.type]) for f in families}


def asked_for() -> dict[str, set[str]]:
    """Every metric that a panel, a variable or a rule names, with who does."""
    askers = [(f"{q.dashboard}: {q.panel}", q.expr) for q in panel_queries()]
    askers += [("a variable", series) for series, _ in variable_queries()]
    askers += [(rule.get("alert", rule.get("record")), rule["expr"]) for rule in rules()]
    named: dict[str, set[str]] = {}
    for who, expr in askers:
        for metric in metrics_in(expr):
            named.setdefault(metric, set()).add(who)
    return named
