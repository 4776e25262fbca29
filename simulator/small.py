"""The small worlds that are searched whole: registration, pairing, rooms, and all of it together.

Each begins with real processes of the mesh; what is not its subject has happened before, in one order.
"""

from collections.abc import Callable, Sequence

from simulator.any_time import AnyTime
from simulator.explore import Move, SmallWorld, State, make, moves_of, settle
from simulator.gateway import GatewayProcess, Wish
from simulator.mesh import REGISTRY, Mesh, MeshShape
from simulator.rest import check_ended, check_idle, check_whole
from simulator.stage import StageProcess
from simulator.violation import Violation
from simulator.witness import Witness
from simulator.world import World

TRYING = frozenset({"next", "lease", "pair", "ask"})
"""Pauses between two tries: over at any time."""
PATIENCE = frozenset({"early is over", "linking is over"})
ALL_LOCAL = frozenset({"steps", "copies", "reports", "inbox", "decoding", "results"})
FOR_EVER = 1e9
"""Seconds that never pass here."""


def no_faults(state: State) -> Sequence[Move]:  # noqa: ARG001
    """None."""
    return ()


def crashes_of(names: Sequence[str]) -> Callable[[State], Sequence[Move]]:
    """Of any of these processes that lives."""
    return lambda state: [Move("crash", name) for name in names if name in state.world.named]


def mesh_of(shape: MeshShape) -> State:
    """Nobody is up yet."""
    world = World(AnyTime(), Witness())
    world.witness.noting = False
    return State(world, Mesh(world, shape))


def until_rest(state: State, timers: frozenset[str] = TRYING) -> None:
    """Makes whatever may come first, until nothing can: what lies before a world's beginning."""
    before = SmallWorld("before", lambda: state, no_faults, lambda _: None, timers, eager=ALL_LOCAL)
    settle(state, before)
    while moves := moves_of(state, before):
        make(state, moves[0], before)
        settle(state, before)


def ask(state: State, *wishes: Wish) -> GatewayProcess:
    """Clients come."""
    gateway = state.mesh.gateway(0)
    assert gateway is not None, "it is up"
    for wish in wishes:
        state.world.witness.arrived(wish.number)
        gateway.ask(wish)
    return gateway


# Registration: a pipeline forms, in any order of arrival; one stage, any, crashes at any time and is replaced.


def registration(pp: int) -> SmallWorld:
    """The world of so many stages."""

    def begin() -> State:
        state = mesh_of(MeshShape(pp=pp, decoders=0, gateways=0))
        state.mesh.start(REGISTRY)
        state.down = [name for name in state.mesh.names if name != REGISTRY]
        state.faults_left = {"crash": 1}
        return state

    return SmallWorld(
        f"registration of {pp} stages, one crash",
        begin,
        crashes_of([f"p0 rank {r}" for r in range(pp)]),
        check_whole_and_idle,
        TRYING,
        PATIENCE,
        eager=ALL_LOCAL,
        replaces=True,
    )


def check_whole_and_idle(state: State) -> None:
    """Whoever crashed was replaced, and all serve."""
    check_whole(state.mesh)
    check_idle(state.mesh)


# Pairing: a whole pipeline and a decoder that comes up; one of its streams, any, breaks at any time.


def pairing(pp: int = 2) -> SmallWorld:
    """The world of one pairing and the one that follows it."""

    def begin() -> State:
        state = mesh_of(MeshShape(pp=pp, gateways=0))
        for name in [REGISTRY, *(f"p0 rank {r}" for r in range(pp))]:
            state.mesh.start(name)
        until_rest(state)
        state.down = ["decoder 0"]
        state.faults_left = {"cut": 1}
        return state

    def cuts(state: State) -> Sequence[Move]:
        wires = state.world.wires.values()
        return [Move("cut", w.stream.name) for w in wires if w.stream.kind in ("link", "control")]

    return SmallWorld(
        f"pairing with {pp} stages, one broken stream, one re-pairing",
        begin,
        cuts,
        check_whole_and_idle,
        TRYING,
        PATIENCE,
        eager=ALL_LOCAL,
    )


# Rooms: over a standing pairing, two rooms of one chunk, one abort, one crash, until the generation ends.


def rooms(*, sharing: bool, abort: int, crash: int, copier_is_eager: bool = True) -> SmallWorld:
    """The world of two rooms. There is no registry: nothing of it is needed any more, and nothing begins anew.

    Args:
        sharing: there is one page at every stage and at the decoder, so one room takes over the other's; else each has its own.
        abort, crash: how many, of either request, and of any stage or the decoder.
        copier_is_eager: the decoder's copier takes from its queue at once; else at any time, like the decode worker.
    """
    pages = 1 if sharing else 2

    def begin() -> State:
        state = mesh_of(
            MeshShape(pp=2, stage_pages=pages, decoder_pages=pages, page_size=4, max_steps_in_flight=2, step_tokens=4)
        )
        state.mesh.start_all()
        until_rest(state)
        gateway = ask(state, Wish(0, 0.0, 2, 2, FOR_EVER), Wish(1, 0.0, 2, 1, FOR_EVER))
        while any(served.generating is None for served in gateway.open.values()):
            (move, *_) = [m for m in moves_of(state, QUIET) if " assign " in m.where]
            make(state, move, QUIET)
        registry = state.world.process(REGISTRY)
        assert registry is not None, "it is up"
        state.world.kill(registry)
        for move in [m for m in moves_of(state, QUIET) if " lease " in m.where]:
            make(state, move, QUIET)
        state.faults_left = {"abort": abort, "crash": crash}
        return state

    def faults(state: State) -> Sequence[Move]:
        gateway = state.mesh.gateway(0)
        aborts = [Move("abort", str(n)) for n in gateway.open] if gateway is not None else []
        return [*aborts, *crashes_of(["p0 rank 0", "p0 rank 1", "decoder 0"])(state)]

    faulty = ", ".join(f"one {name}" for name, count in (("abort", abort), ("crash", crash)) if count)
    where = "on the same page" if sharing else "side by side"
    pace, eager = ("", {"inbox", "reports"}) if copier_is_eager else (", a slow copier", {"reports"})
    name = f"two rooms {where}, {faulty}{pace}"
    return SmallWorld(name, begin, faults, check_ended_generation, frozenset(), eager=frozenset(eager))


QUIET = SmallWorld("quiet", lambda: mesh_of(MeshShape()), no_faults, lambda _: None, frozenset())


def check_ended_generation(state: State) -> None:
    """Who lives holds nothing; a request that has not ended waits to ask for another room."""
    check_idle_but_gateways(state)
    gateway = state.mesh.gateway(0)
    assert gateway is not None, "it never crashes here"
    stuck = [n for n in gateway.open if f"ask again {n}" not in gateway.timers]
    if stuck:
        raise Violation(6, f"requests {stuck} wait for nothing", *stuck)
    generation_died = any(isinstance(p, StageProcess) and not p.life.serving for p in state.world.living.values())
    everyone = len(state.world.living) == 4
    if everyone and generation_died:
        raise Violation(6, "the generation ended, and nobody had crashed")
    if everyone:
        check_ended(state.mesh)


def check_idle_but_gateways(state: State) -> None:
    """As `check_idle`; requests may wait."""
    gateway = state.mesh.gateway(0)
    assert gateway is not None, "it never crashes here"
    waiting, gateway.open = gateway.open, {}
    check_idle(state.mesh)
    gateway.open = waiting


# All of it: two stages, a decoder, a gateway and one room, from the first registration on.


def whole() -> SmallWorld:
    """The world of one request that comes before anything stands."""

    def begin() -> State:
        state = mesh_of(MeshShape(pp=2, stage_pages=2, decoder_pages=2, step_tokens=4, hold_seconds=FOR_EVER))
        state.mesh.start_all()
        ask(state, Wish(0, 0.0, 3, 2, FOR_EVER))
        return state

    def at_rest(state: State) -> None:
        check_ended(state.mesh)
        check_whole_and_idle(state)

    return SmallWorld("all of it: two stages, one room", begin, no_faults, at_rest, TRYING, PATIENCE)
