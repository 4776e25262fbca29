from random import Random

import pytest

from simulator.latency import TAIL_CUT, Latencies, Latency


@pytest.mark.parametrize("text", ["constant:0.02", "uniform:0:0.2", "heavy:0.01:1.3"])
def test_a_latency_is_written_as_it_was_read(text: str) -> None:
    assert str(Latency.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "constant", "constant:1:2", "uniform:1", "heavy:1", "normal:1:2"),
        *("constant:x", "constant:-1", "constant:nan", "uniform:0:inf", "uniform:2:1", "heavy:1:0"),
    ],
)
def test_what_is_no_latency_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="latency"):
        Latency.parse(text)


@pytest.mark.parametrize("text", ["constant:0.02", "uniform:0.1:0.3", "heavy:0.01:1", "heavy:0.01:1.3", "heavy:0.01:3"])
def test_the_mean_is_that_of_many_draws_and_none_lies_outside(text: str) -> None:
    latency, random = Latency.parse(text), Random(1)
    drawn = [latency.draw(random) for _ in range(40_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(latency.mean, rel=0.05)
    most = {"constant": latency.low, "uniform": latency.high, "heavy": latency.low * TAIL_CUT}[latency.shape]
    assert min(drawn) >= latency.low and max(drawn) <= most * (1 + 1e-9)


def test_one_edge_may_differ_from_the_rest() -> None:
    latencies = Latencies(Latency.parse("constant:1"), {("a", "b"): Latency.parse("constant:2")})
    assert [latencies.draw(*edge, Random(0)) for edge in (("a", "b"), ("b", "a"))] == [2, 1]
