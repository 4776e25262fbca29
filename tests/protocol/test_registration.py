"""Registration among played processes: whatever the order of arrival and of delivery, and wherever something is lost, a
pipeline becomes whole, last rank first, and the registry never ends what runs.
"""

import random
from itertools import permutations

import pytest
from registry_world import World

ORDERS = [*permutations(range(1)), *permutations(range(2)), *permutations(range(3))]


@pytest.mark.parametrize("order", [*ORDERS, *permutations(range(4))])
def test_any_order_of_arrival_is_admitted_last_rank_first(order: tuple[int, ...]) -> None:
    """F-P1, F-N2"""
    world = World(len(order))
    for position, rank in enumerate(order):
        assert position == 0 or not world.registry.mesh.rosters["p0"].whole
        world.start(rank)
        world.settle()
    world.check_whole()
    assert [rank for rank, _ in world.admissions] == sorted(order, reverse=True)
    assert len({generation for _, generation in world.admissions}) == 1


def lose_at(order: tuple[int, ...], victim: int, step: int, lose: str) -> bool:
    """Loses a process (and starts another), or the lease of one, or the registry, after so many steps of a registration;
    whether it took so many."""
    world = World(len(order))
    for rank in order:
        world.start(rank)
    choose = random.Random(f"{order} {victim} {step}").randrange
    reached = world.settle(choose, steps=step) == step
    process = world.process(victim)
    assert process is not None
    if lose == "process":
        world.crash(process)
        world.start(victim)
    elif lose == "lease":
        world.cut(process)
    else:
        world.restart_registry()
    world.settle(choose)
    world.check_whole()
    return reached


@pytest.mark.parametrize("lose", ["process", "lease", "registry"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_loss_at_every_point_ends_in_a_whole_pipeline(order: tuple[int, ...], lose: str) -> None:
    """F-D3, F-D11, F-D15: each rank lost at each step of the registration, and once after it."""
    for victim in range(len(order) if lose != "registry" else 1):
        step = 1
        while lose_at(order, victim, step, lose):
            step += 1
        assert step > 2 * len(order), "the faults were reached"


@pytest.mark.parametrize("seed", range(200))
def test_whatever_is_lost_in_whatever_order_the_pipeline_becomes_whole_and_the_registry_ends_nothing(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng.randint(1, 4), hasty=rng.random() < 0.5)
    for rank in rng.sample(range(world.pp_size), world.pp_size):
        world.start(rank)
    for _ in range(rng.randint(0, 200)):
        fault = rng.random()
        victim = rng.choice([p for p in world.processes if p.alive])
        if fault < 0.02:
            world.crash(victim)
            world.start(victim.rank)
        elif fault < 0.03:
            world.start(victim.rank)  # a newcomer while the holder lives
        elif fault < 0.06:
            world.cut(victim)
        elif fault < 0.07:
            world.restart_registry()
        elif possible := world.steps():
            rng.choice(possible)()
        world.check()
    world.settle(rng.randrange)
    world.check_whole()
