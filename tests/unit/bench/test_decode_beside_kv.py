"""bench.decode_beside_kv on the tiny model: each way decodes and receives; what can't be measured is refused."""

from pathlib import Path

import pytest

from bench.decode_beside_kv import WAYS, Round, main, report
from kvmesh.model.files import ModelFiles
from kvmesh.model.runner import Runner


def test_every_way_decodes_and_all_but_one_receive(tiny_model_dir: Path) -> None:
    files = ModelFiles.open(tiny_model_dir)
    sizes = {"dtype": "fp32", "device": "cpu", "num_pages": 3 * 12, "page_size": 16}
    runner = Runner.load(files, 0, files.config.num_layers, **sizes)  # type: ignore[arg-type]
    for way in WAYS:
        gaps, rate = Round(runner, prompt_len=40, num_rooms=2).run(way, steps=100, bytes_per_second=5e7)
        assert len(gaps) == 100
        assert min(gaps) > 0
        assert (rate > 0) == (way != "alone")


def test_growth_is_over_what_a_step_takes_by_itself() -> None:
    figures = report(
        {"alone": [0.010] * 10, "copier": [0.011] * 10, "worker": [0.015] * 10},
        {"alone": 0.0, "copier": 2e9, "worker": 1e9},
    )
    assert figures["growth_p50"] == {"copier": 0.1, "worker": 0.5}
    assert figures["kv_gbps"] == {"copier": 2.0, "worker": 1.0}


@pytest.mark.parametrize("flags", [["--rooms", "0"], ["--steps", "1"], ["--gbps", "0"]])
def test_what_can_not_be_measured_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(flags)
    assert refused.value.code == 2
    assert flags[0] in capsys.readouterr().err
