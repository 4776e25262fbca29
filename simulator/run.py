"""Runs a plan on virtual time: the mesh comes up, clients come, things go wrong, and in the end all must be well.

Returns what it saw; raises at the first broken invariant.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial

from kvmesh.protocol.rooms import RoomState
from simulator.decoder import Call, DecoderProcess
from simulator.gateway import Wish
from simulator.latency import Latency
from simulator.mesh import REGISTRY, Mesh
from simulator.messages import Closed
from simulator.plan import Fault, Plan, latencies_of, slowed
from simulator.process import Process
from simulator.rest import check_ended, check_idle, check_whole
from simulator.stage import StageProcess
from simulator.timed import TimedPace
from simulator.violation import Violation
from simulator.witness import Witness
from simulator.world import World

RECOVERY_SECONDS = 5.0
"""After the last fault everyone serves again within this, and TRIPS mean messages: leases expire (2 s), pauses are over."""
TRIPS = 60
"""To register sixteen stages, one after the other, and to pair."""
LOOK_SECONDS = 0.5
HUNG_SHARE = 1.5
"""Of the watchdog's time: by then a worker that hangs has ended its generation."""
UNTIL_A_ROOM_SECONDS = 4.0
"""A fault that needs a room waits so long for one."""
PATIENCE_SECONDS = 10.0
"""See ClientBooks: the longest queue of steps in a plan is shorter."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a run saw."""

    events: int
    faults: Counter[str]
    ends: Counter[str]
    """Requests, by the reason they ended; empty for well."""


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
        witness = self.world.witness
        witness.calm = all(f.target == REGISTRY and f.kind not in ("cut", "apart") for f in plan.faults)
        witness.patience_seconds = PATIENCE_SECONDS + TRIPS * self._mean_seconds
        clock.at(LOOK_SECONDS, self._look)
        last_deadline = max((w.arrives + w.deadline_seconds for w in plan.wishes), default=0.0)
        clock.run(last_deadline + LOOK_SECONDS)
        check_ended(self.mesh)
        clock.run(max(plan.quiet_at, last_deadline) + self._recovery_seconds + LOOK_SECONDS)
        check_whole(self.mesh)
        check_idle(self.mesh)
        books = witness.requests.values()
        return Seen(clock.num_events, self.world.faults, Counter(b.end or "" for b in books))

    @property
    def _mean_seconds(self) -> float:
        usual = Latency.parse(self.plan.latency)
        return (slowed(usual) if self.plan.slow else usual).mean

    @property
    def _recovery_seconds(self) -> float:
        return RECOVERY_SECONDS + TRIPS * self._mean_seconds

    def _look(self) -> None:
        """Everyone serves, once nothing has been wrong for long enough."""
        now, plan = self.pace.now, self.plan
        self.pace.clock.after(LOOK_SECONDS, self._look)
        begun = [f.at + f.lasts for f in plan.faults if f.at <= now] + [at for _, at in plan.starts if at <= now]
        if now > max(begun, default=0.0) + self._recovery_seconds:
            check_whole(self.mesh)
        limit = HUNG_SHARE * plan.shape.watchdog_seconds
        for stage in [p for p in self.world.living.values() if isinstance(p, StageProcess) and not p.frozen]:
            if stage.local["steps"].items and now - max(stage.moved_at.values()) > limit and stage.part is not None:
                raise Violation(6, f"{stage.name} has hung for {limit:g} s, and its generation goes on")

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
        witness, clock = self.world.witness, self.pace.clock
        witness.note(process, f"fault: {fault}")
        witness.disturbed_at = self.pace.now
        clock.after(fault.lasts, self._mended)
        if fault.kind not in ("cut", "again"):
            self.world.faults[fault.kind] += 1
        match fault.kind:
            case "kill":
                self._kill(fault.target)
                clock.after(fault.lasts, partial(self._start_again, fault.target))
            case "stop":
                process.frozen = True
                self._silence(fault)
                clock.after(fault.lasts, partial(self._go_on, process))
            case "hang":
                process.hung = process.threads[fault.pick % len(process.threads)]
                clock.after(fault.lasts, partial(self._go_on, process))
            case "cut":
                streams = sorted(self.world.streams_of(process.incarnation), key=lambda s: s.number)
                if streams:
                    self.world.faults["cut"] += 1
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

    def _mended(self) -> None:
        self.world.witness.disturbed_at = self.pace.now

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
        process.frozen, process.hung = False, ()
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
                self.world.cut(wire.stream, silent=True)

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
        """An Admit of a decoder, or a gateway's Generate, comes a second time, at once or after its room has ended."""
        decoder = self.world.process(fault.target)
        calls = sorted(decoder.calls.items()) if isinstance(decoder, DecoderProcess) else []
        if fault.pick % 2 and isinstance(decoder, DecoderProcess):
            # An Admit comes again: of a room that has its pages, else none came before.
            calls = [(r, call) for r, call in calls if decoder.books.state_of(r) is not RoomState.WAITING]
        if calls:
            call = calls[fault.pick % len(calls)][1]
            self.pace.clock.after(fault.lasts, partial(self._repeat, fault, call))
        elif self.pace.now < fault.at + UNTIL_A_ROOM_SECONDS:
            self.pace.clock.after(LOOK_SECONDS / 10, partial(self._again, fault))

    def _repeat(self, fault: Fault, call: Call) -> None:
        decoder = self.world.process(fault.target)
        if not isinstance(decoder, DecoderProcess) or decoder.incarnation != call.generate.to:
            return
        self.world.faults["again"] += 1
        if fault.pick % 2:
            decoder.send(call.pair.control, decoder.admit_of(call.generate))
        elif (gateway := self.world.living.get(call.stream.client)) is not None:
            stream = gateway.dial(decoder.address, "generate", call.generate)
            self.pace.clock.after(1.0, partial(gateway.close, stream, Closed("Cancelled", "cancelled")))
