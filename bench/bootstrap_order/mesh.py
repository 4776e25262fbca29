"""kvmesh on the same traffic: its own DecoderRooms, Scheduler and AppliedLog; only network and worker are virtual.

A decoder tells rank 0 alone, on one ordered control stream; rank 0 writes steps as its service does, and stages apply them.
"""

from collections.abc import Sequence
from functools import partial

from bench.bootstrap_order.outcome import Outcome
from bench.bootstrap_order.traffic import LONGEST_PROMPT, Network, Request
from kvmesh.errors import Fault
from kvmesh.protocol.ids import Generation, Incarnation, PairingKey, PairingNumber, RoomId, StepNumber
from kvmesh.protocol.rooms import Action, Ask, DecoderRooms, RoomEvent
from kvmesh.protocol.rooms import Limits as DecoderLimits
from kvmesh.protocol.scheduler import Limits, Scheduler
from kvmesh.protocol.steps import AppliedLog, Step
from simulator.clock import Clock

GENERATION = Generation(1)
PAGE_SIZE = 256
NUM_PAGES = 1 << 16
"""More than ever needed, on either side: memory is no part of the comparison."""
MAX_ROOMS = 1 << 16


def _decoder() -> DecoderRooms:
    return DecoderRooms(DecoderLimits(NUM_PAGES, PAGE_SIZE, 2 * LONGEST_PROMPT, MAX_ROOMS, MAX_ROOMS))


class Mesh:
    """One pipeline generation and its decoders."""

    def __init__(self, network: Network, requests: Sequence[Request], pp: int) -> None:
        self.outcome = Outcome()
        self.clock = Clock()
        self._network = network
        self._conditions = network.conditions
        self._requests = {r.room: r for r in requests}
        self._decoders = [_decoder() for _ in range(self._conditions.num_decoders)]
        self._keys: list[PairingKey] = [(Incarnation(d + 1), PairingNumber(1)) for d in range(len(self._decoders))]
        in_flight = pp + 1  # as the prefill service's settings have it
        step_tokens = self._conditions.step_tokens
        self.scheduler = Scheduler(Limits(NUM_PAGES, PAGE_SIZE, LONGEST_PROMPT, step_tokens, in_flight, MAX_ROOMS))
        for key in self._keys:
            self.scheduler.pair(key)
        self.logs = [AppliedLog(NUM_PAGES, PAGE_SIZE) for _ in range(pp)]
        self._digests: dict[StepNumber, bytes] = {}
        self._down = [network.hops(f"stage {rank} to {(rank + 1) % pp}") for rank in range(pp)]
        self._up = [network.hops(f"stage {rank + 1} to {rank}") for rank in range(pp - 1)]
        self._free = [0.0] * pp
        self._control = [0.0] * len(self._decoders)
        """When the last message on each control stream arrives."""
        self._kv_missing = dict.fromkeys(self._requests, pp)

    def run(self) -> Outcome:
        """Until nothing is due; then the books must be whole.

        Raises:
            ValueError: pages or rooms are left somewhere, or the logs of two stages differ.
        """
        for request in self._requests.values():
            in_time = request.arrived + self._conditions.timeout_seconds
            if request.reserved is not None and request.reserved <= in_time:
                self.clock.at(request.reserved, partial(self._reserve, request))
            if request.aborted is not None:
                self.clock.at(request.aborted, partial(self._tell, request, RoomEvent.CANCELLED))
        self.clock.run()
        if not self.outcome.divergent:
            self._check()
        return self.outcome

    def _check(self) -> None:
        self.scheduler.check()
        for decoder in self._decoders:
            decoder.check()
        left = [*self.scheduler.states, *(r for d in self._decoders for r in d.states)]
        left += [room for log in self.logs for room in log.rooms]
        if left or not self.scheduler.idle or len({log.digest for log in self.logs}) > 1:
            raise ValueError(f"the mesh did not come to rest: rooms {left}")

    # Decoders.

    def _reserve(self, request: Request) -> None:
        decoder = self._decoders[request.decoder]
        self._act(decoder.open(request.room, GENERATION, prompt_len=request.prompt_len, max_output_len=1))

    def _tell(self, request: Request, event: RoomEvent) -> None:
        self._act(self._decoders[request.decoder].tell(request.room, event))

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            request = self._requests[action.room]
            key = self._keys[request.decoder]
            if action.ask is Ask.ADMIT:
                self._send(request, "ready", partial(self._admit, request, key))
            elif action.ask is Ask.DROP:
                self._send(request, "abort", partial(self.scheduler.drop, key, action.room))
            elif action.ask is Ask.RECEIVED:
                self._send(request, "received", partial(self.scheduler.received, key, action.room))

    def _send(self, request: Request, message: str, event: partial[None]) -> None:
        """On the control stream of a decoder: in order."""
        arrival = self.clock.now + self._network.latency(request.decoder, 0, request.room, message)
        self._control[request.decoder] = max(self._control[request.decoder], arrival)
        self.clock.at(self._control[request.decoder], partial(self._hear, event))

    def _kv_arrived(self, request: Request) -> None:
        """From one more stage. Decoding is not modelled: a room that is complete has done its part."""
        self._kv_missing[request.room] -= 1
        if self._kv_missing[request.room] == 0:
            self._tell(request, RoomEvent.COMPLETE)
            self._tell(request, RoomEvent.FINISHED)

    # Rank 0.

    def _admit(self, request: Request, key: PairingKey) -> None:
        self.scheduler.admit(key, request.room, prompt_len=request.prompt_len, cached_len=0)

    def _hear(self, event: partial[None]) -> None:
        event()
        self._write_steps()

    def _applied(self, number: StepNumber) -> None:
        self.scheduler.applied(number)
        self._write_steps()

    def _write_steps(self) -> None:
        while (step := self.scheduler.next_step()) is not None:
            self._queue(0, step)

    # Every stage.

    def _queue(self, rank: int, step: Step) -> None:
        """Behind what the stage's worker has."""
        begin = max(self._free[rank], self.clock.now)
        self._free[rank] = begin + self._conditions.step_cost(step.num_tokens)
        self.clock.at(begin, partial(self._begin, rank, step))
        self.clock.at(self._free[rank], partial(self._end, rank, step))

    def _begin(self, rank: int, step: Step) -> None:
        if rank == 0:
            self.outcome.step_began(self.clock.now, [w.room for w in step.work])
        try:
            self.logs[rank].apply(step)
        except Fault:
            self._diverged(step)
        if self._digests.setdefault(step.number, self.logs[rank].digest) != self.logs[rank].digest:
            self._diverged(step)

    def _diverged(self, step: Step) -> None:
        rooms: list[RoomId] = [*(e.room for e in step.entries), *(w.room for w in step.work)]
        self.outcome.divergent.update(rooms)
        self.outcome.stopped.update(rooms)

    def _end(self, rank: int, step: Step) -> None:
        for work in step.work:
            request = self._requests[work.room]
            if work.end == request.prompt_len:
                kv = self._network.latency(request.decoder, rank, work.room, "kv")
                self.clock.after(kv, partial(self._kv_arrived, request))
        if rank == 0:
            self.scheduler.applied_here(step.number)
            self._write_steps()
        if rank + 1 < len(self.logs):
            self.clock.at(self._down[rank].arrival(self.clock.now), partial(self._queue, rank + 1, step))
        else:
            self._acknowledge(step.number)

    def _acknowledge(self, number: StepNumber) -> None:
        """`applied` goes up the chain, stage by stage."""
        time = self.clock.now
        for edge in reversed(self._up):
            time = edge.arrival(time)
        self.clock.at(time, partial(self._applied, number))
