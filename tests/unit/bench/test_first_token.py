"""The figures of bench.first_token, on answers made by hand."""

from typing import Any

import pytest

from bench.first_token import Asked, main, report
from kvmesh.client import TIMING_PARTS, End


def asked(*, other: float = 0.001, prefill: float = 0.2, client: float = 1.0) -> Asked:
    parts = dict.fromkeys(TIMING_PARTS, 0.0) | {"prefill": prefill, "other": other}
    end = End(
        finish_reason="length",
        prompt_tokens=64,
        output_tokens=8,
        parts_seconds=parts,
        time_to_first_token_seconds=sum(parts.values()),
        decode_seconds=0.1,
        attempts=1,
        failed_attempts=(),
        room=1,
    )
    return Asked(end, client)


def found(*all_asked: Asked) -> dict[str, Any]:
    return report(all_asked, {"prefill p0/0": [0.1, 0.2], "prefill p0/1": [0.3, 0.3]})


def test_the_residual_is_told_as_time_and_as_a_share_of_each_request() -> None:
    figures = found(asked(other=0.01, prefill=0.09), asked(other=0.01, prefill=0.19), asked(other=0.01, prefill=0.39))
    assert (figures["other_seconds_p50"], figures["other_share_p50"]) == (0.01, 0.05)
    assert figures["parts"]["prefill"]["p50"] == 0.19
    assert figures["time_to_first_token"]["p50"] == 0.2


@pytest.mark.parametrize(
    ("other", "prefill", "explained"),
    [(0.019, 1.0, True), (0.0049, 0.01, True), (0.021, 1.0, False), (0.0051, 0.01, False)],
    ids=["small share", "short", "neither, long prompt", "neither, short prompt"],
)
def test_either_limit_is_enough(other: float, prefill: float, explained: bool) -> None:
    one = asked(other=other, prefill=prefill, client=2.0)
    assert found(one, one)["is_explained"] is explained


def test_parts_beyond_what_the_client_saw_explain_nothing() -> None:
    figures = found(asked(), asked(client=0.1))
    assert (figures["parts_exceed_what_client_saw"], figures["is_explained"]) == (1, False)


def test_ranks_stand_apart() -> None:
    figures = found(asked(), asked())
    assert figures["compute_by_rank"]["prefill p0/1"]["p50"] == 0.3
    assert "prefill p0/1" not in figures["parts"]


@pytest.mark.parametrize(
    "flags", [["--requests", "1"], ["--clients", "0"], ["--prompt-lens", "9", "3"], ["--prompt-lens", "0", "3"]]
)
def test_what_can_not_be_asked_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(flags)
    assert refused.value.code == 2
    said = capsys.readouterr().err
    assert flags[0] in said
