"""deploy/k8s/base: valid, hardened, and of one mind with itself and with the services it starts."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import kubernetes_validate
import pytest
from manifests import BASE, SERVICES, Document, Pod, contradictions, named, pods, render, workloads

from kvmesh.rpc.address import Address, advertised, parse

KUBERNETES_VERSIONS = ("1.34", "1.37")


@pytest.fixture(scope="session")
def base() -> list[Document]:
    return render(BASE)


@pytest.fixture(params=SERVICES)
def pod(request: pytest.FixtureRequest, base: list[Document]) -> Pod:
    return next(p for p in pods(base) if p.service == request.param)


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_every_document_is_valid_to_the_letter(base: list[Document], version: str) -> None:
    for document in base:
        assert kubernetes_validate.validate(document, version, strict=True) == version


def test_a_misspelt_field_is_not_valid(base: list[Document]) -> None:
    broken = copy.deepcopy(workloads(base)[0])
    broken["spec"]["template"]["spec"]["enableServiceLink"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES_VERSIONS[-1], strict=True)


def test_each_service_has_one_workload_and_one_file(base: list[Document]) -> None:
    assert sorted(p.service for p in pods(base) if p.index == 0) == sorted(SERVICES)
    assert {f.stem for f in BASE.glob("*.yaml")} == {"kustomization", *SERVICES}


def test_nothing_contradicts(base: list[Document]) -> None:
    assert contradictions(base) == []


def stage_set(documents: list[Document]) -> Document:
    return named(documents, "StatefulSet")["kvmesh-prefill"]


def set_replicas(documents: list[Document]) -> None:
    stage_set(documents)["spec"]["replicas"] = 3


def set_grace(documents: list[Document]) -> None:
    stage_set(documents)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 20


def set_probe_port(documents: list[Document]) -> None:
    stage_set(documents)["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["grpc"]["port"] = 50051


def set_probe_name(documents: list[Document]) -> None:
    stage_set(documents)["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["grpc"]["service"] = "ready"


def set_container_port(documents: list[Document]) -> None:
    stage_set(documents)["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"] = 50050


def set_service_port(documents: list[Document]) -> None:
    named(documents, "Service")["kvmesh-bootstrap"]["spec"]["ports"][0]["port"] = 50050


def set_selector(documents: list[Document]) -> None:
    named(documents, "Service")["kvmesh-gateway"]["spec"]["selector"] = {"app.kubernetes.io/name": "gateway"}


def set_variable(name: str, value: str) -> Callable[[list[Document]], None]:
    def change(documents: list[Document]) -> None:
        for config in named(documents, "ConfigMap").values():
            config["data"][name] = value

    return change


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (set_replicas, "rank -1 is outside"),
        (set_grace, "grace of 20 s, drain of 20 s"),
        (set_probe_port, "livenessProbe asks"),
        (set_probe_name, "readinessProbe asks"),
        (set_container_port, "port grpc is 50050, listen binds 50051"),
        (set_service_port, "no Service has that name and port"),
        (set_selector, "selects no pod"),
        (set_variable("KVMESH_PP_SIZE", "1"), "pp_size is 1"),
        (set_variable("KVMESH_PP_SIZE", "3"), "pp_size is 3, replicas are 2"),
        (set_variable("KVMESH_NUM_PAGE", "3"), "unknown variable KVMESH_NUM_PAGE"),
        (set_variable("KVMESH_DRAIN_SECONDS", "60"), "drain of 60 s"),
        (set_variable("KVMESH_HEALTH_LISTEN", "0.0.0.0:8080"), "health_listen binds 8080"),
    ],
)
def test_a_contradiction_is_noticed(base: list[Document], change: Callable[[list[Document]], None], line: str) -> None:
    changed = copy.deepcopy(base)
    change(changed)
    assert line in "\n".join(contradictions(changed))


def test_pod_0_is_the_last_rank_and_every_rank_is_there(base: list[Document]) -> None:
    ranks = [p.settings().rank for p in pods(base) if p.service == "prefill"]  # type: ignore[attr-defined]
    assert ranks == list(reversed(range(len(ranks))))
    assert len(ranks) >= 2
    assert stage_set(base)["spec"]["podManagementPolicy"] == "Parallel"


@pytest.mark.parametrize("pod_ip", ["10.1.2.3", "fd00::5"])
def test_a_pod_advertises_its_own_ip_of_either_family(pod: Pod, pod_ip: str) -> None:
    settings = pod.settings(pod_ip)
    bound = parse(settings.listen, field="listen")
    assert advertised(settings.advertise, bound) == Address(pod_ip, pod.ports["grpc"])


def test_members_are_dialled_before_they_are_ready(base: list[Document]) -> None:
    services = named(base, "Service")
    for name in ("kvmesh-bootstrap", "kvmesh-prefill", "kvmesh-decode"):
        assert services[name]["spec"]["clusterIP"] == "None"
        assert services[name]["spec"]["publishNotReadyAddresses"] is True
    for workload in named(base, "StatefulSet").values():
        assert workload["spec"]["serviceName"] in services


def test_clients_reach_only_gateways_that_are_ready(base: list[Document]) -> None:
    for name, service in named(base, "Service").items():
        if name.startswith("kvmesh-gateway"):
            assert not service["spec"].get("publishNotReadyAddresses", False)


def test_the_registry_is_alone_and_its_term_outlives_it(base: list[Document]) -> None:
    registry = named(base, "StatefulSet")["kvmesh-bootstrap"]
    assert registry["spec"]["replicas"] == 1
    (claim,) = registry["spec"]["volumeClaimTemplates"]
    mounts = {m["name"]: m["mountPath"] for m in registry["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]}
    assert mounts[claim["metadata"]["name"]] == next(
        p.environment()["KVMESH_STATE_DIR"] for p in pods(base) if p.service == "bootstrap"
    )


def test_a_pod_runs_as_an_ordinary_user_without_privileges(pod: Pod) -> None:
    whole, own = pod.spec["securityContext"], pod.container["securityContext"]
    assert whole["runAsNonRoot"] is True
    assert whole["runAsUser"] >= 10000
    assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own["allowPrivilegeEscalation"] is False
    assert own["readOnlyRootFilesystem"] is True
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert pod.spec["automountServiceAccountToken"] is False
    assert pod.spec["enableServiceLinks"] is False


def test_what_a_pod_writes_lies_on_a_volume(pod: Pod) -> None:
    mounted = {m["mountPath"]: m["name"] for m in pod.container["volumeMounts"]}
    volumes = {v["name"] for v in pod.spec["volumes"]} | {
        c["metadata"]["name"] for c in pod.owner["spec"].get("volumeClaimTemplates", [])
    }
    settings = pod.settings()
    written = [PurePosixPath("/tmp")]
    written += [PurePosixPath(getattr(settings, f)) for f in ("cache_dir", "state_dir") if hasattr(settings, f)]
    assert len(written) == 2
    for path in written:
        assert mounted[str(path)] in volumes


def test_memory_is_limited_and_requested(pod: Pod) -> None:
    resources = pod.container["resources"]
    assert resources["requests"].keys() == {"cpu", "memory"}
    assert "memory" in resources["limits"]


def test_a_change_of_settings_changes_the_pods(base: list[Document], tmp_path: Path) -> None:
    changed = shutil.copytree(BASE, tmp_path / "base")
    env = changed / "kvmesh.env"
    env.write_text(env.read_text().replace("KVMESH_LOG_LEVEL=info", "KVMESH_LOG_LEVEL=debug"))
    before, after = {w["metadata"]["name"]: w for w in workloads(base)}, workloads(render(changed))
    assert len(after) == len(SERVICES)
    for workload in after:
        assert workload["spec"]["template"] != before[workload["metadata"]["name"]]["spec"]["template"]
