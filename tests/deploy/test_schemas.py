"""Every document is what its API takes, to the letter: overlays always, all documented combinations in the long run."""

import copy
import re

import jsonschema
import kubernetes_validate
import pytest
from changes import put
from combinations import combined, documented, everything, rendered
from manifests import K8S, OVERLAYS, Document, named, workloads
from schemas import OWN, PROMTOOL, VERSIONS, check


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["base", *OVERLAYS])
def test_every_document_is_valid_to_the_letter(name: str, version: str) -> None:
    for document in rendered(name):
        check(document, version)


@pytest.mark.deep
@pytest.mark.slice
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("components", documented(), ids=" ".join)
def test_every_document_of_a_combination_is_valid_to_the_letter(components: tuple[str, ...], version: str) -> None:
    for document in combined(components):
        check(document, version)


def test_every_component_stands_in_some_documented_combination() -> None:
    there = {path.parent.name for path in (K8S / "components").glob("*/kustomization.yaml")}
    assert {component for combination in documented() for component in combination} == there


def test_the_readme_lists_every_component() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", (K8S / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(p.parent.name for p in (K8S / "components").glob("*/kustomization.yaml"))


def test_every_kind_that_has_a_schema_here_is_used() -> None:
    """Else it could not be wrong."""
    kinds = {(d["apiVersion"], d["kind"]) for documents in everything().values() for d in documents}
    assert OWN.keys() <= kinds


def test_a_misspelt_field_is_not_valid() -> None:
    broken = copy.deepcopy(workloads(rendered("base"))[0])
    broken["spec"]["template"]["spec"]["enableServiceLink"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        check(broken, VERSIONS[-1])


def test_a_kind_that_nobody_knows_is_not_valid() -> None:
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        check({"apiVersion": "example.com/v1", "kind": "Mesh", "metadata": {"name": "x"}}, VERSIONS[-1])


EVERYTHING = ("model-init", "monitoring", "autoscaling", "lws", "lws-autoscaling")


@pytest.mark.parametrize(
    ("kind", "name", "path", "value"),
    [
        ("ScaledObject", "kvmesh-decode", "spec.minReplicas", 1),
        ("ScaledObject", "kvmesh-decode", "spec.triggers.0.metadata.treshold", "1"),
        ("ScaledObject", "kvmesh-decode", "spec.triggers.0.metadata.threshold", 0.66),
        ("ScaledObject", "kvmesh-decode", "spec.triggers.0.metadata.ignoreNullValues", "true"),
        ("ScaledObject", "kvmesh-decode", "spec.advanced.horizontalPodAutoscalerConfig.behavior.scaledown", {}),
        ("ScaledObject", "kvmesh-prefill", "spec.scaleTargetRef.kinds", "LeaderWorkerSet"),
        ("PodMonitor", "kvmesh", "spec.podMetricsEndpoint", []),
        ("PodMonitor", "kvmesh", "spec.podMetricsEndpoints.0.port", 9090),
        ("LeaderWorkerSet", "kvmesh-prefill", "spec.leaderWorkerTemplate.sizes", 2),
        ("LeaderWorkerSet", "kvmesh-prefill", "spec.leaderWorkerTemplate.size", 0),
        ("LeaderWorkerSet", "kvmesh-prefill", "spec.leaderWorkerTemplate.workerTemplate.spec.hostNet", True),
        ("LeaderWorkerSet", "kvmesh-prefill", "spec.leaderWorkerTemplate.workerTemplate.spec.containers.0.ports", 1),
    ],
)
def test_a_wrong_field_of_a_kind_of_others_is_not_valid(kind: str, name: str, path: str, value: object) -> None:
    (document,) = copy.deepcopy([named(combined(EVERYTHING), kind)[name]])
    check(document, VERSIONS[-1])
    put(document, path, value)
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(document, VERSIONS[-1])


def a_rule(documents: list[Document]) -> Document:
    return copy.deepcopy(next(d for d in documents if d["kind"] == "PrometheusRule"))


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: apt-get install prometheus)")
def test_what_is_no_query_is_not_valid() -> None:
    rule = a_rule(combined(EVERYTHING))
    check(rule, VERSIONS[-1])
    rule["spec"]["groups"][0]["rules"][0]["expr"] = "sum(kvmesh_pages"
    scaled = copy.deepcopy(named(combined(EVERYTHING), "ScaledObject")["kvmesh-decode"])
    scaled["spec"]["triggers"][0]["metadata"]["query"] = "sum(kvmesh_pages"
    for broken in (rule, scaled):
        with pytest.raises(jsonschema.ValidationError, match="unclosed left parenthesis"):
            check(broken, VERSIONS[-1])
