"""The pod that people look into a mesh from, deploy/k8s/tools.yaml: nothing renders it, so it is checked here."""

import re

import pytest
import yaml
from combinations import combined, rendered
from manifests import K8S, Document, named, pods
from schemas import VERSIONS, check

from kvmesh.settings import COMMAND_FIELDS

TEXT = (K8S / "tools.yaml").read_text()


def tools() -> Document:
    return yaml.safe_load(TEXT)


def with_claim() -> Document:
    """With the lines that are commented out."""
    before, after = TEXT.split("# To fill the claim")
    lines = after.splitlines()[1:]
    return yaml.safe_load(before + "\n".join(line.removeprefix("#") for line in lines))


def with_tls() -> Document:
    before, after = TEXT.split("# With the component tls, these lines too:\n")
    before = before.replace("# - { name: KVMESH_TLS_", "- { name: KVMESH_TLS_")
    lines = after.split("# To fill the claim")[0].splitlines()
    return yaml.safe_load(before + "\n".join(line.removeprefix("#") for line in lines))


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_valid_to_the_letter_whatever_is_commented_in(version: str) -> None:
    for document in (tools(), with_claim(), with_tls()):
        check(document, version)


def test_it_shows_stages_the_certificate_that_they_have_themselves() -> None:
    spec = with_tls()["spec"]
    (container,) = spec["containers"]
    for stage in (p for p in pods(combined(("tls",))) if p.service == "prefill"):
        theirs = {name: value for name, value in stage.environment().items() if name.startswith("KVMESH_TLS_")}
        assert {e["name"]: e["value"] for e in container["env"] if "TLS" in e["name"]} == theirs
        assert spec["volumes"] == [v for v in stage.spec["volumes"] if v["name"] == "tls"]
        assert container["volumeMounts"] == [m for m in stage.container["volumeMounts"] if m["name"] == "tls"]


def test_the_claim_is_that_of_the_component() -> None:
    (volume,) = with_claim()["spec"]["volumes"]
    (mount,) = with_claim()["spec"]["containers"][0]["volumeMounts"]
    mesh = combined(("model-volume",))
    assert volume["persistentVolumeClaim"]["claimName"] in named(mesh, "PersistentVolumeClaim")
    assert mount["name"] == volume["name"]
    assert {p.environment()["KVMESH_MODEL"] for p in pods(mesh)} == {mount["mountPath"]}


def test_the_strictest_standard_takes_it() -> None:
    spec = tools()["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_it_has_the_image_of_the_mesh_and_belongs_to_none_of_it() -> None:
    mesh = rendered("base")
    assert {p.container["image"] for p in pods(mesh)} == {tools()["spec"]["containers"][0]["image"]}
    assert "app.kubernetes.io/part-of" not in tools()["metadata"]["labels"]


def test_its_commands_dial_services_that_are_there() -> None:
    services = named(rendered("base"), "Service")
    dialled = {e["name"]: e["value"] for e in tools()["spec"]["containers"][0]["env"]}
    assert dialled.keys() == {"KVMESH_BOOTSTRAP", *(f"KVMESH_{f.upper()}" for f in COMMAND_FIELDS)}
    for address in dialled.values():
        found = re.fullmatch(r"([a-z-]+):(\d+)", address)
        assert found is not None
        assert int(found[2]) in [p["port"] for p in services[found[1]]["spec"]["ports"]]
