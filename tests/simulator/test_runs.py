"""Runs at random: a function of their plan; small when they fail; and readable."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from mutations import MUTATIONS

from simulator.plan import LARGE, LASTING, SMALL, Plan, draw
from simulator.run import Run
from simulator.shrink import shrink
from simulator.timeline import story
from simulator.violation import Violation

ROOT = Path(__file__).resolve().parents[2]
PAGES_TWICE = next(m for m in MUTATIONS if m.name == "a page is given out twice")


def notes(plan: Plan) -> list[object]:
    run = Run(plan)
    run.run()
    return list(run.world.witness.notes)


def test_the_same_seed_is_the_same_run() -> None:
    plan = next(p for p in (draw(seed, SMALL) for seed in range(50)) if len(p.faults) > 2)
    assert notes(plan) == notes(plan)


def test_another_seed_is_another_run() -> None:
    assert notes(draw(1, SMALL)) != notes(draw(2, SMALL))


def test_a_plan_survives_being_written_down() -> None:
    for seed in range(20):
        plan = draw(seed, SMALL)
        assert Plan.from_json(plan.to_json()) == plan


def test_every_kind_of_fault_is_drawn_on_every_role() -> None:
    faults = [f for seed in range(400) for f in draw(seed, SMALL).faults]
    assert {f.kind for f in faults} == set(LASTING)
    roles = {f.target.partition(" ")[0].rstrip("0123456789") for f in faults if f.kind == "kill"}
    assert roles == {"p", "decoder", "gateway", "registry"}


def test_large_worlds_are_large() -> None:
    plans = [draw(seed, LARGE) for seed in range(60)]
    assert max(p.shape.pp for p in plans) == 16
    assert max(p.shape.pipelines for p in plans) == 8
    assert max(p.shape.decoders for p in plans) == 16
    assert min(len(p.wishes) for p in plans) >= 1000
    for plan in plans:
        aborted = sum(w.cancelled_after is not None for w in plan.wishes) / len(plan.wishes)
        assert 0.25 < aborted < 0.35


def failing() -> tuple[Plan, Violation]:
    for seed in range(50):
        plan = draw(seed, SMALL)
        try:
            Run(plan, noting=False).run()
        except Violation as violation:
            return plan, violation
    raise AssertionError("nothing fails")


def test_a_failing_run_shrinks_to_a_small_one_that_fails_alike_and_tells_its_story() -> None:
    with PAGES_TWICE.entered():
        plan, violation = failing()
        smallest = shrink(plan, violation, limit_seconds=20)
        run = Run(smallest)
        with pytest.raises(Violation) as caught:
            run.run()
        assert caught.value.invariant == violation.invariant
        assert len(smallest.wishes) < len(plan.wishes)
        assert len(smallest.wishes) <= 4
        assert len(smallest.faults) <= 1
        lines = list(story(run.world.witness, caught.value))
        assert any("has its pages" in line for line in lines)


def simulator(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "simulator", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_a_seed_is_replayed_from_the_command_line() -> None:
    ended = simulator("--seed", "7")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("all well: ")


def test_a_file_that_is_no_plan_is_named(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(replace(draw(1, SMALL), faults=()).to_json()[:-20])
    ended = simulator("--plan", str(file))
    assert ended.returncode == 2
    assert str(file) in ended.stderr
