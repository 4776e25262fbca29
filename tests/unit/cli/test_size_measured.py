"""What `kvmesh size` asks of Prometheus, from one that answers as it is told to. A real one: tests/deploy/test_size_live.py."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest

from kvmesh.cli.measured import Measured, measure, window_seconds
from kvmesh.errors import Unavailable

FIGURES = {
    "kvmesh_prompt_tokens_sum": "512.5",
    "kvmesh_output_tokens_sum": "64",
    "kvmesh_prefill_tokens_total": "900",
    "count by (pipeline)": "3",
    "kvmesh_pages{": "2048",
    "kvmesh_time_to_first_token_part_seconds_sum": "0",
    "kvmesh_prompt_tokens_count": "1.5",
}
"""Answers by what is in the query; the first that fits."""
BATCHES = [[0, "1"], [60, "4"], [120, "8"], [180, "NaN"]]
STEPS = [[0, "0.011"], [60, "0.014"], [120, "0.018"]]


def series(**values: Any) -> list[dict[str, Any]]:
    return [{"metric": {"instance": "a:1"}, **values}]


@contextmanager
def prometheus(
    figures: dict[str, str] = FIGURES, batches: Any = BATCHES, steps: Any = STEPS, body: bytes | None = None
) -> Iterator[tuple[str, list[dict[str, list[str]]]]]:
    """Its address, and what it was asked."""
    asked = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlparse(self.path)
            asked.append(parameters := parse_qs(url.query))
            query = parameters["query"][0]
            if query.endswith("[3600s:60s]"):
                found = series(values=batches if "decode_tokens_total" in query else steps)
            else:
                answer = next((v for words, v in figures.items() if words in query), None)
                found = series(value=[0, answer]) if answer is not None else []
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body if body is not None else json.dumps({"data": {"result": found}}).encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def measured(url: str) -> Measured:
    return measure(url, 'kvmesh/"x"', 3600, with_transfer=False)


def test_load_rates_and_pages_are_found_by_the_flags_that_would_say_them() -> None:
    with prometheus() as (url, asked):
        found = measured(f"{url}/")
    assert found.missing == {}
    assert found.values.pop("step") == [(1.0, pytest.approx(0.011)), (8.0, pytest.approx(0.018))]
    assert found.values == {
        "rate": 1.5,
        "prompt_tokens": 512.5,
        "output_tokens": 64.0,
        "prefill_rate": 900.0,
        "pp": 3,
        "prefill_pages": 2048,
        "num_pages": 2048,
        "overhead": 0.0,
    }
    assert all(r'job="kvmesh/\"x\""' in parameters["query"][0] for parameters in asked)


def test_what_is_not_there_is_left_out_with_the_reason() -> None:
    with prometheus({"kvmesh_prompt_tokens_sum": "NaN", "kvmesh_prompt_tokens_count": "0"}) as (url, _):
        found = measured(url)
    assert found.values.keys() == {"step"}
    assert found.missing.keys() == {
        *("rate", "prompt_tokens", "output_tokens", "prefill_rate", "pp", "prefill_pages", "num_pages", "overhead")
    }


@pytest.mark.parametrize(
    ("batches", "steps", "why"),
    [
        ([], [], "0.0 to 0.0 rooms are too alike"),
        ([[0, "1"], [60, "1.5"]], STEPS, "1.0 to 1.5 rooms are too alike"),
        (BATCHES, [[0, "0.02"], [60, "0.015"], [120, "0.01"]], "did not grow"),
    ],
)
def test_steps_that_tell_nothing_of_their_growth_are_left_out(batches: Any, steps: Any, why: str) -> None:
    with prometheus(batches=batches, steps=steps) as (url, _):
        assert why in measured(url).missing["step"]


def test_a_prometheus_that_is_not_there_or_none_is_told() -> None:
    with prometheus(body=b"<html>") as (url, _), pytest.raises(Unavailable, match="not answer as Prometheus does"):
        measured(url)
    with pytest.raises(Unavailable, match=r"does not answer: .*refused"):
        measured(url)


@pytest.mark.parametrize(("text", "seconds"), [("5m", 300), ("2h", 7200), ("1d", 86400)])
def test_a_window_is_written_as_prometheus_has_it(text: str, seconds: float) -> None:
    assert window_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "0m", "-1h", "1y", "1h30m", "9999999d"])
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        window_seconds(text)
