"""deploy/k8s: the base and the overlays, hardened, and of one mind with the services they start."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path, PurePosixPath

import pytest
from combinations import combined, rendered, with_labels
from contradictions import contradictions
from manifests import BASE, K8S, OVERLAYS, ROOT, SERVICES, Document, Pod, named, pods, render, workloads

from kvmesh.rpc.address import Address, advertised, parse


@pytest.fixture(scope="session")
def base() -> list[Document]:
    return rendered("base")


@pytest.fixture(params=[(whole, service) for whole in ("base", *OVERLAYS) for service in SERVICES], ids=" ".join)
def pod(request: pytest.FixtureRequest) -> Pod:
    whole, service = request.param
    return next(p for p in pods(rendered(whole)) if p.service == service)


def test_each_service_has_one_workload_and_one_file(base: list[Document]) -> None:
    assert sorted(p.service for p in pods(base) if p.index == 0) == sorted(SERVICES)
    assert {f.stem for f in BASE.rglob("*.yaml")} == {"kustomization", *SERVICES}


def test_pod_0_is_the_last_rank_and_every_rank_is_there(base: list[Document]) -> None:
    ranks = [p.settings().rank for p in pods(base) if p.service == "prefill"]  # type: ignore[attr-defined]
    assert ranks == list(reversed(range(len(ranks))))
    assert len(ranks) >= 2
    assert named(base, "StatefulSet")["kvmesh-prefill"]["spec"]["podManagementPolicy"] == "Parallel"


@pytest.mark.parametrize("pod_ip", ["10.1.2.3", "fd00::5"])
def test_a_pod_advertises_its_own_ip_of_either_family(pod: Pod, pod_ip: str) -> None:
    settings = pod.settings(pod_ip)
    bound = parse(settings.listen, field="listen")
    assert advertised(settings.advertise, bound) == Address(pod_ip, pod.ports["grpc"])


def test_members_are_dialled_before_they_are_ready(base: list[Document]) -> None:
    services = named(base, "Service")
    for name in ("kvmesh-bootstrap", "kvmesh-prefill", "kvmesh-decode"):
        assert services[name]["spec"]["publishNotReadyAddresses"] is True
    for workload in named(base, "StatefulSet").values():
        assert workload["spec"]["serviceName"] in services


def test_the_registry_keeps_its_address_when_it_moves(base: list[Document]) -> None:
    """Members dial its name; pods dial each other by their own addresses."""
    headless = {n for n, s in named(base, "Service").items() if s["spec"].get("clusterIP") == "None"}
    assert headless == {"kvmesh-prefill", "kvmesh-decode", "kvmesh-gateway-pods"}


@pytest.mark.parametrize("pod_index", ["", "0", "1"])
def test_a_stage_without_an_index_does_not_start(base: list[Document], pod_index: str) -> None:
    """An absent label gives an empty variable, and the shell would take that for 0."""
    stage = next(p for p in pods(base) if p.service == "prefill")
    environment = stage.environment() | {"POD_INDEX": pod_index, "PATH": os.environ["PATH"]}
    words = [word.replace("exec python", "exec echo") for word in stage.words()]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=10, check=False)
    if pod_index:
        assert f"--rank={1 - int(pod_index)}" in done.stdout
    else:
        assert done.returncode != 0
        assert "POD_INDEX" in done.stderr


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


def test_the_image_is_that_of_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {p.container["image"] for p in pods(rendered("base"))} == {f"kvmesh:{version}"}
    gpu = (K8S / "components" / "gpu" / "kustomization.yaml").read_text()
    assert f"newTag: {version}-gpu" in gpu


def test_all_pods_of_a_mesh_run_one_image() -> None:
    for overlay in OVERLAYS:
        assert len({p.container["image"] for p in pods(rendered(overlay))}) == 1


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_namespace_enforces_the_strictest_standard(overlay: str) -> None:
    (namespace,) = named(rendered(overlay), "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert {d["metadata"].get("namespace") for d in rendered(overlay)} == {None, namespace["metadata"]["name"]}


def test_only_what_stands_behind_a_service_for_clients_waits_before_it_stops(base: list[Document]) -> None:
    assert {p.service for p in pods(base) if p.pre_stop_seconds} == {"gateway"}


@pytest.mark.parametrize("service", ["decode", "gateway"])
def test_decoders_and_gateways_are_spread(base: list[Document], service: str) -> None:
    pod = next(p for p in pods(base) if p.service == service)
    spread = pod.spec["topologySpreadConstraints"]
    assert [s["topologyKey"] for s in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    for constraint in spread:
        assert constraint["labelSelector"]["matchLabels"].items() <= pod.labels.items()


def test_the_stages_of_a_pipeline_change_together(base: list[Document]) -> None:
    update = named(base, "StatefulSet")["kvmesh-prefill"]["spec"]["updateStrategy"]
    assert update == {"rollingUpdate": {"maxUnavailable": "100%"}}


def test_a_second_pipeline_has_names_and_labels_of_its_own_and_the_same_settings() -> None:
    sets = named(rendered("production"), "StatefulSet")
    first, second = sets["kvmesh-prefill"], sets["kvmesh-prefill-p1"]
    labels = [s["spec"]["selector"]["matchLabels"] for s in (first, second)]
    assert [one["kvmesh/pipeline"] for one in labels] == ["p0", "p1"]
    stages = [p for p in pods(rendered("production")) if p.service == "prefill"]
    assert {(s.pipeline, s.rank) for s in (p.settings() for p in stages)} == {  # type: ignore[attr-defined]
        ("p0", 0),
        ("p0", 1),
        ("p1", 0),
        ("p1", 1),
    }


def wish(stage: Pod, kind: str) -> Document:
    """The one preference of a stage for where it runs: of kind podAffinity or podAntiAffinity."""
    (found,) = stage.spec["affinity"][kind]["preferredDuringSchedulingIgnoredDuringExecution"]
    term = found["podAffinityTerm"]
    # What kustomize adds to matchLabels would be a pipeline's label beside the key of the same name, which is refused.
    assert term["labelSelector"] == {
        "matchExpressions": [{"key": "app.kubernetes.io/name", "operator": "In", "values": ["kvmesh-prefill"]}]
    }
    return term


@pytest.mark.parametrize(("name", "num_stages"), [("base", 2), ("production", 4), ("lws", 2)])
def test_a_pipeline_is_near_itself_and_far_from_others(name: str, num_stages: int) -> None:
    stages = [p for p in pods(combined(("lws",)) if name == "lws" else rendered(name)) if p.service == "prefill"]
    assert len(stages) == num_stages
    for stage in stages:
        near, far = wish(stage, "podAffinity"), wish(stage, "podAntiAffinity")
        assert (near["topologyKey"], far["topologyKey"]) == ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
        (key,) = near["matchLabelKeys"]
        assert far["mismatchLabelKeys"] == [key]
        # The label is the pipeline's name, or the number in it.
        assert stage.settings().pipeline in (stage.labels[key], f"p{stage.labels[key]}")  # type: ignore[attr-defined]


def test_labels_of_an_overlay_leave_pipelines_apart() -> None:
    labelled = with_labels(("second-pipeline",), {"app.kubernetes.io/instance": "prod"})
    assert contradictions(labelled) == []
    assert {p.labels["app.kubernetes.io/instance"] for p in pods(labelled)} == {"prod"}
    first, second = (
        named(labelled, "StatefulSet")[n]["spec"]["selector"] for n in ("kvmesh-prefill", "kvmesh-prefill-p1")
    )
    assert first != second
