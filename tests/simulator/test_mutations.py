"""Each checker can fail: for every invariant there is a broken core that it catches."""

import pytest
from mutations import MUTATIONS, Mutation

from simulator.plan import SMALL, draw
from simulator.run import Run
from simulator.violation import Violation

MOST_SEEDS = 400
"""The rarest of them shows after about a hundred."""


def caught_at(mutation: Mutation) -> tuple[int, Violation] | None:
    """The first seed at which the named invariant breaks."""
    with mutation.entered():
        for seed in range(MOST_SEEDS):
            try:
                Run(draw(seed, SMALL), noting=False).run()
            except Violation as violation:
                if violation.invariant == mutation.invariant:
                    return seed, violation
            except Exception:  # a broken core may also simply fall over; that is not what is looked for
                continue
    return None


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_broken_core_is_caught_by_the_invariant_it_breaks(
    mutation: Mutation, capsys: pytest.CaptureFixture[str]
) -> None:
    caught = caught_at(mutation)
    assert caught is not None, f"{MOST_SEEDS} seeds show nothing of it"
    with capsys.disabled():
        print(f"\n  {mutation.name}: invariant {mutation.invariant}, at seed {caught[0]}", end="")


def test_every_invariant_is_shown_able_to_fail() -> None:
    assert {m.invariant for m in MUTATIONS} == {1, 2, 3, 4, 5, 6, 8, 9}


def test_a_core_is_whole_again_after_a_mutation() -> None:
    for mutation in MUTATIONS:
        with mutation.entered():
            pass
    Run(draw(1, SMALL), noting=False).run()
