"""What other operators read: KEDA's queries, the Prometheus operator's monitors and rules, Grafana's dashboards."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from combinations import combined, rendered
from manifests import K8S, ROOT, Document, named, pods, selects
from monitoring_files import PROMTOOL, needs_promtool

from kvmesh.telemetry.metrics import page_of

SCALED = combined(
    ("namespace", "model-volume", "gpu", "monitoring", "network-policies", "autoscaling", "lws", "lws-autoscaling")
)


COMPUTING = "stage:kvmesh_computing:ratio5m"


def queries(documents: list[Document]) -> dict[str, list[str]]:
    """The queries of each scaled object."""
    return {
        name: [t["metadata"]["query"] for t in scaled["spec"]["triggers"]]
        for name, scaled in named(documents, "ScaledObject").items()
    }


def all_rules(document: Document) -> list[Document]:
    return [rule for group in document["spec"]["groups"] for rule in group["rules"]]


def shown_by(service: str) -> set[str]:
    return {f"{m.name}_total" if m.type == "counter" else m.name for m in page_of(service).collect()}


@pytest.fixture(scope="session")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("made", K8S / "components" / "monitoring" / "made.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_scaled_is_decoders_gateways_and_whole_pipelines() -> None:
    assert queries(SCALED).keys() == {"kvmesh-decode", "kvmesh-gateway", "kvmesh-prefill"}
    assert queries(rendered("production")).keys() == {"kvmesh-decode", "kvmesh-gateway"}


def test_a_query_asks_for_metrics_of_the_pods_it_names() -> None:
    for asked in queries(SCALED).values():
        for query in asked:
            for metric, pattern in re.findall(r'(kvmesh_\w+)\{[^}]*pod=~"([^"]+)"', query):
                services = {
                    p.service
                    for p in pods(SCALED)
                    if re.fullmatch(pattern, f"{p.name}-x") or re.fullmatch(pattern, p.name)
                }
                assert len(services) == 1
                assert metric in shown_by(services.pop()), query


def test_a_query_for_what_is_recorded_asks_by_the_name_of_a_rule() -> None:
    recorded = {r["record"] for d in named(SCALED, "PrometheusRule").values() for r in all_rules(d) if "record" in r}
    asked = [query for of_one in queries(SCALED).values() for query in of_one]
    assert {name for query in asked for name in re.findall(r"\w+:kvmesh\w*:\w+", query)} == {COMPUTING}
    assert COMPUTING in recorded


@needs_promtool
def test_pipelines_that_are_busy_are_kept(tmp_path: Path) -> None:
    """Two of them, 80 % busy, with next to no queue: as many as 2.3 shall be there, where the queue would keep one."""
    busy = {("p0", 0): 0.5, ("p0", 1): 0.8, ("p1", 0): 0.8, ("p1", 1): 0.2}
    series = [
        {
            "series": f'{COMPUTING}{{job="kvmesh/kvmesh", pipeline="{pipeline}", rank="{rank}"}}',
            "values": f"{share}x10",
        }
        for (pipeline, rank), share in busy.items()
    ]
    series += [
        {"series": f'kvmesh_queued_prefill_seconds{{job="kvmesh/kvmesh", pod="{pod}"}}', "values": f"{seconds}x10"}
        for pod, seconds in {"kvmesh-prefill-0-1": 0.3, "kvmesh-prefill-0": 0, "kvmesh-prefill-1-1": 0.3}.items()
    ]
    triggers = [t["metadata"] for t in named(SCALED, "ScaledObject")["kvmesh-prefill"]["spec"]["triggers"]]
    wanted = [{"expr": f"ceil(({t['query']}) / {t['threshold']})", "eval_time": "1m"} for t in triggers]
    tests = [{**w, "exp_samples": [{"labels": "{}", "value": v}]} for w, v in zip(wanted, (3, 1), strict=True)]
    file = tmp_path / "scaling.test.yaml"
    file.write_text(yaml.safe_dump({"tests": [{"input_series": series, "promql_expr_test": tests}]}))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", file], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_empty_answer_is_no_answer() -> None:
    """KEDA would take it for 0, and scale down to the least."""
    triggers = [t["metadata"] for s in named(SCALED, "ScaledObject").values() for t in s["spec"]["triggers"]]
    assert len(triggers) == 5
    assert {t["ignoreNullValues"] for t in triggers} == {"false"}


def test_every_scaled_object_asks_one_prometheus() -> None:
    triggers = [t for s in named(SCALED, "ScaledObject").values() for t in s["spec"]["triggers"]]
    assert len({t["metadata"]["serverAddress"] for t in triggers}) == 1
    assert all(float(t["metadata"]["threshold"]) > 0 for t in triggers)


def test_going_down_is_slower_than_going_up() -> None:
    """A decoder that leaves hands its rooms over, and they are computed again."""
    for scaled in named(SCALED, "ScaledObject").values():
        behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        down, up = behavior["scaleDown"], behavior.get("scaleUp", {})
        assert down["stabilizationWindowSeconds"] >= 600 > up.get("stabilizationWindowSeconds", 0)
        assert all(p["type"] == "Pods" and p["value"] == 1 for p in down["policies"])


def test_without_prometheus_nothing_is_taken_away() -> None:
    for scaled in named(SCALED, "ScaledObject").values():
        assert scaled["spec"]["fallback"]["behavior"] == "currentReplicasIfHigher"
        assert scaled["spec"]["fallback"]["replicas"] >= scaled["spec"]["minReplicaCount"]


def test_every_pod_is_scraped_and_each_mesh_is_a_job() -> None:
    (monitor,) = named(SCALED, "PodMonitor").values()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for pod in pods(SCALED):
        assert selects(monitor["spec"]["selector"]["matchLabels"], pod.labels)
        assert endpoint["port"] in pod.ports
    (job,) = [r for r in endpoint["relabelings"] if r["targetLabel"] == "job"]
    assert job["replacement"].startswith("kvmesh")
    assert job["sourceLabels"] == ["__meta_kubernetes_namespace"]


def test_a_process_is_called_by_its_pod_with_the_operator_and_without() -> None:
    (monitor,) = named(SCALED, "PodMonitor").values()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    labels = {r["targetLabel"]: (r["sourceLabels"], r.get("replacement")) for r in endpoint["relabelings"]}
    assert labels["instance"] == (["__meta_kubernetes_pod_name"], None)
    plain = yaml.safe_load((ROOT / "deploy" / "monitoring" / "prometheus.kubernetes.yaml").read_text())
    (job,) = plain["scrape_configs"]
    relabelings = [r for r in job["relabel_configs"] if "target_label" in r]
    set_here = {r["target_label"]: (r["source_labels"], r.get("replacement")) for r in relabelings}
    set_by_the_operator = {
        "namespace": (["__meta_kubernetes_namespace"], None),
        "pod": (["__meta_kubernetes_pod_name"], None),
    }
    assert set_here == labels | set_by_the_operator


def test_the_rules_are_those_of_plain_prometheus() -> None:
    files = sorted((ROOT / "deploy" / "monitoring" / "rules").glob("*.yaml"))
    plain = [yaml.safe_load(file.read_text()) for file in files]
    assert plain
    assert [r["spec"] for r in named(SCALED, "PrometheusRule").values()] == plain


def test_what_is_made_from_rules_and_dashboards_is_what_would_be_made_now(made: ModuleType) -> None:
    again = "run: python deploy/k8s/components/monitoring/made.py"
    assert made.RULES.read_text() == made.rules(), again
    assert made.DASHBOARDS.read_text() == made.dashboards(), again


def test_runbooks_become_links_once_it_is_said_where_they_are(made: ModuleType) -> None:
    base = "https://git.example.org/kvmesh/blob/main/"
    linked = made.rules(runbooks=base)
    rules = [r for d in yaml.safe_load_all(linked) for g in d["spec"]["groups"] for r in g["rules"] if "alert" in r]
    assert {r["annotations"]["runbook_url"].partition("#")[0] for r in rules} == {f"{base}docs/operations.md"}
    assert linked.replace(base, "") == made.rules()


def test_each_dashboard_is_a_config_map_that_the_sidecar_finds() -> None:
    files = sorted((ROOT / "deploy" / "monitoring" / "dashboards").glob("*.json"))
    maps = [
        c
        for c in named(SCALED, "ConfigMap").values()
        if c["metadata"].get("labels", {}).get("grafana_dashboard") == "1"
    ]
    assert {name: json.loads(text) for c in maps for name, text in c["data"].items()} == {
        f.name: json.loads(f.read_text()) for f in files
    }


def test_rules_and_dashboards_that_come_later_get_objects_of_their_own(made: ModuleType, tmp_path: Path) -> None:
    for name, text in {
        "rules/kvmesh.rules.yaml": "groups:\n  - name: a\n",
        "rules/slow.rules.yaml": "groups:\n\n  - name: b\n    rules:\n      - expr: |\n          1\n            + 1\n",
        "dashboards/kvmesh-mesh.json": "{}",
        "dashboards/stages.json": "{}",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    first, second = yaml.safe_load_all(made.rules(tmp_path))
    assert [d["metadata"]["name"] for d in (first, second)] == ["kvmesh", "kvmesh-slow"]
    assert second["spec"] == yaml.safe_load((tmp_path / "rules" / "slow.rules.yaml").read_text())
    listed = yaml.safe_load(made.dashboards(tmp_path))["configMapGenerator"]
    assert [(g["name"], g["files"]) for g in listed] == [
        ("kvmesh-mesh-dashboard", ["kvmesh-mesh.json"]),
        ("kvmesh-stages-dashboard", ["stages.json"]),
    ]
