"""The Dockerfile and what goes into the image."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from manifests import BASE, ROOT, pods, render

HADOLINT = Path(sys.executable).parent / "hadolint"
DOCKERFILE = ROOT / "Dockerfile"
TEXT = DOCKERFILE.read_text()


def argument(name: str) -> str:
    found = re.search(rf'^ARG {name}="?([^"\n]*)"?$', TEXT, re.MULTILINE)
    assert found is not None
    return found.group(1)


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([HADOLINT, "--no-color", DOCKERFILE], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    broken = tmp_path / "Dockerfile"
    broken.write_text("FROM debian\nRUN apt-get install curl\n")
    done = subprocess.run([HADOLINT, "--no-color", broken], capture_output=True, text=True, timeout=30, check=False)
    assert "DL3006" in done.stdout


def test_any_builder_can_build_it() -> None:
    assert "<<" not in TEXT
    assert "--link" not in TEXT
    assert "--mount" not in TEXT


def test_its_torch_is_the_one_that_is_known_to_work() -> None:
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    assert [argument("TORCH_PIP_ARGS")] == pinned


def test_its_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert argument("VERSION") == project["version"]
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_it_runs_as_the_user_the_pods_name() -> None:
    (user,) = re.findall(r"^USER (\d+):\d+$", TEXT, re.MULTILINE)
    assert {p.spec["securityContext"]["runAsUser"] for p in pods(render(BASE))} == {int(user)}


def test_what_changes_with_every_commit_comes_after_what_is_large() -> None:
    steps = [line for line in TEXT.splitlines() if re.match(r"(FROM|COPY|RUN|ARG|LABEL) ", line)]
    dependencies = next(n for n, step in enumerate(steps) if "constraints.txt >" in step)
    assert [step for step in steps[:dependencies] if re.match(r"COPY (?!pyproject)", step)] == []
    assert steps.index("ARG REVISION=unknown") > max(n for n, step in enumerate(steps) if step.startswith("COPY"))
