"""checkov's rules for hardened manifests, but for the exceptions that checkov.yaml explains.

checkov pins versions that others here need newer, so it has an environment of its own, made once in .cache.
"""

import copy
import json
import subprocess
import sys
from collections.abc import Set
from pathlib import Path

import pytest
import yaml
from combinations import everything, rendered
from manifests import OVERLAYS, ROOT, Document, template, workloads

CHECKOV = "checkov==3.3.30"
ENVIRONMENT = ROOT / ".cache" / "checkov"
EXCEPTIONS = Path(__file__).with_name("checkov.yaml")

pytestmark = [pytest.mark.deep, pytest.mark.slice, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def checkov() -> Path:
    made = ENVIRONMENT / f".{CHECKOV}"
    python = ENVIRONMENT / "bin" / "python"
    if not made.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True, timeout=120)
        install = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", CHECKOV]
        subprocess.run(install, check=True, timeout=480)
        made.touch()
    return ENVIRONMENT / "bin" / "checkov"


def readable(documents: list[Document]) -> list[Document]:
    """Pod templates of kinds that checkov does not know, as Pods too."""
    unknown = [w for w in workloads(documents) if w["kind"] == "LeaderWorkerSet"]
    extra = [{"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template(w))} for w in unknown]
    for pod, workload in zip(extra, unknown, strict=True):
        pod["metadata"] |= {k: workload["metadata"][k] for k in ("name", "namespace") if k in workload["metadata"]}
    return [*documents, *extra]


def failed(
    checkov: Path, directory: Path, meshes: dict[str, list[Document]], *, no_exception_for: Set[str] = frozenset()
) -> set[tuple[str, str]]:
    """Check and object, of what fails.

    Args:
        no_exception_for: checks that count although the file has an exception for them.
    """
    config = yaml.safe_load(EXCEPTIONS.read_text())
    config["skip-check"] = sorted(set(config["skip-check"]) - no_exception_for)
    (directory / "checkov").write_text(yaml.safe_dump({k: v for k, v in config.items() if v}))
    for name, documents in meshes.items():
        (directory / f"{name.replace(' ', '+')}.yaml").write_text(yaml.safe_dump_all(readable(documents)))
    command = [checkov, "--config-file", directory / "checkov", "-d", directory, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=directory)
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout)
    assert told["summary"]["passed"] > 50 * len(meshes)
    assert told["summary"]["parsing_errors"] == 0
    return {(f"{c['check_id']} {c['check_name']}", c["resource"]) for c in told["results"]["failed_checks"]}


@pytest.mark.parametrize("name", ["base", *OVERLAYS])
def test_checkov_finds_nothing(checkov: Path, tmp_path: Path, name: str) -> None:
    assert failed(checkov, tmp_path, {name: rendered(name)}) == set()


def test_every_pod_of_production_has_a_network_policy_and_a_namespace(checkov: Path, tmp_path: Path) -> None:
    production = {"production": rendered("production")}
    assert failed(checkov, tmp_path, production, no_exception_for={"CKV2_K8S_6", "CKV_K8S_21"}) == set()


def test_checkov_finds_nothing_in_any_documented_combination(checkov: Path, tmp_path: Path) -> None:
    assert failed(checkov, tmp_path, everything()) == set()


def test_checkov_would_find_something(checkov: Path, tmp_path: Path) -> None:
    broken = copy.deepcopy(rendered("laptop"))
    decode = next(w for w in workloads(broken) if w["metadata"]["name"] == "kvmesh-decode")
    decode["spec"]["template"]["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    decode["spec"]["template"]["spec"]["hostNetwork"] = True
    found = failed(checkov, tmp_path, {"laptop": broken})
    assert {check.split()[0] for check, _ in found} == {"CKV_K8S_19", "CKV_K8S_20"}
    assert {where for _, where in found} == {"StatefulSet.kvmesh.kvmesh-decode"}


def test_no_exception_is_stale(checkov: Path, tmp_path: Path) -> None:
    exceptions = set(yaml.safe_load(EXCEPTIONS.read_text())["skip-check"])
    found = failed(checkov, tmp_path, {"base": rendered("base")}, no_exception_for=exceptions)
    assert {check.split()[0] for check, _ in found} == exceptions
