"""The registry's core among played processes: stages that live as the prefill service does, streams that carry messages in
order, and faults. Whatever may happen next is a list; a test chooses from it, so every order can be tried and repeated.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from registry_peers import check_roster, descriptor

from kvmesh.protocol.directives import Action, Admitted, Directive, LinkNext, Refuse, Tell, WaitFor, Withdrawn
from kvmesh.protocol.ids import Generation, Incarnation, LeaseId, Rank, Term
from kvmesh.protocol.members import Member, Stage
from kvmesh.protocol.registry import Registry, RegistryLimits

MAX_STEPS = 2000
"""Far more than any registration of four stages takes."""


@dataclass
class Stream:
    """One lease stream of one process: what is on the way, in order, and whether either end has closed it."""

    number: LeaseId
    term: Term
    up: deque[Stage | Generation] = field(default_factory=deque)
    down: deque[Directive] = field(default_factory=deque)
    closed_below: bool = False
    closed_above: bool = False


@dataclass
class Process:
    """One stage process, life after life."""

    rank: int
    incarnation: Incarnation
    alive: bool = True
    seen: int = 0
    """Highest generation it was ever part of."""
    term: int = 0
    lease: Stream | None = None
    generation: int = 0
    serving: bool = False
    admitted: int = 0
    """What this life's lease admitted it to."""
    dialling: "tuple[Process, Generation] | None" = None
    """Told to link; the stage behind has not answered."""
    next: "Process | None" = None
    """Its step stream to rank + 1 stands."""
    before: "Process | None" = None
    """The step stream of rank - 1 to it stands."""

    @property
    def held(self) -> int:
        """What it says it holds when its lease is lost."""
        return self.generation if self.serving else 0


class World:
    """One pipeline's processes and a registry."""

    def __init__(self, pp_size: int, *, hasty: bool = False) -> None:
        """Args:
        hasty: a last rank that waits for its own admission may refuse a step stream at any time, not only when all
            else is quiet.
        """
        self.pp_size, self.hasty = pp_size, hasty
        self.terms, self.leases, self.incarnations = count(1), count(1), count(1)
        self.registry = self._new_registry()
        self.streams: dict[LeaseId, Stream] = {}
        self.processes: list[Process] = []
        self.whole_once: set[int] = set()
        """Generations whose rank 0 served."""
        self.ended_by_registry: set[int] = set()
        """Of those: withdrawn although they had been whole."""
        self.admissions: list[tuple[int, int]] = []
        """(rank, generation) in the order the registry told them."""

    # What a test may do at any time.

    def start(self, rank: int) -> Process:
        """A new process comes up and registers."""
        process = Process(rank, Incarnation(next(self.incarnations)))
        self.processes.append(process)
        self._begin(process)
        return process

    def crash(self, process: Process) -> None:
        """A process is gone at once; everyone else hears of it from streams, each at its time."""
        process.alive = False
        if process.lease is not None:
            process.lease.closed_below = True

    def cut(self, process: Process) -> None:
        """The network breaks a lease stream; each end notices at its time."""
        if process.lease is not None:
            process.lease.closed_above = process.lease.closed_below = True

    def restart_registry(self) -> None:
        """Another registry with the next term; every lease stream is cut."""
        self.registry = self._new_registry()
        for stream in self.streams.values():
            stream.closed_above = True
        self.streams = {}

    def process(self, rank: int) -> Process | None:
        """The oldest living process of a rank."""
        return next((p for p in self.processes if p.alive and p.rank == rank), None)

    # What may happen next.

    def steps(self) -> list[Callable[[], None]]:
        """Everything that may happen next, in one order."""
        possible: list[Callable[[], None]] = []
        for stream in list(self.streams.values()):
            if stream.up:
                possible.append(lambda s=stream: self._deliver_up(s))  # type: ignore[misc]
            elif stream.closed_below:
                possible.append(lambda s=stream: self._end_above(s))  # type: ignore[misc]
        for process in [p for p in self.processes if p.alive]:
            lease = process.lease
            if lease is not None and lease.down:
                possible.append(lambda p=process: self._deliver_down(p))  # type: ignore[misc]
            elif lease is not None and lease.closed_above:
                possible.append(lambda p=process: self._lose_lease(p))  # type: ignore[misc]
            if process.dialling is not None and self._knows(*process.dialling):
                possible.append(lambda p=process: self._link(p))  # type: ignore[misc]
            if process.next is not None and not self._stands(process, process.next):
                possible.append(lambda p=process: self._end_life(p))  # type: ignore[misc]
            if process.before is not None and not self._stands(process.before, process):
                possible.append(lambda p=process: self._end_life(p))  # type: ignore[misc]
        if not possible or self.hasty:
            late = [p for p in self.processes if p.alive and p.dialling is not None and not self._knows(*p.dialling)]
            possible += [lambda p=process: self._link(p) for process in late]  # type: ignore[misc]
        return possible

    def settle(self, choose: Callable[[int], int] = lambda _: 0, steps: int | None = None) -> int:
        """Lets happen what may, for so many steps or until nothing can; how many there were."""
        for done in range(MAX_STEPS if steps is None else steps):
            possible = self.steps()
            if not possible:
                return done
            possible[choose(len(possible))]()
            self.check()
        assert steps is not None, "it never comes to rest"
        return steps

    # What must hold.

    def check(self) -> None:
        """After every step."""
        for roster in self.registry.mesh.rosters.values():
            check_roster(roster)
        assert not self.ended_by_registry, "the end of a generation comes from the chain, never from the registry"

    def check_whole(self) -> None:
        """When all is quiet and every rank has a process."""
        roster = self.registry.mesh.rosters["p0"]
        chain = [self.process(rank) for rank in range(self.pp_size)]
        assert roster.whole, [(s.state.value, s.generation) for s in roster.seats]
        holders = {s.holder.member.incarnation for s in roster.seats if s.holder is not None}
        serving = [p for p in self.processes if p.alive and p.incarnation in holders]
        assert {p.generation for p in serving} == {roster.whole}
        assert all(p.serving for p in serving)
        assert len(serving) == len(chain)

    # Processes.

    def _begin(self, process: Process) -> None:
        process.generation, process.serving, process.admitted = 0, False, 0
        process.dialling = process.next = process.before = None
        self._register(process)

    def _register(self, process: Process) -> None:
        stream = Stream(LeaseId(next(self.leases)), self.registry.term)
        self.streams[stream.number] = stream
        process.lease = stream
        process.term = self.registry.term
        stream.up.append(
            Stage(
                stream.number,
                Member(process.incarnation, f"host{process.incarnation}:1"),
                "p0",
                Rank(process.rank),
                self.pp_size,
                descriptor(process.rank, self.pp_size),
                Term(process.term),
                Generation(process.held),
            )
        )

    def _end_life(self, process: Process) -> None:
        """It closes everything and begins anew; the ends of its streams are noticed elsewhere."""
        assert process.lease is not None
        process.lease.closed_below = True
        self._begin(process)

    def _lose_lease(self, process: Process) -> None:
        assert process.lease is not None
        process.lease.closed_below = True
        if process.held:
            self._register(process)
        else:
            self._end_life(process)

    def _deliver_down(self, process: Process) -> None:
        assert process.lease is not None
        match process.lease.down.popleft():
            case LinkNext(peer, generation):
                if process.dialling is not None or process.next is not None:
                    self._end_life(process)
                else:
                    behind = next(p for p in self.processes if p.incarnation == peer.incarnation)
                    process.dialling = (behind, generation)
            case Admitted(generation):
                process.admitted = generation
                if process.rank == 0 and not process.serving:
                    process.generation, process.serving, process.seen = generation, True, generation
                    self.whole_once.add(generation)
            case Withdrawn(generation, _):
                if generation in self.whole_once:
                    self.ended_by_registry.add(generation)
                self._end_life(process)
            case WaitFor():
                pass

    def _knows(self, behind: Process, generation: Generation) -> bool:
        """Whether a stage can answer now; the last rank may have to hear of its own admission first."""
        return not behind.alive or behind.rank != self.pp_size - 1 or behind.admitted >= generation

    def _link(self, process: Process) -> None:
        assert process.dialling is not None
        assert process.lease is not None
        (behind, generation), process.dialling = process.dialling, None
        if not self._accepts(behind, process, generation):
            self._end_life(process)
            return
        process.generation, process.next = generation, behind
        process.lease.up.append(generation)

    def _accepts(self, process: Process, before: Process, generation: Generation) -> bool:
        """Whether a stage takes a step stream: only under the generation of its own life. The last rank knows it from its
        admission, the others from their order to link."""
        if process.alive and process.serving and generation > process.generation:
            self._end_life(process)  # a higher generation ends the one it serves
            return False
        own = process.admitted if process.rank == self.pp_size - 1 else process.generation
        if not process.alive or process.serving or generation <= process.seen or own != generation:
            return False
        process.generation, process.serving, process.seen, process.before = generation, True, generation, before
        return True

    def _stands(self, before: Process, behind: Process) -> bool:
        return before.alive and behind.alive and before.next is behind and behind.before is before

    # The registry.

    def _new_registry(self) -> Registry:
        return Registry(Term(next(self.terms)), RegistryLimits(), now=0.0)

    def _deliver_up(self, stream: Stream) -> None:
        message = stream.up.popleft()
        if isinstance(message, Stage):
            self._carry_out(self.registry.register_stage(message, 0.0))
        else:
            self._carry_out(self.registry.linked(stream.number, message, 0.0))

    def _end_above(self, stream: Stream) -> None:
        del self.streams[stream.number]
        self._carry_out(self.registry.lease_lost(stream.number))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Tell(number, directive) if number in self.streams:
                    self.streams[number].down.append(directive)
                    if isinstance(directive, Admitted):
                        self.admissions.append((self._rank_of(number), directive.generation))
                case Refuse(number, _) if number in self.streams:
                    self.streams[number].closed_above = True

    def _rank_of(self, number: LeaseId) -> int:
        lease = self.registry.mesh.leases.get(number)
        assert lease is not None
        assert isinstance(lease.member, Stage)
        return lease.member.rank
