"""components/autoscaling-hpa: the numbers of KEDA's component, and the rules that give an adapter its metrics."""

import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from changes import of
from combinations import combined
from contradictions import contradictions
from manifests import K8S, Document, named, pods
from monitoring_files import PROMTOOL, metrics_in, needs_promtool
from schemas import read_by_promtool

from kvmesh.telemetry.metrics import page_of

HPA = named(combined(("autoscaling-hpa",)), "HorizontalPodAutoscaler")
KEDA = named(combined(("autoscaling",)), "ScaledObject")
VALUES = yaml.safe_load((K8S / "components" / "autoscaling-hpa" / "prometheus-adapter.yaml").read_text())
RULES: dict[str, dict[str, Any]] = {r["name"]["as"]: r for r in VALUES["rules"]["custom"]}


def asked_for(scaler: Document) -> dict[str, float]:
    """Metrics of the pods, and what each shall be on the average."""
    metrics = [m["pods"] for m in scaler["spec"]["metrics"]]
    assert {m["target"]["type"] for m in metrics} == {"AverageValue"}
    return {m["metric"]["name"]: number(m["target"]["averageValue"]) for m in metrics}


def number(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def expanded(rule: dict[str, Any], pods_asked: str) -> str:
    """The query that the adapter sends for some pods."""
    values = {
        ".Series": re.split(r"\{", rule["seriesQuery"])[0],
        ".LabelMatchers": f'namespace="kvmesh",pod=~"{pods_asked}"',
        ".GroupBy": "pod",
    }
    query = re.sub(r"<<([.\w]+)>>", lambda found: values[found[1]], rule["metricsQuery"])
    assert "<<" not in query
    return query


@pytest.mark.parametrize("name", sorted(KEDA))
def test_its_numbers_are_those_of_the_component_for_keda(name: str) -> None:
    mine, other = HPA[name]["spec"], KEDA[name]["spec"]
    assert mine["scaleTargetRef"] == other["scaleTargetRef"]
    assert (mine["minReplicas"], mine["maxReplicas"]) == (other["minReplicaCount"], other["maxReplicaCount"])
    assert mine["behavior"] == other["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert [*asked_for(HPA[name]).values()] == [float(t["metadata"]["threshold"]) for t in other["triggers"]]


def test_it_scales_what_the_component_for_keda_scales() -> None:
    assert HPA.keys() == KEDA.keys()


def test_every_metric_has_a_rule_and_every_rule_is_for_a_metric() -> None:
    assert {m for scaler in HPA.values() for m in asked_for(scaler)} == RULES.keys()


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_rule_is_about_a_metric_of_the_pods_that_are_scaled(name: str) -> None:
    rule = RULES[name]
    series = re.split(r"\{", rule["seriesQuery"])[0]
    assert re.fullmatch(rule["name"]["matches"], series)
    assert metrics_in(expanded(rule, "a|b")) == {series}
    assert rule["resources"]["overrides"] == {k: {"resource": k} for k in ("namespace", "pod")}
    scaled = {s["metadata"]["name"] for s in HPA.values() if name in asked_for(s)}
    services = {p.service for p in pods(combined(("autoscaling-hpa",))) if p.owner["metadata"]["name"] in scaled}
    assert len(services) == len(scaled) == 1
    assert series in {m.name for m in page_of(services.pop()).collect()}


@needs_promtool
@pytest.mark.parametrize("name", sorted(RULES))
def test_what_a_rule_asks_is_a_query(name: str) -> None:
    query = {"record": "query", "expr": expanded(RULES[name], "a|b")}
    read_by_promtool(name, {"groups": [{"name": "queries", "rules": [query]}]})


@needs_promtool
def test_the_answer_is_one_value_for_each_pod_that_was_asked_for(tmp_path: Path) -> None:
    """promtool computes them: three quarters of a's pages are taken, none of b's; c was not asked for."""
    pages = {"a": {"free": 25, "running": 70, "receiving": 5}, "b": {"free": 100, "running": 0}, "c": {"free": 0}}
    series = {
        f'kvmesh_pages{{namespace="kvmesh", pod="{pod}", state="{state}"}}': count
        for pod, states in pages.items()
        for state, count in states.items()
    }
    series |= {
        f'{metric}{{namespace="kvmesh", pod="{pod}"}}': count
        for metric in ("kvmesh_rooms_running", "kvmesh_requests_open")
        for pod, count in (("a", 7), ("b", 0), ("c", 9))
    }
    answers = {"kvmesh_pages_taken_ratio": 0.75, "kvmesh_rooms_running": 7, "kvmesh_requests_open": 7}
    test = {
        "input_series": [{"series": name, "values": f"{count}x10"} for name, count in series.items()],
        "promql_expr_test": [
            {
                "expr": expanded(RULES[name], "a|b"),
                "eval_time": "1m",
                "exp_samples": [{"labels": '{pod="a"}', "value": value}, {"labels": '{pod="b"}', "value": 0}],
            }
            for name, value in answers.items()
        ],
    }
    file = tmp_path / "adapter.test.yaml"
    file.write_text(yaml.safe_dump({"tests": [test]}))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", file], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_takes_no_address_and_no_namespace() -> None:
    """Those are the adapter's."""
    assert "monitoring" not in yaml.safe_dump_all(HPA.values())
    assert "job=" not in yaml.safe_dump_all(HPA.values())


def test_with_the_component_for_keda_nothing_is_rendered() -> None:
    with pytest.raises(AssertionError, match="replicas"):
        combined(("autoscaling", "autoscaling-hpa"))


def test_stages_are_not_scaled_one_by_one() -> None:
    broken = copy.deepcopy(combined(("autoscaling-hpa",)))
    of("HorizontalPodAutoscaler", "kvmesh-decode", "spec.scaleTargetRef.name", "kvmesh-prefill")(broken)
    del named(broken, "StatefulSet")["kvmesh-prefill"]["spec"]["replicas"]
    assert any("which grows as a whole" in line for line in contradictions(broken))
