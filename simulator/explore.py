"""Every order in which things can happen in a small world: a search over all states, not a sample.

What may come next: the head of any queue, the end of a stream before what is still on its way, a timer, a fault of the world's
own list. States are told apart by fingerprint. A violation comes with the path that led to it.

Three reductions, none of which hides a broken rule. A thread with a single queue takes from it at once: what it does touches
only itself and the end of the queue it reports on, so it commutes with all else, and of a crash in between nothing is left to
see. Of a decoder's copier that is not the whole truth, since the decode worker writes to the same queues: one world lets it
take at any time. A stage takes its worker's reports at once: whatever ends its life in between leaves the same as if the
worker had not begun, and nothing else that it hears depends on them. And of two moves of different processes, which commute,
the second order is not walked again: sleep sets, kept with each state and shrunk when it is met again (Godefroid, Partial-Order
Methods, 1996, fig. 5.2).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from simulator.mesh import Mesh
from simulator.messages import Closed
from simulator.process import Process, Queue, Wire
from simulator.snapshot import Blind, fingerprint
from simulator.violation import Violation
from simulator.world import UNREACHABLE, World

BLIND = Blind(
    left_out=frozenset({"world", "mark", "notes", "noting", "version", "due", "moved_at"}),
    unordered=frozenset(
        {
            "leases",
            "asking",
            "_running",
            "_told",
            "stages",
            "decoders",
            "logs",
            "prompts",
            "requests",
            "timers",
            "calls",
        }
        | {"links", "rooms", "controls", "by_stream", "_holder", "cells", "owners", "unwritten", "holders", "pairings"}
        | {"arrived", "faults_left", "at_worker", "in_step", "_held"}
    ),
)
"""Clocks that stand, the timeline and the registry's count of changes have no influence; nor has the order of what is only
looked up in."""


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """One thing that may come next."""

    kind: str
    """take, end, timer, early (a timer before its turn), begin, or a fault: crash, cut, abort."""
    where: str
    """The queue, the process, the stream, the request."""
    what: str = ""
    """The timer."""
    owner: int = 0
    """Incarnation of the process that moves; 0 for what touches more than one."""

    def commutes_with(self, other: "Move") -> bool:
        """Whether either may come first, with the same result: they are moves of two processes."""
        return 0 != self.owner != other.owner != 0


FAULTS = ("crash", "cut", "abort")


@dataclass(slots=True)
class State:
    """One state of a small world."""

    world: World
    mesh: Mesh
    faults_left: dict[str, int] = field(default_factory=dict)
    """How many more of each kind may happen."""
    down: list[str] = field(default_factory=list)
    """Processes that come up, at any time."""
    early: int = 1
    """How many more pauses may be over while something else can happen."""

    def copied(self) -> "State":
        """Another, that goes its own way."""
        world = self.world.copied()
        return State(world, Mesh(world, self.mesh.shape), dict(self.faults_left), list(self.down), self.early)

    def fingerprint(self) -> int:
        """What tells it from others."""
        world = self.world
        changed: list[Process | Wire] = [*world.living.values(), *world.wires.values()]
        for one in changed:
            if one.mark is None:
                one.mark = fingerprint(one, {}, BLIND)
        return hash(
            (
                tuple(sorted((i, p.mark) for i, p in world.living.items())),
                tuple(sorted((n, w.mark) for n, w in world.wires.items())),
                fingerprint(world.witness, {}, BLIND),
                (world.term, world.num_processes, self.early, tuple(sorted(self.down))),
                tuple(sorted(self.faults_left.items())),
            )
        )


@dataclass(frozen=True, slots=True)
class SmallWorld:
    """A world to be searched."""

    name: str
    begin: Callable[[], State]
    """The first state."""
    faults: Callable[[State], Sequence[Move]]
    """Those that could happen now, if any are left."""
    at_rest: Callable[[State], None]
    """Checks a state in which nothing can happen but faults."""
    timers: frozenset[str]
    """Names, up to the first blank, of timers that may fire at any time."""
    last_timers: frozenset[str] = frozenset()
    """Of those that fire only when nothing else can happen: patience."""
    eager: frozenset[str] = frozenset({"inbox", "reports"})
    """Kinds of queues that are taken from at once."""
    replaces: bool = False
    """Whether who crashed comes up again."""


@dataclass(slots=True)
class Explored:
    """What a search found."""

    name: str
    states: int = 0
    moves: int = 0
    rests: int = 0
    """States in which nothing was left to happen."""
    deepest: int = 0
    complete: bool = False


@dataclass(slots=True)
class _Open:
    state: State
    moves: list[Move]
    asleep: set[Move]


@dataclass(slots=True)
class Search:
    """One search, depth first."""

    small: SmallWorld
    max_states: int = 5_000_000
    sleeping: bool = True
    """Whether sleep sets are used; without them every order is walked, to the same states."""
    explored: Explored = field(init=False)
    _asleep: dict[int, frozenset[Move]] = field(default_factory=dict)
    """For each state that was met: the moves that need not be made from there, since another path makes them."""
    _path: list[Move] = field(default_factory=list)

    def run(self) -> Explored:
        """Looks at every state that can be reached.

        Raises:
            Violation: an invariant is broken; its notes hold the moves that lead there.
        """
        self.explored = Explored(self.small.name)
        first = self.small.begin()
        self._settle(first)
        stack = [self._met(first, frozenset())]
        while stack and len(self._asleep) < self.max_states:
            top = stack[-1]
            if not top.moves:
                stack.pop()
                if self._path:
                    self._path.pop()
                continue
            move = top.moves.pop()
            state = top.state.copied() if top.moves else top.state
            asleep = frozenset(m for m in top.asleep if m.commutes_with(move))
            if self.sleeping:
                top.asleep.add(move)
            self._path.append(move)
            self._make(state, move)
            stack.append(self._met(state, asleep))
            self.explored.deepest = max(self.explored.deepest, len(stack))
        self.explored.states = len(self._asleep)
        self.explored.complete = not stack
        return self.explored

    def _met(self, state: State, asleep: frozenset[Move]) -> _Open:
        """A state is reached: what there is to do from it, this time."""
        mark = state.fingerprint()
        before = self._asleep.get(mark)
        if before is not None:
            self._asleep[mark] = both = before & asleep
            return _Open(state, sorted(before - asleep), set(both))
        self._asleep[mark] = asleep
        moves = moves_of(state, self.small)
        if all(m.kind in FAULTS for m in moves):
            self.explored.rests += 1
            self._watched(lambda: self.small.at_rest(state))
        return _Open(state, [m for m in moves if m not in asleep], set(asleep))

    def _make(self, state: State, move: Move) -> None:
        self.explored.moves += 1
        self._watched(lambda: make(state, move, self.small))
        self._settle(state)

    def _settle(self, state: State) -> None:
        self._watched(lambda: settle(state, self.small))

    def _watched(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Violation as violation:
            violation.add_note("\n".join(f"{m.kind} {m.where} {m.what}".rstrip() for m in self._path))
            raise


def queues_of(world: World) -> list[Queue]:
    """Every queue that something can be taken from."""
    living = world.living
    local = [q for p in living.values() for q in p.local.values() if q.items]
    halves = [half for w in world.wires.values() for half in (w.up, w.down) if half.items and half.owner in living]
    return [*local, *halves]


def moves_of(state: State, small: SmallWorld) -> list[Move]:
    """All that may come next."""
    world = state.world
    moves = [Move("begin", name) for name in state.down]
    for queue in queues_of(world):
        moves.append(Move("take", queue.name, owner=queue.owner))
        if queue.stream is not None and len(queue.items) > 1 and may_overtake(queue):
            moves.append(Move("end", queue.name, owner=queue.owner))
    timers = [(p.name, timer) for p in world.living.values() for timer in p.timers]
    pauses = [Move("timer", p, t) for p, t in timers if t.partition(" ")[0] in small.timers]
    if not moves:
        moves = pauses or [Move("timer", p, t) for p, t in timers if t in small.last_timers]
    elif state.early:
        moves += [Move("early", m.where, m.what) for m in pauses]
    return moves + [m for m in small.faults(state) if state.faults_left.get(m.kind)]


def may_overtake(queue: Queue) -> bool:
    """Whether the last item is an end that may arrive before the rest: a break, or a client's cancel; not a server's end."""
    end, stream = queue.items[-1], queue.stream
    return isinstance(end, Closed) and stream is not None and (end == UNREACHABLE or queue.owner == stream.server)


def make(state: State, move: Move, small: SmallWorld) -> None:
    """Makes a move."""
    world = state.world
    match move.kind:
        case "take" | "end":
            queue = next(q for q in queues_of(world) if q.name == move.where)
            if move.kind == "end" and queue.stream is not None:
                world.lose(queue)
            world.take(queue)
        case "timer" | "early":
            state.early -= move.kind == "early"
            process = world.process(move.where)
            assert process is not None, "it was there when the move was listed"
            world.fire(process, move.what)
        case "begin":
            state.down.remove(move.where)
            state.mesh.start(move.where)
        case _:
            state.faults_left[move.kind] -= 1
            _fail(state, move, small)


def _fail(state: State, move: Move, small: SmallWorld) -> None:
    world = state.world
    if move.kind == "crash":
        process = world.process(move.where)
        assert process is not None, "it was there when the move was listed"
        world.kill(process)
        if small.replaces:
            state.down.append(move.where)
    elif move.kind == "cut":
        world.cut(next(w.stream for w in world.wires.values() if w.stream.name == move.where))
    else:
        gateway = state.mesh.gateway(0)
        assert gateway is not None, "it takes part in no crash here"
        gateway.cancel(int(move.where))


def settle(state: State, small: SmallWorld) -> None:
    """Lets every thread with a single queue take from it, until none can."""
    world = state.world
    while True:
        ready = [q for q in queues_of(world) if q.stream is None and q.kind in small.eager]
        if not ready:
            return
        world.take(ready[0])
