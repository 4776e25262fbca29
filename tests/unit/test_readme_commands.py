"""What README.md tells people to type is what the services, make and the tree know."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from kvmesh.settings import load

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
STARTS = re.findall(r"^    python -m services\.(\w+) +(--.*)$", README, re.MULTILINE)


def test_the_mesh_by_hand_starts_every_service() -> None:
    assert {service for service, _ in STARTS} == {"bootstrap", "prefill", "decode", "gateway"}


@pytest.mark.parametrize(("service", "flags"), STARTS)
def test_a_service_takes_the_flags_shown(service: str, flags: str) -> None:
    module = importlib.import_module(f"services.{service}.config")
    load(getattr(module, f"{service.capitalize()}Settings"), shlex.split(flags), {})


def test_every_service_shown_dials_the_registry_shown() -> None:
    (registry,) = re.findall(r"services\.bootstrap --listen (\S+)", README)
    assert {a for _, flags in STARTS for a in re.findall(r"--bootstrap (\S+)", flags)} == {registry}


def test_the_targets_shown_are_targets() -> None:
    shown = set(re.findall(r"^    make ([a-z-]+)", README, re.MULTILINE)) | set(re.findall(r"`make ([a-z-]+)", README))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "check"} <= shown
    assert shown - targets == set()


@pytest.mark.parametrize(
    "page", [*sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").glob("*.md")), "README.md"]
)
def test_every_link_leads_to_a_file(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []
