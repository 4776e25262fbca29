"""docs/operations.md names metrics, reasons, exit codes and settings; each of them exists in the code."""

import re
from dataclasses import fields
from pathlib import Path

from kvmesh.rpc import life
from kvmesh.settings import KNOWN_FIELDS
from kvmesh.telemetry.metrics import page_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
SOURCES = "".join(p.read_text() for folder in ("kvmesh", "services") for p in (ROOT / folder).rglob("*.py"))


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def test_every_metric_named_there_is_shown_by_some_service() -> None:
    named = set(re.findall(r"`(kvmesh_\w+)`", PAGE))
    shown = {f"{m.name}_total" if m.type == "counter" else m.name for m in page_of("every").collect()}
    assert len(named) > 10
    assert named - shown == set()


def test_every_reason_named_there_is_given_by_some_code() -> None:
    rows = re.findall(r"^\| [A-Z_]+ \| (.*?) \|", section("Common refusals"), re.MULTILINE)
    reasons = {reason for row in rows for reason in re.findall(r"`(\w+)`", row)}
    assert len(reasons) > 8
    assert {reason for reason in reasons if f'"{reason}"' not in SOURCES} == set()


def test_the_exit_codes_are_those_of_the_code() -> None:
    shown = [int(code) for code in re.findall(r"^\| (\d) \|", section("Exit codes"), re.MULTILINE)]
    assert shown == [0, life.FAILED_EXIT, life.BAD_CONFIG_EXIT, life.MISFIT_EXIT, life.STALE_TERM_EXIT]


def test_every_setting_named_there_exists() -> None:
    flags = {flag.replace("-", "_") for flag in re.findall(r"`--([a-z-]+)`", PAGE)} - {"help"}
    assert len(flags) > 4
    assert flags - (KNOWN_FIELDS | {f.name for f in fields(life.ServeSettings)}) == set()


def test_the_time_to_drain_named_there_is_the_default() -> None:
    (default,) = [f.default for f in fields(life.ServeSettings) if f.name == "drain_seconds"]
    assert f"`--drain-seconds` ({default:g})" in PAGE
