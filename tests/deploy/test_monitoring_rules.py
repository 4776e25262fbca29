"""deploy/monitoring: configuration and rules that Prometheus takes, alerts that fire when they should and have a runbook."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from monitoring_files import (
    MONITORING,
    PROMTOOL,
    ROOT,
    RULE_TESTS,
    RULES,
    alerts,
    metrics_in,
    needs_promtool,
    recorded,
    rules,
    series_by_family,
)

RUNBOOKS = "docs/operations.md"
SEVERITIES = ("critical", "warning", "info")
OF_PROMETHEUS = {"up", "ALERTS"}
"""Series that Prometheus makes itself."""


def promtool(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(w) for w in (PROMTOOL, *words)], capture_output=True, text=True, timeout=50, check=False)


def said(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_the_configuration_and_targets_by_hand(tmp_path: Path) -> None:
    copy = shutil.copytree(MONITORING, tmp_path / "monitoring")
    shutil.copy(copy / "by-hand.json", copy / "targets")
    done = promtool("check", "config", copy / "prometheus.yaml")
    assert (done.returncode, "WARNING" in said(done)) == (0, False), said(done)


@needs_promtool
def test_prometheus_takes_the_configuration_for_kubernetes(tmp_path: Path) -> None:
    """Debian builds promtool without Kubernetes discovery: then all but that section is checked."""
    copy = shutil.copytree(MONITORING, tmp_path / "monitoring")
    done = promtool("check", "config", copy / "prometheus.kubernetes.yaml")
    if "kubernetes_sd_configs not found" in said(done):
        config = yaml.safe_load((copy / "prometheus.kubernetes.yaml").read_text())
        (job,) = config["scrape_configs"]
        assert job.pop("kubernetes_sd_configs")[0]["role"] == "pod"
        (copy / "without.yaml").write_text(yaml.safe_dump(config))
        done = promtool("check", "config", copy / "without.yaml")
    assert done.returncode == 0, said(done)


def test_both_configurations_differ_only_in_how_targets_are_found() -> None:
    here, there = (yaml.safe_load((MONITORING / f"prometheus{k}.yaml").read_text()) for k in ("", ".kubernetes"))
    assert len(here.pop("scrape_configs")) == len(there.pop("scrape_configs")) == 1
    assert here == there


def test_the_targets_by_hand_are_those_that_the_readme_starts() -> None:
    groups = json.loads((MONITORING / "by-hand.json").read_text())
    readme = (MONITORING / "README.md").read_text()
    started = re.findall(r"-m services\.(\w+) .*--metrics-listen (\S+)", readme)
    assert sorted(started) == sorted((g["labels"]["service"], t) for g in groups for t in g["targets"])


@needs_promtool
@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_prometheus_takes_the_rules(path: Path) -> None:
    done = promtool("check", "rules", path)
    assert done.returncode == 0, said(done)


@needs_promtool
@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.name)
def test_rules_answer_as_their_tests_say(path: Path) -> None:
    done = promtool("test", "rules", path)
    assert done.returncode == 0, said(done)


@needs_promtool
def test_a_rule_that_answers_otherwise_is_noticed(tmp_path: Path) -> None:
    shutil.copytree(MONITORING / "rules", tmp_path / "rules")
    path = next(p for p in RULE_TESTS if p.name == "alerts.stages.test.yaml")
    (tmp_path / path.name).write_text(path.read_text().replace("../../../deploy/monitoring/rules", "rules"))
    broken = tmp_path / "rules" / "alerts.rules.yaml"
    text = broken.read_text()
    assert "kvmesh_live == 0" in text
    broken.write_text(text.replace("kvmesh_live == 0", "kvmesh_live == 1"))
    assert promtool("test", "rules", tmp_path / path.name).returncode == 1


# What is tested.


def expectations() -> list[dict[str, Any]]:
    """Every expectation of an expression in the rule tests."""
    return [
        expectation
        for path in RULE_TESTS
        for test in yaml.safe_load(path.read_text())["tests"]
        for expectation in test.get("promql_expr_test", [])
    ]


def about(alert: str) -> list[dict[str, Any]]:
    """The expectations that speak of an alert."""
    patterns = [(e, re.match(r'.*ALERTS\{alertname=(~?)"([^"]+)"', e["expr"])) for e in expectations()]
    return [e for e, found in patterns if found and re.fullmatch(found[2] if found[1] else re.escape(found[2]), alert)]


def firing(alert: str) -> list[dict[str, str]]:
    """The labels of an alert wherever a test expects it to fire."""
    samples = [sample["labels"] for e in expectations() for sample in e.get("exp_samples") or []]
    labels = [dict(re.findall(r'(\w+)="([^"]*)"', text)) for text in samples if text.startswith("ALERTS{")]
    return [found for found in labels if found["alertname"] == alert and found["alertstate"] == "firing"]


@pytest.mark.parametrize("alert", alerts())
def test_an_alert_is_shown_to_fire_and_to_be_silent(alert: str) -> None:
    assert firing(alert)
    assert [e for e in about(alert) if not any(f'"{alert}"' in s["labels"] for s in e.get("exp_samples") or [])]


@pytest.mark.parametrize("name", recorded())
def test_a_recording_rule_is_computed_in_a_test(name: str) -> None:
    assert [e for e in expectations() if name in e["expr"] and e.get("exp_samples")]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_asks_only_for_metrics_that_exist(rule: dict[str, Any]) -> None:
    known = {name for names in series_by_family().values() for name in names} | recorded().keys() | OF_PROMETHEUS
    assert metrics_in(rule["expr"])
    assert metrics_in(rule["expr"]) <= known


# What an alert says.


@pytest.mark.parametrize("alert", alerts())
def test_an_alert_has_a_severity_and_texts_from_labels_that_it_has(alert: str) -> None:
    rule = alerts()[alert]
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in SEVERITIES
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
    for labels in firing(alert):
        assert used <= labels.keys()


def anchors(markdown: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", markdown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("alert", alerts())
def test_an_alert_links_to_its_own_entry_of_the_runbook(alert: str) -> None:
    path, _, anchor = alerts()[alert]["annotations"]["runbook_url"].partition("#")
    assert (path, anchor) == (RUNBOOKS, alert.lower())
    assert anchor in anchors((ROOT / path).read_text())


def test_the_runbook_has_no_entry_without_an_alert() -> None:
    entries = re.findall(r"^#+ (Kvmesh\w+)$", (ROOT / RUNBOOKS).read_text(), re.MULTILINE)
    assert sorted(entries) == sorted(alerts())
