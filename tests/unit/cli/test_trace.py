import pytest
from rich.console import Console

from kvmesh.cli.spans import Row, rows
from kvmesh.cli.trace import bar, drawn, parse_room
from kvmesh.errors import BadConfig
from kvmesh.v1 import trace_pb2 as pb


def span(number: int, parent: int, name: str, begin_ms: int, ms: int, error: str = "") -> pb.Span:
    told = pb.Span(trace_id=bytes(16), span_id=bytes([number]), name=name, error=error, attributes={"tokens": "3"})
    if parent:
        told.parent_span_id = bytes([parent])
    told.start.FromNanoseconds(1_700_000_000_000_000_000 + begin_ms * 10**6)
    told.duration.FromNanoseconds(ms * 10**6)
    return told


def process(name: str, *spans: pb.Span) -> pb.ListSpansResponse:
    return pb.ListSpansResponse(process=name, spans=spans)


GATEWAY = process("gateway", span(1, 0, "request", 0, 100), span(2, 1, "room", 10, 80))


def at(found: list[Row], name: str) -> int:
    (row,) = [r for r in found if r.name == name]
    return round(row.begun * 1e3)


def test_each_span_follows_the_one_it_is_part_of() -> None:
    decoder = process("decode", span(4, 3, "reserve", 12, 1), span(3, 2, "room at decoder", 12, 70))
    found = rows([decoder, GATEWAY])
    assert [(r.depth, r.name) for r in found] == [(0, "request"), (1, "room"), (2, "room at decoder"), (3, "reserve")]
    assert at(found, "reserve") == 12


@pytest.mark.parametrize("skew_ms", [-60_000, -30, 25, 3_600_000])
def test_a_process_whose_clock_is_off_is_shifted_as_a_whole(skew_ms: int) -> None:
    decoder = process("decode", span(3, 2, "room at decoder", 12 + skew_ms, 70), span(4, 3, "reserve", 13 + skew_ms, 1))
    stage = process("prefill p0/0", span(5, 3, "prefill", 20, 30))
    found = rows([stage, decoder, GATEWAY])
    assert at(found, "room at decoder") == 15
    assert at(found, "reserve") == 16
    assert at(found, "prefill") == 20, "its own clock is right"


def test_spans_whose_parent_is_lost_are_shown_all_the_same() -> None:
    found = rows(
        [process("decode", span(3, 99, "room at decoder", 5, 10)), process("x", span(6, 6, "own parent", 7, 1))]
    )
    assert [r.name for r in found if r.depth == 0] == ["room at decoder"]
    assert rows([]) == []


def test_a_bar_lies_where_its_span_lies_and_is_never_empty() -> None:
    found = rows([GATEWAY, process("decode", span(3, 2, "short", 99, 0))])
    bars = {row.name: bar(row, 0.1) for row in found}
    assert bars["request"] == "━" * 32
    assert bars["room"] == " " * 3 + "━" * 26
    assert bars["short"].strip() == "━"


def test_the_picture_names_process_times_notes_and_errors() -> None:
    lost = process("prefill p0/1", span(5, 2, "prefill", 20, 30, error="stage lost"))
    console = Console(width=140)
    with console.capture() as captured:
        console.print(drawn(rows([GATEWAY, lost])))
    (line,) = [text for text in captured.get().splitlines() if "prefill p0/1" in text]
    assert "20.0" in line
    assert "30.0" in line
    assert "stage lost, tokens 3" in line


@pytest.mark.parametrize("text", ["1.24", str((1 << 40) + 24)])
def test_a_room_is_named_as_logs_name_it_or_by_its_number(text: str) -> None:
    assert parse_room(text) == (1 << 40) + 24


@pytest.mark.parametrize(
    "text", ["", "x", "1.", ".1", "1.2.3", "-1", "0", "1.0", "0.1", "1.99999999999999", "²", "9" * 30]
)
def test_what_is_no_room_is_refused(text: str) -> None:
    with pytest.raises(BadConfig, match=r"ROOM is .*1\.24 is needed"):
        parse_room(text)
