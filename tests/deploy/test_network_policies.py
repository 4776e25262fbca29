"""Who may talk to whom: exactly the edges of the walk, Prometheus, clients, and the name server."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import yaml
from combinations import combined, rendered
from manifests import K8S, Document, Pod, named, pods, selects

MESH = "kvmesh"
WALK = {
    ("gateway", "bootstrap"),
    ("gateway", "decode"),
    ("decode", "bootstrap"),
    ("decode", "prefill"),
    ("prefill", "bootstrap"),
    ("prefill", "prefill"),
}
"""Who dials whom, docs/walk.md."""


@dataclass(frozen=True)
class Peer:
    """One end of a connection."""

    labels: Mapping[str, str]
    namespace: str = MESH
    namespace_labels: Mapping[str, str] | None = None

    @property
    def of_namespace(self) -> Mapping[str, str]:
        return {"kubernetes.io/metadata.name": self.namespace, **(self.namespace_labels or {})}


CLIENT = Peer({"app": "web"}, "shop", {"kvmesh-clients": "allowed"})
STRANGER = Peer({"app": "web"}, "elsewhere")
NEIGHBOUR = Peer({"app": "web"})
PROMETHEUS = Peer({"app.kubernetes.io/name": "prometheus"}, "monitoring")
FALSE_PROMETHEUS = Peer({"app.kubernetes.io/name": "prometheus"}, "elsewhere")
TOOLS = Peer(yaml.safe_load((K8S / "tools.yaml").read_text())["metadata"]["labels"])
DNS = Peer({"k8s-app": "kube-dns"}, "kube-system")


def policies_of(documents: list[Document], peer: Peer, direction: str) -> list[Document]:
    """Those that hold for it; none means that everything is allowed."""
    if peer.namespace != MESH:
        return []
    specs = [d["spec"] for d in named(documents, "NetworkPolicy").values()]
    mine = [s for s in specs if selects(s["podSelector"]["matchLabels"], peer.labels)]
    return [s for s in mine if direction in s["policyTypes"]]


def admits(rule: Document, way: str, peer: Peer, port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    if ports is not None and {"protocol": protocol, "port": port} not in ports:
        return False
    return way not in rule or any(is_meant(one, peer) for one in rule[way])


def is_meant(one: Document, peer: Peer) -> bool:
    """Whether an entry of `from` or `to` means it."""
    if "namespaceSelector" in one:
        if not selects(one["namespaceSelector"]["matchLabels"], peer.of_namespace):
            return False
    elif peer.namespace != MESH:
        return False
    return selects(one.get("podSelector", {}).get("matchLabels", {}), peer.labels)


def may(documents: list[Document], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection comes about: out of the one and into the other."""
    for peer, other, direction, rules, way in (
        (source, target, "Egress", "egress", "to"),
        (target, source, "Ingress", "ingress", "from"),
    ):
        policies = policies_of(documents, peer, direction)
        allowed = [r for p in policies for r in p.get(rules, []) if admits(r, way, other, port, protocol)]
        if policies and not allowed:
            return False
    return True


def peers(documents: list[Document]) -> dict[str, Peer]:
    return {p.service: Peer(p.labels) for p in pods(documents)}


def edges(documents: list[Document], port: int) -> Iterator[tuple[str, str]]:
    services = peers(documents)
    for a, source in services.items():
        for b, target in services.items():
            if may(documents, source, target, port):
                yield a, b


@pytest.fixture(params=["production", "network-policies", "lws"])
def mesh(request: pytest.FixtureRequest) -> list[Document]:
    with_lws = (
        "namespace",
        "model-volume",
        "gpu",
        "monitoring",
        "network-policies",
        "autoscaling",
        "lws",
        "lws-autoscaling",
    )
    meshes = {"network-policies": ("network-policies",), "lws": with_lws}
    return rendered("production") if request.param == "production" else combined(meshes[request.param])


def a_pod(documents: list[Document], service: str) -> Pod:
    return next(p for p in pods(documents) if p.service == service)


def test_services_talk_along_the_walk_and_no_other_way(mesh: list[Document]) -> None:
    assert set(edges(mesh, a_pod(mesh, "decode").ports["grpc"])) == WALK


@pytest.mark.parametrize("port", ["health", "metrics"])
def test_services_have_no_use_for_each_others_other_ports(mesh: list[Document], port: str) -> None:
    assert set(edges(mesh, a_pod(mesh, "decode").ports[port])) == set()


def test_clients_of_named_namespaces_reach_gateways_and_nothing_else(mesh: list[Document]) -> None:
    for service, target in peers(mesh).items():
        for name, port in a_pod(mesh, service).ports.items():
            assert may(mesh, CLIENT, target, port) == (service == "gateway" and name == "grpc")
            assert not may(mesh, STRANGER, target, port)
            assert not may(mesh, NEIGHBOUR, target, port)


def test_prometheus_reads_metrics_and_nothing_else(mesh: list[Document]) -> None:
    for service, target in peers(mesh).items():
        for name, port in a_pod(mesh, service).ports.items():
            assert may(mesh, PROMETHEUS, target, port) == (name == "metrics")
            assert not may(mesh, FALSE_PROMETHEUS, target, port)


def test_the_pod_that_people_look_from_dials_every_service_and_is_dialled_by_none(mesh: list[Document]) -> None:
    for service, target in peers(mesh).items():
        for name, port in a_pod(mesh, service).ports.items():
            assert may(mesh, TOOLS, target, port) == (name == "grpc")
            assert not may(mesh, target, TOOLS, port)
        assert not may(mesh, Peer(TOOLS.labels, "elsewhere"), target, 50051)


def test_who_dials_the_registry_may_ask_for_its_address(mesh: list[Document]) -> None:
    for service, source in peers(mesh).items():
        for protocol in ("UDP", "TCP"):
            assert may(mesh, source, DNS, 53, protocol) == (service != "bootstrap")


def test_nobody_gets_out(mesh: list[Document]) -> None:
    for source in peers(mesh).values():
        for port in (80, 443, 50051):
            assert not may(mesh, source, STRANGER, port)


def without(policy: str) -> list[Document]:
    return [d for d in rendered("production") if (d["kind"], d["metadata"]["name"]) != ("NetworkPolicy", policy)]


@pytest.mark.parametrize("service", ["bootstrap", "prefill", "decode", "gateway"])
def test_a_policy_that_is_missing_cuts_the_edges_of_its_service(service: str) -> None:
    assert WALK - set(edges(without(f"kvmesh-{service}"), 50051)) == {e for e in WALK if service in e}


def test_the_registry_could_dial_without_the_policy_for_everyone() -> None:
    assert may(without("kvmesh-default-deny"), peers(rendered("production"))["bootstrap"], DNS, 53)


def test_without_any_policy_everything_is_allowed() -> None:
    assert len(set(edges(rendered("laptop"), 50051))) == len(peers(rendered("laptop"))) ** 2


def test_a_service_that_no_policy_knows_is_shut_off() -> None:
    newcomer = Peer({"app.kubernetes.io/part-of": "kvmesh", "app.kubernetes.io/name": "kvmesh-new"})
    mesh = rendered("production")
    for other in (*peers(mesh).values(), CLIENT, DNS):
        assert not may(mesh, newcomer, other, 50051)
        assert not may(mesh, other, newcomer, 50051)
