import json
import subprocess
import sys

import pytest

from bench.bootstrap_order.__main__ import PP_SIZES, PROTOCOLS, Results, compare, main, run
from bench.bootstrap_order.outcome import Decision, Outcome, percentile
from bench.bootstrap_order.stages import StageViews, View
from bench.bootstrap_order.traffic import Conditions, Network, requests_of
from kvmesh.protocol.ids import RoomId
from simulator.latency import Latency

KEYS = {
    "requests",
    "divergent",
    "crashed_or_hung",
    "admission_rtts_p50",
    "admission_rtts_p99",
    "admission_steps_p50",
    "admission_steps_p99",
}
SMALL = Conditions(requests=200)
A, B = RoomId(1), RoomId(2)


@pytest.fixture(scope="module")
def results() -> Results:
    return compare(SMALL, [0], [2, 16], PROTOCOLS)


def test_stages_that_look_up_diverge_and_fewer_where_the_highest_rank_is_told_first(results: Results) -> None:
    for pp in ("2", "16"):
        assert 0 < results["last_first"][pp]["divergent"] < results["independent"][pp]["divergent"]
        assert results["last_first"][pp]["crashed_or_hung"] >= results["last_first"][pp]["divergent"]


def test_the_ring_and_kvmesh_never_diverge(results: Results) -> None:
    for protocol in ("ring", "kvmesh"):
        assert [row["divergent"] for row in results[protocol].values()] == [0, 0]
        assert [row["crashed_or_hung"] for row in results[protocol].values()] == [0, 0]


def test_admission_of_the_ring_grows_with_the_stages_and_that_of_kvmesh_does_not(results: Results) -> None:
    ring, kvmesh = results["ring"], results["kvmesh"]
    assert ring["16"]["admission_rtts_p50"] > 4 * ring["2"]["admission_rtts_p50"]
    assert ring["16"]["admission_steps_p50"] >= 16
    assert kvmesh["16"]["admission_rtts_p50"] == pytest.approx(kvmesh["2"]["admission_rtts_p50"], rel=0.1)
    assert kvmesh["16"]["admission_steps_p50"] == kvmesh["2"]["admission_steps_p50"]


def test_the_ring_with_a_second_look_diverges() -> None:
    results = compare(SMALL, [0], [8], ["ring", "ring_second_look"])
    assert results["ring"]["8"]["divergent"] == 0 < results["ring_second_look"]["8"]["divergent"]


def test_without_aborts_skew_or_time_outs_nobody_diverges() -> None:
    """No protocol is made to fail: with the fault's causes gone, the fault is gone."""
    calm = Conditions(
        requests=200, abort_rate=0, late_rate=0, latency=Latency.parse("constant:0.01"), tell_gap_seconds=0
    )
    for protocol, sizes in compare(calm, [0], [4], PROTOCOLS).items():
        assert sizes["4"]["divergent"] == sizes["4"]["crashed_or_hung"] == 0, protocol
        assert sizes["4"]["admitted"] == 200, protocol


def test_an_idle_mesh_admits_after_one_message() -> None:
    calm = Conditions(requests=50, rate=0.5, abort_rate=0, late_rate=0, latency=Latency.parse("constant:0.01"))
    row = compare(calm, [0], [8], ["kvmesh"])["kvmesh"]["8"]
    assert (row["admission_rtts_p50"], row["admission_steps_p50"]) == (0.5, 1)


def test_the_ring_of_a_loaded_pipeline_costs_a_step_for_each_stage() -> None:
    calm = Conditions(requests=300, rate=6, abort_rate=0, late_rate=0, latency=Latency.parse("constant:0.001"))
    rows = compare(calm, [0], [4, 8], ["independent", "ring"])
    for pp in (4, 8):
        extra = rows["ring"][str(pp)]["admission_steps_p50"] - rows["independent"][str(pp)]["admission_steps_p50"]
        assert pp - 1 <= extra <= pp + 1


def test_a_stage_that_decoders_reach_late_makes_look_ups_fail_more() -> None:
    slow = Conditions(requests=200, slow_stage=(1, Latency.parse("uniform:0.2:1")))
    even, skewed = (compare(c, [0], [2], ["independent", "kvmesh"]) for c in (SMALL, slow))
    assert skewed["independent"]["2"]["divergent"] > even["independent"]["2"]["divergent"]
    assert skewed["kvmesh"]["2"]["divergent"] == 0


def test_a_seed_reproduces_and_another_one_differs() -> None:
    first, again, other = (compare(Conditions(requests=60), [seed], [4], PROTOCOLS) for seed in (3, 3, 4))
    assert first == again != other


def test_every_protocol_meets_the_same_latency_of_the_same_message() -> None:
    requests = requests_of(SMALL)
    fresh, used = Network(SMALL), Network(SMALL)
    for protocol in PROTOCOLS:
        run(protocol, used, requests[:50], 4)
    for request in requests[:50]:
        for message in ("ready", "abort", "kv"):
            assert fresh.latency(request.decoder, 1, request.room, message) == used.latency(
                request.decoder, 1, request.room, message
            )


def test_another_abort_rate_leaves_the_rest_of_the_traffic_as_it_was() -> None:
    calm = requests_of(Conditions(requests=100, abort_rate=0))
    stormy = requests_of(Conditions(requests=100, abort_rate=1))
    assert [(r.arrived, r.prompt_len, r.decoder) for r in calm] == [
        (r.arrived, r.prompt_len, r.decoder) for r in stormy
    ]
    assert all(r.aborted is None for r in calm) and all(r.aborted is not None for r in stormy)


def test_a_stage_s_view_follows_its_own_messages_and_its_own_timer() -> None:
    stage = StageViews(2.0, {(A, "ready"): 1.0, (A, "abort"): 1.5, (B, "ready"): 9.0})
    stage.request_arrived(A, 0.0)
    stage.request_arrived(B, 0.5)
    assert [stage.view(A, now) for now in (0.9, 1.0, 1.5)] == [View.BOOTSTRAPPING, View.READY, View.FAILED]
    assert [stage.view(B, now) for now in (2.4, 2.5, 9.5)] == [View.BOOTSTRAPPING, View.FAILED, View.FAILED]


@pytest.mark.parametrize(
    ("other", "divergent", "stopped"),
    [
        ({A: Decision.ADMITTED}, set(), set()),
        ({A: Decision.DROPPED}, {A}, {A}),
        ({A: Decision.ASSERTED}, {A}, {A}),
        ({}, {A}, {A}),
    ],
)
def test_a_room_that_one_stage_admits_must_be_admitted_by_all(
    other: dict[RoomId, Decision], divergent: set[RoomId], stopped: set[RoomId]
) -> None:
    outcome = Outcome()
    outcome.compare([{A: Decision.ADMITTED}, other])
    assert (outcome.divergent, outcome.stopped) == (divergent, stopped)


def test_an_assertion_about_a_dropped_room_stops_the_pipeline_and_is_no_divergence() -> None:
    outcome = Outcome()
    outcome.compare([{A: Decision.DROPPED}, {A: Decision.ASSERTED}])
    assert (outcome.divergent, outcome.stopped) == (set(), {A})


@pytest.mark.parametrize(("share", "value"), [(0.5, 2), (0.51, 3), (0.99, 4), (1.0, 4)])
def test_percentiles_are_values_that_occurred(share: float, value: float) -> None:
    assert percentile([4, 1, 3, 2], share) == value
    assert percentile([], share) == 0


def test_the_last_line_is_json_with_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["--requests", "40", "--seeds", "1", "--seed", "7", "--abort-rate", "0.2", "--latency", "uniform:0:0.1"])
        == 0
    )
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (printed["seed"], printed["abort_rate"], printed["latency"]) == (7, 0.2, "uniform:0:0.1")
    for protocol in PROTOCOLS:
        assert list(printed[protocol]) == [str(pp) for pp in PP_SIZES]
        assert all(row.keys() >= KEYS and row["requests"] == 40 for row in printed[protocol].values())


def test_counting_needs_no_matplotlib() -> None:
    code = "import sys, bench.bootstrap_order.__main__; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
