"""What observability costs, measured on a real mesh of tiny processes: the switch proves itself there in each run."""

import json

import pytest

from bench.observability.__main__ import main


@pytest.mark.deep
@pytest.mark.slice
@pytest.mark.timeout(180)
def test_ten_pairs_of_a_tiny_mesh_are_measured_and_proved(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--json", "--model", "tiny", "--pairs", "10", "--tokens", "20", "--scrape-seconds", "0.2"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < result["ratio_low"] <= result["ratio_median"] <= result["ratio_high"]
    assert (result["pairs"], result["pages_scraped"] > 0) == (10, True)
    assert min(result["on_tokens_per_second"], result["off_tokens_per_second"]) > 0
