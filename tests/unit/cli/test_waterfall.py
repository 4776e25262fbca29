import pytest
from rich.console import Console
from told_spans import GATEWAY, ROOM, process, span

from kvmesh.cli.spans import rows
from kvmesh.cli.waterfall import MIN_BAR_COLUMNS, bar, drawn
from kvmesh.v1 import trace_pb2 as pb

WHY = "stage_hung: the decoder: rank 1 of p0 made no progress for 2 s, and more that is told of it"
STAGE = process("prefill p0/1", span(5, 3, "prefill", 20, 30, error=WHY))
STAGE.spans[0].attributes.update({"rank": "1", "tokens": "1000", "steps": "4", "compute_seconds": "0.123"})
ALL = [GATEWAY, process("decode d-01ab3f", span(3, 2, "room at decoder", 12, 70)), STAGE]


def lines(answers: list[pb.ListSpansResponse], width: int) -> list[str]:
    console = Console(width=width, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(drawn(rows(answers, ROOM), width))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_bar_lies_where_its_span_lies_and_is_never_empty() -> None:
    found = rows([GATEWAY, process("decode", span(3, 2, "short", 99, 0))], ROOM)
    bars = {row.name: bar(row, 0.1, 32) for row in found}
    assert bars["request"] == "━" * 32
    assert bars["room"] == " " * 3 + "━" * 26 + " " * 3
    assert bars["short"].strip() == "━"


@pytest.mark.parametrize("width", [60, 80, 100, 120, 140, 200])
def test_at_every_width_processes_spans_times_notes_and_errors_can_be_read(width: int) -> None:
    shown = lines(ALL, width)
    assert max(map(len, shown)) <= width
    assert all(any(line.startswith(name.process) for line in shown) for name in ALL)
    (line,) = [line for line in shown if " prefill " in line.replace("prefill p0/1", "")]
    assert {"20.0", "30.0"} < set(line.split())
    text = " ".join(" ".join(shown).split())
    assert "compute_seconds 0.123, rank 1, steps 4, tokens 1000" in text
    assert WHY in text
    assert max(line.count("━") for line in shown) >= MIN_BAR_COLUMNS


def test_at_80_columns_the_process_stands_beside_its_spans_and_the_error_below() -> None:
    shown = lines(ALL, 80)
    number = next(n for n, line in enumerate(shown) if line.startswith("prefill p0/1 "))
    assert "━" in shown[number]
    assert "stage_hung" not in shown[number]
    assert any("stage_hung" in line for line in shown[number + 1 :])


def test_a_long_process_name_goes_above_its_spans_and_a_longer_span_name_is_cut() -> None:
    shown = lines([process("decode " + "x" * 60, span(1, 0, "y" * 90, 0, 10))], 80)
    assert shown[1] == "decode " + "x" * 60
    assert "━" * MIN_BAR_COLUMNS in shown[2]


def test_parts_of_parts_without_end_stay_on_the_page() -> None:
    chain = process("x", *(span(number, number - 1, "part", number, 1) for number in range(1, 40)))
    assert all("part" in line for line in lines([chain], 80)[1:])
