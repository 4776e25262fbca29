"""docs/sizing.md shows commands and what they answer: each is run, and answers just that. Its thresholds are the manifests'."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from kvmesh.cli.__main__ import main
from kvmesh.telemetry.metrics import page_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sizing.md").read_text()
COMPONENTS = ROOT / "deploy" / "k8s" / "components"
SHOWN = re.findall(r"^    \$ (kvmesh size(?:.*\\\n)*.*)\n((?:    .*\n|\n(?=    ))*)", PAGE, re.MULTILINE)
TRIGGERS = ["lws-autoscaling/prefill.yaml", "autoscaling/decode.yaml"]


def test_there_are_commands_to_run() -> None:
    assert len(SHOWN) >= 2


@pytest.mark.parametrize(("command", "answer"), SHOWN)
def test_a_command_answers_what_is_shown(
    command: str, answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", shlex.split(command.replace("\\\n", "")))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert said == [line[4:] for line in answer.splitlines()]


def test_its_thresholds_are_those_of_the_manifests_in_their_order() -> None:
    triggers = [t for name in TRIGGERS for t in yaml.safe_load((COMPONENTS / name).read_text())["spec"]["triggers"]]
    rows = re.findall(
        r"^\| (?:pipelines|decoders): .*`([\w:]*kvmesh_[\w:]+)`.* \| ([\d.]+)(?: s)? \|", PAGE, re.MULTILINE
    )
    assert [threshold for _, threshold in rows] == [t["metadata"]["threshold"] for t in triggers]
    assert all(metric in t["metadata"]["query"] for (metric, _), t in zip(rows, triggers, strict=True))


def test_every_flag_and_metric_it_names_exists(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvmesh", "size", "--help"])
    with pytest.raises(SystemExit):
        main()
    flags = set(re.findall(r"--[a-z0-9-]+", capsys.readouterr().out))
    metrics = {m.name for m in page_of("every").collect()}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", PAGE)) <= flags
    assert {name.removesuffix("_total") for name in re.findall(r"`(kvmesh_\w+)`", PAGE)} <= metrics
