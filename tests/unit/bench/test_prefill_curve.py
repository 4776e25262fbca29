"""The line of bench.prefill_curve, on times made by hand; and its steps, on a real layer."""

from pathlib import Path

import pytest
import torch

from bench.prefill_curve import curve, main, report
from kvmesh.model.files import ModelFiles
from kvmesh.model.runner import Runner


def test_the_line_through_the_steps_gives_both_numbers() -> None:
    found = {context: 0.001 + 1e-6 * context for context in (64.0, 192.0, 320.0)}
    figures = report(found)
    assert (figures["token_seconds"], figures["context_seconds"]) == pytest.approx((0.001, 1e-6))
    assert figures["tokens_per_second_first"] == pytest.approx(1 / 0.001064, abs=0.1)
    assert figures["context_last"] == 320


def test_each_step_is_taken_by_the_middle_of_its_context(tiny_model_dir: Path) -> None:
    sizes = {"dtype": "fp32", "device": "cpu", "num_pages": 4, "page_size": 16}
    runner = Runner.load(ModelFiles.open(tiny_model_dir), 5, 6, **sizes)  # type: ignore[arg-type]
    found = curve(runner, torch.float32, prompt_len=60, step_tokens=16, rounds=2)
    assert list(found) == [8, 24, 40], "whole steps only"
    assert all(seconds > 0 for seconds in found.values())


@pytest.mark.parametrize("flags", [["--prompt-len", "255"], ["--pp", "1"], ["--rounds", "0"]])
def test_what_can_not_be_measured_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(flags)
    assert refused.value.code == 2
    assert flags[0] in capsys.readouterr().err
