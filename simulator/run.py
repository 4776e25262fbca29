"""Runs a plan on virtual time: the mesh comes up, clients come, things go wrong, and in the end all must be well.

Returns what it saw; raises at the first broken invariant.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial

from simulator.decoder import DecoderProcess
from simulator.gateway import Wish
from simulator.mesh import REGISTRY, Mesh
from simulator.messages import Closed
from simulator.plan import Fault, Plan, latencies_of
from simulator.process import Process
from simulator.rest import check_ended, check_idle, check_whole
from simulator.timed import TimedPace
from simulator.witness import Witness
from simulator.world import World

SETTLING_SECONDS = 12.0
"""After the last request's end: for leases to expire (2 s), generations to form and decoders to pair, whatever the latency."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a run saw."""

    events: int
    faults: Counter[str]
    ends: Counter[str]
    """Requests, by the reason they ended; empty for well."""
    attempts: Counter[int]


class Run:
    """One run."""

    def __init__(self, plan: Plan, *, noting: bool = True) -> None:
        self.plan = plan
        self.pace = TimedPace(plan.seed, latencies_of(plan))
        self.world = World(self.pace, Witness())
        self.world.witness.noting = noting
        self.mesh = Mesh(self.world, plan.shape)

    def run(self) -> Seen:
        """Runs it to its end.

        Raises:
            Violation: an invariant is broken.
        """
        plan, clock = self.plan, self.pace.clock
        starts = dict(plan.starts)
        for name in sorted(self.mesh.names, key=lambda n: n != REGISTRY):
            clock.at(starts.get(name, 0.0), partial(self.mesh.start, name))
        for wish in plan.wishes:
            self.world.witness.arrived(wish.number)
            clock.at(wish.arrives, partial(self._ask, wish))
        for fault in plan.faults:
            clock.at(fault.at, partial(self._inject, fault))
        last_deadline = max((w.arrives + w.deadline_seconds for w in plan.wishes), default=0.0)
        clock.run(max(plan.quiet_at, last_deadline) + 0.001)
        check_ended(self.mesh)
        clock.run(max(plan.quiet_at, self.pace.now) + SETTLING_SECONDS)
        check_whole(self.mesh)
        check_idle(self.mesh)
        books = self.world.witness.requests.values()
        return Seen(clock.num_events, self.world.faults, Counter(b.end or "" for b in books), Counter())

    def _ask(self, wish: Wish) -> None:
        gateway = self.mesh.gateway(wish.gateway)
        if gateway is None or gateway.frozen:
            self.world.witness.answered(self, wish, "unreachable")
        else:
            gateway.ask(wish)

    @property
    def now(self) -> float:
        """For the timeline: the client's own view."""
        return self.pace.now

    name = "client"

    # Faults.

    def _inject(self, fault: Fault) -> None:
        process = self.world.process(fault.target)
        if process is None or process.frozen or process.hung:
            return  # gone, or out of order, already
        self.world.witness.note(process, f"fault: {fault}")
        self.world.faults[fault.kind] += 1
        clock = self.pace.clock
        match fault.kind:
            case "kill":
                self._kill(fault.target)
                clock.after(fault.lasts, partial(self._start_again, fault.target))
            case "stop":
                process.frozen = True
                self._silence(fault)
                clock.after(fault.lasts, partial(self._go_on, process))
            case "hang":
                process.hung = True
                clock.after(fault.lasts, partial(self._go_on, process))
            case "cut":
                streams = sorted(self.world.streams_of(process.incarnation), key=lambda s: s.number)
                if streams:
                    self.world.cut(streams[fault.pick % len(streams)])
            case "apart":
                self.world.apart.add(frozenset((fault.target, fault.other)))
                self._silence(fault)
                clock.after(fault.lasts, partial(self._together, fault))
            case "stale registry":
                process.frozen = True
                self._silence(fault)
                self.mesh.start(REGISTRY)
                clock.after(fault.lasts, partial(self._wake_stale, process))
            case "again":
                self._again(fault)

    def _kill(self, name: str) -> None:
        process = self.world.process(name)
        assert process is not None, "it was a moment ago"
        open_there = list(getattr(process, "open", {}).values())
        self.world.kill(process)
        for served in open_there:
            self.world.witness.answered(self, served.wish, "unreachable")

    def _start_again(self, name: str) -> None:
        if name not in self.world.named:
            self.mesh.start(name)

    def _go_on(self, process: Process) -> None:
        process.frozen = process.hung = False
        self.pace.released()

    def _together(self, fault: Fault) -> None:
        self.world.apart.discard(frozenset((fault.target, fault.other)))
        self.pace.released()

    def _silence(self, fault: Fault) -> None:
        """Pings go unanswered: after the watchdog's time both ends of a silent stream have given up, again and again."""
        watchdog = self.plan.shape.watchdog_seconds
        beats = int(fault.lasts / watchdog)
        for beat in range(1, beats + 1):
            self.pace.clock.after(beat * watchdog, partial(self._give_up, fault))

    def _give_up(self, fault: Fault) -> None:
        living = self.world.living
        for wire in list(self.world.wires.values()):
            ends = [living[i] for i in (wire.stream.client, wire.stream.server) if i in living]
            names, frozen = {p.name for p in ends}, any(p.frozen for p in ends)
            silent = {fault.target, fault.other} == names if fault.other else fault.target in names and frozen
            if silent:
                self.world.cut(wire.stream)

    def _wake_stale(self, stale: Process) -> None:
        """A registry that was replaced goes on; for a moment the name leads to it."""
        stale.frozen = False
        self.pace.released()
        if not stale.alive:
            return
        self.world.addresses[REGISTRY] = stale.incarnation
        self.pace.clock.after(1.0, partial(self._end_stale, stale))

    def _end_stale(self, stale: Process) -> None:
        self.world.kill(stale)
        living = self.world.named.get(REGISTRY)
        if living is not None:
            self.world.addresses[REGISTRY] = living
        else:
            self.mesh.start(REGISTRY)

    def _again(self, fault: Fault) -> None:
        """A decoder's last Admit, or a gateway's Generate, comes a second time."""
        decoder = self.world.process(fault.target)
        assert isinstance(decoder, DecoderProcess)
        calls = sorted(decoder.calls.items())
        if not calls:
            return
        call = calls[fault.pick % len(calls)][1]
        if fault.pick % 2:
            decoder.send(call.pair.control, decoder.admit_of(call.generate))
        else:
            gateway = self.world.living[call.stream.client]
            stream = gateway.dial(decoder.address, "generate", call.generate)
            self.pace.clock.after(1.0, partial(gateway.close, stream, Closed("Cancelled", "cancelled")))
