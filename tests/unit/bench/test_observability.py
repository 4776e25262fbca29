"""What bench.observability computes, and that its switch turns off all that records, and nothing else."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.trace import INVALID_SPAN_CONTEXT
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bench.observability.__main__ import main, report, too_much
from bench.observability.interval import of_median
from bench.observability.pages import own_series
from bench.observability.pairs import Pair
from bench.observability.proof import Seen
from bench.observability.switch import RECORDERS, turn
from kvmesh.telemetry import metrics, traces

ROOT = Path(__file__).parents[3]


@pytest.fixture
def off() -> Iterator[None]:
    turn(on=False)
    try:
        yield
    finally:
        turn(on=True)


# The interval.


def test_of_ten_values_the_second_and_the_ninth_are_the_ends() -> None:
    interval = of_median([10, 1, 9, 2, 8, 3, 7, 4, 6, 5])
    assert (interval.low, interval.median, interval.high) == (2, 5.5, 9)
    assert interval.confidence == 1 - 2 * (1 + 10) / 1024


def test_five_values_are_too_few() -> None:
    with pytest.raises(ValueError, match="5 values are too few"):
        of_median([1, 2, 3, 4, 5])


def test_six_values_are_just_enough() -> None:
    interval = of_median([1, 2, 3, 4, 5, 6])
    assert (interval.low, interval.high, interval.confidence) == (1, 6, 1 - 2 / 64)


# The result.


def test_above_one_means_that_what_is_on_costs_something() -> None:
    result = report([Pair(on=50.0, off=55.0)] * 10)
    assert (result["ratio_median"], result["pairs"]) == (1.1, 10)
    assert (result["on_tokens_per_second"], result["off_tokens_per_second"]) == (50.0, 55.0)


@pytest.mark.parametrize(("off_rate", "refused"), [(101.9, False), (102.1, True)])
def test_a_low_end_above_the_limit_is_refused(off_rate: float, refused: bool) -> None:
    assert bool(too_much(report([Pair(on=100.0, off=off_rate)] * 10))) is refused


def test_an_interval_that_reaches_down_to_no_cost_passes() -> None:
    pairs = [Pair(on=100.0, off=rate) for rate in (99, 101, 103, 104, 105, 106, 107, 108, 109, 110)]
    assert not too_much(report(pairs))


@pytest.mark.parametrize(
    "flags", [["--pairs", "9"], ["--tokens", "0"], ["--concurrency", "17"], ["--scrape-seconds", "0"]]
)
def test_what_measures_nothing_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(flags)
    assert refused.value.code == 2
    assert flags[0] in capsys.readouterr().err


# The switch.


def record(registry: CollectorRegistry) -> dict[str, Gauge | Counter | Histogram]:
    return {
        "counter": Counter("kvmesh_a", "a", ["reason"], registry=registry),
        "gauge": Gauge("kvmesh_b", "b", registry=registry),
        "histogram": Histogram("kvmesh_c", "c", registry=registry),
    }


def use(made: dict[str, Gauge | Counter | Histogram]) -> None:
    counter, gauge, histogram = made["counter"], made["gauge"], made["histogram"]
    assert isinstance(counter, Counter) and isinstance(gauge, Gauge) and isinstance(histogram, Histogram)
    counter.labels(reason="x").inc()
    gauge.set(3)
    gauge.inc()
    gauge.dec(2)
    histogram.observe(0.1, {"room": "1.2"})
    with histogram.time():
        pass


def test_off_no_series_moves_and_none_is_made(off: None) -> None:
    registry = CollectorRegistry()
    made = record(registry)
    before = own_series(generate_latest(registry).decode())
    use(made)
    assert own_series(generate_latest(registry).decode()) == before


def test_on_again_all_is_recorded() -> None:
    turn(on=False)
    turn(on=True)
    registry = CollectorRegistry()
    use(record(registry))
    series = own_series(generate_latest(registry).decode())
    assert (series['kvmesh_a_total{reason="x"}'], series["kvmesh_b"], series["kvmesh_c_count"]) == (1, 2, 2)


def test_off_spans_have_their_times_and_are_not_kept(off: None) -> None:
    kept = traces.RING.all()
    with traces.start("request", parent=INVALID_SPAN_CONTEXT, begun=5.0) as span:
        part = span.child("room", room=7)
        part.end("lost", ended=9.0)
    assert traces.RING.all() == kept
    assert (span.begun, part.ended, part.error, span.traceparent, span.metadata) == (5.0, 9.0, "lost", "", ())


def test_the_switch_knows_every_call_that_records() -> None:
    """Of the metrics: whatever is called on one. Of the spans: what services call by the module's name."""
    named = {name for name, value in vars(metrics).items() if isinstance(value, Counter | Gauge | Histogram)}
    called: set[str] = set()
    for path in (*(ROOT / "services").rglob("*.py"), *(ROOT / "kvmesh").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_metric(node.func, named):
                called.add(node.func.attr)
    switched = {recorder.name for recorder in RECORDERS}
    assert {"inc", "set", "observe", "labels"} <= called
    assert called - switched <= {"set_function"}, "set_function records nothing: it is worked out when a page is read"


def _is_metric(called: ast.Attribute, named: set[str]) -> bool:
    owner = called.value
    if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute) and owner.func.attr == "labels":
        return True
    return isinstance(owner, ast.Attribute) and owner.attr in named


# The proof.


def seen(before: dict[str, float], after: dict[str, float], spans: dict[str, int]) -> Seen:
    return Seen("decoder 0", "decode", before, after, spans)


def test_what_moved_or_was_kept_was_recorded() -> None:
    assert seen({"a": 1}, {"a": 2, "b": 1}, {"decode": 1}).recorded() == [
        "decoder 0: a",
        "decoder 0: b",
        "decoder 0: a span 'decode'",
    ]
    assert seen({"a": 1}, {"a": 1}, {}).recorded() == []


def test_what_is_worked_out_when_a_page_is_read_was_not() -> None:
    assert seen({"kvmesh_loop_lag_seconds": 0.1}, {"kvmesh_loop_lag_seconds": 0.2}, {}).recorded() == []


def test_a_room_moves_a_series_and_leaves_a_span() -> None:
    tokens = "kvmesh_decode_tokens_total"
    assert seen({tokens: 1}, {tokens: 2}, {"room at decoder": 1}).missing() == []
    assert seen({tokens: 1}, {tokens: 1}, {}).missing() == [
        f"decoder 0: {tokens}",
        "decoder 0: a span 'room at decoder'",
    ]
