import math
from dataclasses import replace

import pytest
from sizings import ROUND

from kvmesh.sizing.given import StepTimes
from kvmesh.sizing.outlook import Outlook, outlook

PREFILL_ONLY = replace(ROUND, output_tokens=1)


def gauge(found: Outlook, word: str) -> float:
    (expected,) = [g.expected for g in found.gauges if word in g.name]
    return expected


def test_the_parts_of_the_first_token_are_those_of_the_arithmetic() -> None:
    found = outlook(replace(PREFILL_ONLY, overhead_seconds=0.1), 1.0, 1, 1)
    # M/D/1 at half its load: 0.5 x 0.5 / 2(1 - 0.5). Prefill: 500 tokens, and the last 100 through the second stage.
    assert found.first_token_parts == pytest.approx(
        {"wait": 0.25, "prefill": 0.6, "transfer": 0, "join": 0, "overhead": 0.1}
    )
    assert found.first_token_mean == pytest.approx(0.95)
    # Half wait, on average 0.5 s: 5 % wait longer than 0.5 x ln 10.
    assert found.first_token_p95 == pytest.approx(0.7 + 0.5 * math.log(10))


@pytest.mark.parametrize(
    ("link", "tail"),
    [
        (1e9, 0.0001),  # fast: that of the last step, 100 tokens
        (1e6, 0.1),  # 0.5 s of KV, of which 0.4 s went while the rest was computed
        (5e5, 0.6),  # 1.0 s, less the same 0.4 s
    ],
)
def test_the_transfer_is_what_is_left_after_the_last_compute(link: float, tail: float) -> None:
    given = replace(PREFILL_ONLY, kv_bytes_per_token=1000, link_bytes_per_second=link)
    assert given.transfer_tail_seconds(500) == pytest.approx(tail)


def test_a_prompt_shorter_than_a_step_passes_every_stage_whole() -> None:
    assert ROUND.prefill_seconds(60) == pytest.approx(0.12)


def test_a_room_holds_pages_for_its_longest_answer_from_its_arrival_on() -> None:
    found = outlook(PREFILL_ONLY, 1.0, 1, 1)
    assert ROUND.room_pages(500) == 40
    assert found.rooms == pytest.approx(0.25 + 0.6), "Little: one a second, that long"
    assert found.pages == pytest.approx(40 * 0.85)


def test_rooms_that_run_are_those_of_the_steps_they_need() -> None:
    level = replace(ROUND, step_seconds=StepTimes(((1, 0.02), (2, 0.02))))
    found = outlook(level, 1.0, None, 1)
    # 100 steps of 0.02 s each; before that 0.6 s, and half a step, where one runs.
    assert found.rooms == pytest.approx(2 + 0.6 + 0.01 * (1 - math.exp(-2)))
    assert found.token_gap_mean == pytest.approx(0.02)


def test_several_decoders_and_pipelines_have_a_share_each() -> None:
    one, three = outlook(ROUND, 1.0, 1, 1), outlook(ROUND, 3.0, 3, 3)
    for word in ("prefill", "pages of a stage"):
        assert gauge(one, word) == pytest.approx(gauge(three, word))
    assert three.first_token_parts["wait"] < one.first_token_parts["wait"], "one queue for all pipelines"
    assert three.first_token_parts["join"] == pytest.approx(one.first_token_parts["join"])


def test_kv_leaves_by_the_stages_and_enters_by_the_decoders() -> None:
    given = replace(PREFILL_ONLY, kv_bytes_per_token=20_000, link_bytes_per_second=1e9, prefill_rate=1e5)
    found = outlook(given, 12.0, 2, 3)
    assert gauge(found, "KV out of a stage") == pytest.approx(12 * 500 * 0.02 / 2 / 2)
    assert gauge(found, "KV into a decoder") == pytest.approx(12 * 500 * 0.02 / 3)


def test_pages_of_a_stage_are_held_while_a_prompt_computes_and_its_kv_leaves() -> None:
    found = outlook(PREFILL_ONLY, 1.0, 1, 1)
    assert gauge(found, "pages of a stage") == pytest.approx(0.6 * 32)


@pytest.mark.parametrize(("pipelines", "decoders"), [(1, 9), (9, 1)])
def test_too_much_for_either_is_told_and_infinite(pipelines: int, decoders: int) -> None:
    found = outlook(ROUND, 12.0, pipelines, decoders)
    assert not found.holds
    assert found.first_token_p95 == math.inf
    assert {g.cure for g in found.over} >= {"pipeline"}


def test_an_idle_mesh_has_the_times_of_one_request() -> None:
    found = outlook(ROUND, 0.0, None, None)
    assert found.first_token_p95 == pytest.approx(0.6)
    assert (found.token_gap_p95, found.rooms, found.queued_prefill_seconds) == (0.01, 0, 0)
