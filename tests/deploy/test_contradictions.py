"""Manifests that contradict themselves or the services: there are none, and each kind is noticed."""

import copy

import pytest
from changes import Change, keeps, of, setting, variable, within
from combinations import combined, documented, rendered
from contradictions import contradictions
from manifests import OVERLAYS, Document, named


@pytest.mark.parametrize("name", ["base", *OVERLAYS])
def test_nothing_contradicts(name: str) -> None:
    assert contradictions(rendered(name)) == []


@pytest.mark.parametrize("components", documented(), ids=" ".join)
def test_nothing_contradicts_in_a_documented_combination(components: tuple[str, ...]) -> None:
    assert contradictions(combined(components)) == []


def changed(documents: list[Document], change: Change) -> str:
    """What is said of them after a change."""
    broken = copy.deepcopy(documents)
    change(broken)
    return "\n".join(contradictions(broken))


DECODE = "kvmesh-decode"

IN_BASE = {
    "three pods for two stages": (within("kvmesh-prefill", "spec.replicas", 3), "rank -1 is outside"),
    "one pod for two stages": (within("kvmesh-prefill", "spec.replicas", 1), "pp_size is 2, replicas are 1"),
    "one stage for two pods": (setting("KVMESH_PP_SIZE", "1"), "replicas is 2 and pp_size is 1"),
    "three stages for two pods": (setting("KVMESH_PP_SIZE", "3"), "replicas is 2 and pp_size is 3"),
    "told of three pods": (variable("kvmesh-prefill", "KVMESH_REPLICAS", "3"), "replicas is 3 and pp_size is 2"),
    "told of no number": (variable("kvmesh-prefill", "KVMESH_REPLICAS", "0"), "the service is told 0"),
    "grace below drain": (
        within("kvmesh-prefill", ".terminationGracePeriodSeconds", 20),
        "grace of 20 s, preStop of 0 s, drain of 20 s",
    ),
    "grace below drain and preStop": (
        within("kvmesh-gateway", ".containers.0.lifecycle.preStop.sleep.seconds", 20),
        "grace of 40 s, preStop of 20 s, drain of 20 s",
    ),
    "told of another grace": (variable("kvmesh-decode", "KVMESH_GRACE_SECONDS", "60"), "the service is told 60 s"),
    "told of a grace below drain": (
        variable("kvmesh-decode", "KVMESH_GRACE_SECONDS", "20"),
        "grace_seconds is 20 and drain_seconds is 20",
    ),
    "drain above grace": (
        setting("KVMESH_DRAIN_SECONDS", "60"),
        "kvmesh-bootstrap-0: grace_seconds is 30 and drain_seconds is 60",
    ),
    "heartbeat as long as the lease": (
        setting("KVMESH_HEARTBEAT_SECONDS", "2"),
        "kvmesh-decode-0: heartbeat_seconds is 2 and lease_seconds is 2",
    ),
    "heartbeat of one member too long": (
        variable("kvmesh-decode", "KVMESH_HEARTBEAT_SECONDS", "5"),
        "heartbeat_seconds is 5 and lease_seconds is 2",
    ),
    "lease of the registry alone too short": (
        variable("kvmesh-bootstrap", "KVMESH_LEASE_SECONDS", "0.4"),
        "heartbeat_seconds is 0.5 and lease_seconds is 0.4",
    ),
    "heartbeat that one member can't see is too long": (
        lambda documents: [
            variable("kvmesh-decode", "KVMESH_LEASE_SECONDS", "0")(documents),
            variable("kvmesh-decode", "KVMESH_HEARTBEAT_SECONDS", "3")(documents),
        ],
        "kvmesh-decode-0: heartbeat of 3 s, the registry's lease is 2 s",
    ),
    "heartbeat above the watchdog": (
        setting("KVMESH_WATCHDOG_SECONDS", "0.04"),
        "heartbeat_seconds is 0.5 and watchdog_seconds is 0.04",
    ),
    "a probe on another port": (
        within("kvmesh-prefill", ".containers.0.livenessProbe.grpc.port", 50051),
        "livenessProbe asks",
    ),
    "a probe by another name": (
        within("kvmesh-decode", ".containers.0.readinessProbe.grpc.service", "ready"),
        "readinessProbe asks",
    ),
    "a port nobody binds": (
        within("kvmesh-prefill", ".containers.0.ports.0.containerPort", 50050),
        "port grpc is 50050, listen binds 50051",
    ),
    "health on another port": (setting("KVMESH_HEALTH_LISTEN", "0.0.0.0:8080"), "health_listen binds 8080"),
    "a Service on another port": (
        of("Service", "kvmesh-bootstrap", "spec.ports.0.port", 50050),
        "no Service has that name and port",
    ),
    "a Service for nobody": (
        of("Service", "kvmesh-gateway", "spec.selector", {"app.kubernetes.io/name": "gateway"}),
        "selects no pod",
    ),
    "a misspelt setting": (setting("KVMESH_NUM_PAGE", "3"), "unknown variable KVMESH_NUM_PAGE"),
    "a ConfigMap that is not there": (
        within("kvmesh-decode", ".containers.0.envFrom.0.configMapRef.name", "kvmesh"),
        "nothing is called 'kvmesh'",
    ),
    "a model that is not mounted": (setting("KVMESH_MODEL", "/mnt/model"), "model is /mnt/model, the mounts are"),
    "a cache that can't be written": (setting("KVMESH_CACHE_DIR", "/cache"), "cache_dir is /cache"),
    "a volume that is not there": (
        within("kvmesh-decode", ".volumes.0.name", "store"),
        "mounts cache, the volumes are",
    ),
    "a pod of two budgets": (
        of(
            "PodDisruptionBudget", "kvmesh-decode", "spec.selector.matchLabels", {"app.kubernetes.io/part-of": "kvmesh"}
        ),
        "counted by the disruption budgets kvmesh-decode and kvmesh-gateway",
    ),
    "a second registry": (
        within("kvmesh-bootstrap", "spec.replicas", 2),
        "the registry has 2 replicas; one is all there may be",
    ),
    "a budget that keeps all": (
        of("PodDisruptionBudget", "kvmesh-prefill", "spec.maxUnavailable", 0),
        "PodDisruptionBudget kvmesh-prefill keeps 2 of 2",
    ),
    "a budget that keeps all, by share": (
        of("PodDisruptionBudget", "kvmesh-prefill", "spec.maxUnavailable", "0%"),
        "PodDisruptionBudget kvmesh-prefill keeps 2 of 2",
    ),
    "a budget that keeps what there is": (keeps("kvmesh-decode", 1), "PodDisruptionBudget kvmesh-decode keeps 1 of 1"),
    "a budget that keeps more than half of one": (
        keeps("kvmesh-decode", "51%"),
        "PodDisruptionBudget kvmesh-decode keeps 1 of 1",
    ),
    "too little time to load": (
        within("kvmesh-decode", ".containers.0.startupProbe.failureThreshold", 30),
        "startupProbe allows 60 s, 3072 MiB of memory may take 62 s to load",
    ),
    "two workloads for one pod": (
        within("kvmesh-decode", "spec.selector.matchLabels", {"app.kubernetes.io/part-of": "kvmesh"}),
        "also selects the pods of",
    ),
}

IN_PRODUCTION = {
    "two pipelines of one name": (
        variable("kvmesh-prefill-p1", "KVMESH_PIPELINE", "p0"),
        "both are rank 0 of pipeline p0",
    ),
    "stages of one pipeline with other pages": (
        lambda documents: [
            variable("kvmesh-prefill-p1", "KVMESH_PIPELINE", "p0")(documents),
            variable("kvmesh-prefill-p1", "KVMESH_PAGE_SIZE", "32")(documents),
        ],
        "page_size is 16 and 32 for stages of pipeline p0",
    ),
    "a claim that is not there": (
        within("kvmesh-decode", ".volumes.2.persistentVolumeClaim.claimName", "model"),
        "needs the claim model, there is none",
    ),
    "scaling of nothing": (of("ScaledObject", "kvmesh-decode", "spec.scaleTargetRef.name", "decode"), "there is none"),
    "two owners of a number": (within("kvmesh-decode", "spec.replicas", 2), "kvmesh-decode has replicas too: 2"),
    "scaling of stages": (
        lambda documents: [
            of("ScaledObject", "kvmesh-decode", "spec.scaleTargetRef.name", "kvmesh-prefill")(documents),
            named(documents, "StatefulSet")["kvmesh-prefill"]["spec"].pop("replicas"),
        ],
        "which grows as a whole",
    ),
    "two scalers of one number": (
        lambda documents: documents.append(named(combined(("autoscaling-hpa",)), "HorizontalPodAutoscaler")[DECODE]),
        "HorizontalPodAutoscaler kvmesh-decode and ScaledObject kvmesh-decode: both scale StatefulSet kvmesh-decode",
    ),
    "a scaler of nothing": (
        lambda documents: [
            documents.append(copy.deepcopy(named(combined(("autoscaling-hpa",)), "HorizontalPodAutoscaler")[DECODE])),
            of("HorizontalPodAutoscaler", DECODE, "spec.scaleTargetRef.kind", "Deployment")(documents),
        ],
        "HorizontalPodAutoscaler kvmesh-decode scales Deployment kvmesh-decode, there is none",
    ),
    "queries of another namespace": (
        of("ScaledObject", "kvmesh-decode", "metadata.namespace", "mesh"),
        "asks for the mesh of namespace ['kvmesh'], its own is mesh",
    ),
}


WITH_TLS = {
    "a certificate that is not mounted": (
        setting("KVMESH_TLS_CERT", "/etc/tls/tls.crt"),
        "kvmesh-decode-0: tls_cert is /etc/tls/tls.crt, the mounts are",
    ),
    "a part of the files": (
        lambda documents: _config(documents).pop("KVMESH_TLS_CA"),
        "kvmesh-prefill-0: tls_cert and tls_key without tls_ca",
    ),
    "decoders that get no Secret": (
        within("kvmesh-decode", ".volumes.2.name", "secrets"),
        "/mnt/tls mounts tls, the volumes are",
    ),
    "decoders without TLS": (
        lambda documents: [
            within("kvmesh-decode", ".containers.0.envFrom", [])(documents),
            *(
                variable(DECODE, name, value)(documents)
                for name, value in _config(documents).items()
                if "TLS" not in name
            ),
        ],
        "kvmesh-prefill-0 and kvmesh-prefill-1 have TLS, kvmesh-decode-0 have not",
    ),
}


def _config(documents: list[Document]) -> dict[str, str]:
    (config,) = [c["data"] for c in named(documents, "ConfigMap").values() if "KVMESH_PP_SIZE" in c["data"]]
    return config


CASES = [
    pytest.param(name, change, line, id=what)
    for name, made in (("base", IN_BASE), ("production", IN_PRODUCTION))
    for what, (change, line) in made.items()
]


@pytest.mark.parametrize(("name", "change", "line"), CASES)
def test_a_contradiction_is_noticed(name: str, change: Change, line: str) -> None:
    assert line in changed(rendered(name), change)


@pytest.mark.parametrize(
    ("name", "value"), [("KVMESH_DTYPE", "bf16"), ("KVMESH_PAGE_SIZE", "32"), ("KVMESH_NUM_PAGES", "9")]
)
def test_decoders_may_have_other_pages_and_another_dtype_than_stages(name: str, value: str) -> None:
    assert not changed(rendered("base"), variable(DECODE, name, value))


@pytest.mark.parametrize(("change", "line"), WITH_TLS.values(), ids=WITH_TLS)
def test_a_contradiction_of_tls_is_noticed(change: Change, line: str) -> None:
    assert line in changed(combined(("tls",)), change)


def test_a_group_of_another_size_than_the_pipeline_is_noticed() -> None:
    said = changed(combined(("lws",)), of("LeaderWorkerSet", "kvmesh-prefill", "spec.leaderWorkerTemplate.size", 3))
    assert "rank -1 is outside" in said
    assert "replicas is 3 and pp_size is 2" in said
