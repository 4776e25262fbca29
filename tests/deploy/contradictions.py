"""What contradicts in rendered manifests: each place where two parts of them, or a manifest and its service, disagree.

One line each, with both values, so that tests can show that it is noticed. What one process can see by itself, the
service refuses at its start as well; the rest shows only here.
"""

import math
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from manifests import Document, Pod, named, num_bytes, pods, replicas, scalers, selects, template, workloads

from kvmesh.errors import BadConfig
from kvmesh.rpc.address import parse
from kvmesh.rpc.health import LIVENESS, READINESS
from kvmesh.rpc.life import SPARE_SECONDS, ServeSettings

MIB = 2**20
LOADED_MIB_A_SECOND = 50
"""What a slow shared volume gives to each of many pods that start together."""


def contradictions(documents: list[Document]) -> list[str]:
    return [
        *(line for pod in pods(documents) for line in _of_pod(pod)),
        *_of_registry(documents),
        *_of_leases(documents),
        *_of_pipelines(documents),
        *_of_formats(documents),
        *_of_tls(documents),
        *(line for service in named(documents, "Service").values() for line in _of_service(service, documents)),
        *_of_labels(documents),
        *_of_budgets(documents),
        *_of_scaling(documents),
    ]


def _of_pod(pod: Pod) -> Iterator[str]:
    who = pod.name
    try:
        settings = pod.settings()
    except BadConfig as error:
        yield f"{who}: {error}"
        return
    except KeyError as error:
        yield f"{who}: nothing is called {error}"
        return
    for port, field in (("grpc", "listen"), ("health", "health_listen"), ("metrics", "metrics_listen")):
        bound = parse(getattr(settings, field), field=field).port
        if pod.ports[port] != bound:
            yield f"{who}: port {port} is {pod.ports[port]}, {field} binds {bound}"
    for probe, service in (("startupProbe", LIVENESS), ("readinessProbe", READINESS), ("livenessProbe", LIVENESS)):
        asked = pod.container[probe]["grpc"]
        if asked != {"port": pod.ports["health"], "service": service}:
            yield f"{who}: {probe} asks {asked}, health serves {service} on {pod.ports['health']}"
    yield from _of_start(pod, settings)
    yield from _of_end(pod, settings)
    yield from _of_stage(pod, settings)
    yield from _of_registry_address(pod, settings)
    yield from _of_volumes(pod, settings)


def _of_start(pod: Pod, settings: ServeSettings) -> Iterator[str]:
    """What a pod loads passes through the memory it asks for; a startup probe has to wait for as much as that."""
    if not hasattr(settings, "model"):
        return
    probe = {"periodSeconds": 10, "failureThreshold": 3, **pod.container["startupProbe"]}
    allowed = probe["periodSeconds"] * probe["failureThreshold"]
    asked = num_bytes(pod.container["resources"]["requests"]["memory"])
    needed = math.ceil(asked / MIB / LOADED_MIB_A_SECOND)
    if allowed < needed:
        yield (
            f"{pod.name}: startupProbe allows {allowed} s, {asked // MIB} MiB of memory may take {needed} s to load "
            f"({LOADED_MIB_A_SECOND} MiB/s)"
        )


def _of_end(pod: Pod, settings: ServeSettings) -> Iterator[str]:
    grace, drain = pod.spec["terminationGracePeriodSeconds"], settings.drain_seconds
    if pod.grace_seconds < drain + SPARE_SECONDS:
        yield (
            f"{pod.name}: grace of {grace} s, preStop of {pod.pre_stop_seconds} s, drain of {drain:g} s and "
            f"{SPARE_SECONDS} s for the last calls"
        )
    told = settings.grace_seconds  # type: ignore[attr-defined]  # every service has it
    if told != pod.grace_seconds:
        yield f"{pod.name}: grace of {grace} s less preStop is {pod.grace_seconds} s, the service is told {told:g} s"


def _of_stage(pod: Pod, settings: ServeSettings) -> Iterator[str]:
    if pod.service != "prefill":
        return
    pp_size, told = settings.pp_size, settings.replicas  # type: ignore[attr-defined]
    if pod.owner["kind"] == "LeaderWorkerSet":
        count = pod.owner["spec"]["leaderWorkerTemplate"]["size"]
    else:
        count = replicas(pod.owner, pod.documents)
    if not pp_size == count == told:
        yield f"{pod.name}: pp_size is {pp_size}, replicas are {count}, the service is told {told}"


def _of_registry_address(pod: Pod, settings: ServeSettings) -> Iterator[str]:
    dialled = getattr(settings, "bootstrap", None)
    if dialled is None:
        return
    address = parse(dialled, field="bootstrap")
    service = named(pod.documents, "Service").get(address.host)
    if service is None or address.port not in [p["port"] for p in service["spec"]["ports"]]:
        yield f"{pod.name}: the registry is dialled at {address}, no Service has that name and port"


def _of_volumes(pod: Pod, settings: ServeSettings) -> Iterator[str]:
    volumes = {v["name"]: v for v in pod.spec["volumes"]}
    volumes |= {c["metadata"]["name"]: {} for c in pod.owner["spec"].get("volumeClaimTemplates", [])}
    for path, mount in pod.mounts.items():
        if mount["name"] not in volumes:
            yield f"{pod.name}: {path} mounts {mount['name']}, the volumes are {sorted(volumes)}"
            continue
        claim = volumes[mount["name"]].get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and claim not in named(pod.documents, "PersistentVolumeClaim"):
            yield f"{pod.name}: {path} needs the claim {claim}, there is none"
    writable = {PurePosixPath(p) for p, m in pod.mounts.items() if not m.get("readOnly")}
    written = {f: getattr(settings, f) for f in ("cache_dir", "state_dir") if hasattr(settings, f)}
    for field, path in {**written, "the temporary directory": "/tmp"}.items():
        if PurePosixPath(path) not in writable:
            yield f"{pod.name}: {field} is {path}, what can be written is {sorted(map(str, writable))}"
    model = PurePosixPath(getattr(settings, "model", ""))
    if model.is_absolute() and not any(model.is_relative_to(path) for path in pod.mounts):
        yield f"{pod.name}: model is {model}, the mounts are {sorted(pod.mounts)}"


def _of_tls(documents: list[Document]) -> Iterator[str]:
    """A port has TLS or has not, and a certificate that lies nowhere ends a pod."""
    told: dict[bool, list[str]] = {True: [], False: []}
    for pod, settings in _settled(documents):
        files = {f: getattr(settings, f, None) for f in ("tls_cert", "tls_key", "tls_ca")}
        if pod.service in ("prefill", "decode"):
            told[files["tls_cert"] is not None].append(pod.name)
        for field, path in files.items():
            if path is not None and str(path.parent) not in pod.mounts:
                yield f"{pod.name}: {field} is {path}, the mounts are {sorted(pod.mounts)}"
    if told[True] and told[False]:
        yield f"{' and '.join(told[True])} have TLS, {' and '.join(told[False])} have not"


def _settled(documents: list[Document]) -> Iterator[tuple[Pod, ServeSettings]]:
    """Pods whose settings can be read; the others have their line already."""
    for pod in pods(documents):
        try:
            yield pod, pod.settings()
        except (BadConfig, KeyError):
            continue


def _of_registry(documents: list[Document]) -> Iterator[str]:
    registries = [p for p in pods(documents) if p.service == "bootstrap"]
    if len(registries) > 1:  # each with a volume and a term of its own
        yield f"the registry has {len(registries)} replicas; one is all there may be"


def _of_leases(documents: list[Document]) -> Iterator[str]:
    leases = [s.lease_seconds for p, s in _settled(documents) if p.service == "bootstrap"]  # type: ignore[attr-defined]
    for pod, settings in _settled(documents):
        heartbeat = getattr(settings, "heartbeat_seconds", None)
        for lease in leases:
            if heartbeat is not None and heartbeat >= lease:
                yield f"{pod.name}: heartbeat of {heartbeat:g} s, the registry's lease is {lease:g} s"


def _of_pipelines(documents: list[Document]) -> Iterator[str]:
    seats: dict[tuple[str, int], str] = {}
    for pod, settings in _settled(documents):
        if pod.service == "prefill":
            seat = (settings.pipeline, settings.rank)  # type: ignore[attr-defined]
            if seat in seats:
                yield f"{pod.name} and {seats[seat]}: both are rank {seat[1]} of pipeline {seat[0]}"
            seats[seat] = pod.name


def _of_formats(documents: list[Document]) -> Iterator[str]:
    """Stages hand each other activations as they are, and rank 0 gives out the pages of all. Decoders may differ from them."""
    told: dict[tuple[str, str], set[str]] = {}
    for pod, settings in _settled(documents):
        if pod.service == "prefill":
            for field in ("dtype", "page_size", "num_pages", "max_tokens"):
                pipeline = settings.pipeline  # type: ignore[attr-defined]
                told.setdefault((pipeline, field), set()).add(str(getattr(settings, field)))
    for (pipeline, field), values in told.items():
        if len(values) > 1:
            yield f"{field} is {' and '.join(sorted(values))} for stages of pipeline {pipeline}"


def _of_service(service: Document, documents: list[Document]) -> Iterator[str]:
    who, spec = service["metadata"]["name"], service["spec"]
    selected = [p for p in pods(documents) if selects(spec["selector"], p.labels)]
    if not selected:
        yield f"Service {who} selects no pod: {spec['selector']}"
    for pod in selected:
        for port in spec["ports"]:
            target = pod.ports.get(port["targetPort"])
            # A headless Service has no port of its own: what clients dial is what the pod binds.
            if target is None or (spec.get("clusterIP") == "None" and target != port["port"]):
                yield f"Service {who} sends {port['port']} to {port['targetPort']}, the pod's ports are {pod.ports}"


def _of_labels(documents: list[Document]) -> Iterator[str]:
    """Two workloads that would fight for pods."""
    for workload in workloads(documents):
        selector = workload["spec"].get("selector", {}).get("matchLabels")
        for other in workloads(documents):
            if selector and other is not workload and selects(selector, template(other)["metadata"]["labels"]):
                yield f"{workload['metadata']['name']} also selects the pods of {other['metadata']['name']}: {selector}"


def _of_budgets(documents: list[Document]) -> Iterator[str]:
    budgets = named(documents, "PodDisruptionBudget")
    held: dict[str, list[str]] = {}
    for name, budget in budgets.items():
        mine = [p.name for p in pods(documents) if selects(budget["spec"]["selector"]["matchLabels"], p.labels)]
        if not mine:
            yield f"PodDisruptionBudget {name} selects no pod"
        elif (least := _kept(budget["spec"], len(mine))) >= len(mine):
            yield f"PodDisruptionBudget {name} keeps {least} of {len(mine)}: no node of theirs can be emptied, ever"
        for pod in mine:
            held.setdefault(pod, []).append(name)
    for pod, names in held.items():
        if len(names) > 1:  # the eviction of such a pod is refused
            yield f"{pod}: counted by the disruption budgets {' and '.join(names)}"


def _kept(budget: Document, count: int) -> int:
    """How many of so many pods a disruption budget never gives."""
    (of,) = {"minAvailable", "maxUnavailable"} & budget.keys()
    share = str(budget[of])
    number = math.ceil(count * int(share[:-1]) / 100) if share.endswith("%") else int(share)
    return number if of == "minAvailable" else count - number


def _of_scaling(documents: list[Document]) -> Iterator[str]:
    by_name = {(w["apiVersion"], w["kind"], w["metadata"]["name"]): w for w in workloads(documents)}
    owners: dict[tuple[str, str, str], str] = {}
    for scaler in scalers(documents):
        who, (_, kind, name) = scaler.who, scaler.target
        workload = by_name.get(scaler.target)
        if workload is None:
            yield f"{who} scales {kind} {name}, there is none"
        elif "replicas" in workload["spec"]:
            yield f"{who}: {name} has replicas too: {workload['spec']['replicas']}"
        elif kind == "StatefulSet" and "prefill" in name:
            yield f"{who} scales the stages of a pipeline, which grows as a whole"
        if scaler.target in owners:
            yield f"{who} and {owners[scaler.target]}: both scale {kind} {name}"
        owners[scaler.target] = who
        namespace = scaler.document["metadata"].get("namespace", "kvmesh")
        for query in scaler.queries:
            asked = set(re.findall(r'job="kvmesh/([^"]*)"', query))
            if asked != {namespace}:
                yield f"{who} asks for the mesh of namespace {sorted(asked)}, its own is {namespace}"
