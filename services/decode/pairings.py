"""All pairings of this decoder: one for each whole pipeline that the registry names, made again when one is lost.

Called by the registration (the live list) and the servicer (the pairing of a room). Numbers rise for the life of the process.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvmesh.errors import KvmeshError, Misfit, Unavailable
from kvmesh.protocol.ids import Generation, PairingNumber, short
from kvmesh.protocol.pairings import PairingBook
from kvmesh.rpc.retry import reconnect_policy
from kvmesh.telemetry import logs, metrics
from kvmesh.v1.bootstrap_pb2 import WholePipeline
from services.decode.identity import DecoderIdentity
from services.decode.in_flight import InFlight
from services.decode.links import PairingStreams, Told
from services.decode.records import Received
from services.decode.segments import Segments

log = logs.get(__name__)


class Pairings:
    """Standing pairings by generation, and the tasks that make and hold them."""

    def __init__(
        self,
        own: DecoderIdentity,
        told: Told,
        lost: Callable[[Generation, KvmeshError], None],
        changed: Callable[[], None],
    ) -> None:
        """Args:
        told: whom the streams tell of frames and refusals; that a pairing stands or falls they tell this object.
        lost: told when a pairing ends, with why.
        changed: told when the set of standing pairings changed.
        """
        self._own = own
        self._told = replace(told, standing=self._stands, fallen=self._falls)
        self._lost = lost
        self._changed = changed
        self._book = PairingBook()
        self._in_flight, self._offers = InFlight(own.in_flight_bytes), Segments(own.shared_cells)
        self._streams: dict[Generation, PairingStreams] = {}
        """Those that stand."""
        self._tasks: dict[Generation, asyncio.Task[None]] = {}

    @property
    def standing(self) -> Sequence[Generation]:
        """Generations whose pairing stands."""
        return self._book.standing

    def by_number(self, number: PairingNumber) -> PairingStreams | None:
        """The standing pairing of that number, if there is one."""
        return next((p for p in self._streams.values() if p.number == number), None)

    def credit(self, dealt: Received) -> None:
        """The copier dealt with a frame; a pairing that ended needs no credit."""
        if dealt.cell is None:
            self._in_flight.dealt(dealt.num_bytes)
        pairing = self.by_number(dealt.pairing)
        if pairing is not None:
            pairing.credit(dealt)

    def require(self, generation: Generation) -> PairingStreams:
        """The pairing of a room.

        Raises:
            Fenced: there is none for this generation.
        """
        self._book.require(generation)
        return self._streams[generation]

    def break_off(self, number: PairingNumber, error: KvmeshError) -> None:
        """A link of that pairing carried what it must not: the pairing ends."""
        pairing = self.by_number(number)
        if pairing is not None:
            pairing.break_off(error)

    def stop(self) -> None:
        """Ends every pairing: the process leaves."""
        for task in self._tasks.values():
            task.cancel()

    async def run(self, tasks: asyncio.TaskGroup, named: asyncio.Queue[Sequence[WholePipeline]]) -> None:
        """Follows the live list: begins a pairing for each generation that is new; stops trying for one no longer named."""
        while True:
            pipelines = {Generation(p.generation): p for p in await named.get()}
            begin, give_up = self._book.named(pipelines.keys())
            for generation in give_up:
                self._tasks.pop(generation).cancel()
            for generation in begin:
                self._tasks[generation] = tasks.create_task(self._keep(pipelines[generation]))

    async def _keep(self, pipeline: WholePipeline) -> None:
        """Pairs with one generation, and again after a loss, until it is over or can't fit."""
        generation = Generation(pipeline.generation)

        def may_pair_again(error: BaseException) -> bool:
            fits = isinstance(error, KvmeshError) and not isinstance(error, Misfit)
            return fits and self._book.may_pair_again(generation)

        trouble = logs.OnChange(log)
        try:
            async for attempt in reconnect_policy(may_pair_again):
                with attempt:
                    await self._pair_once(pipeline, trouble)
        except Misfit as error:
            log.error("can't pair with %s: %s", pipeline.pipeline, error.message)
        except KvmeshError as error:
            log.info("generation %s is over: %s", short(generation), error.message)
        finally:
            if self._tasks.get(generation) is asyncio.current_task():  # not its successor
                del self._tasks[generation]
                self._book.over(generation)

    async def _pair_once(self, pipeline: WholePipeline, trouble: logs.OnChange) -> None:
        generation = Generation(pipeline.generation)
        streams = PairingStreams(
            pipeline, self._book.next_number(), self._own, self._told, self._in_flight, self._offers
        )
        error: KvmeshError = Unavailable(f"the pairing with {pipeline.pipeline} ended", reason="pairing_lost")
        try:
            await streams.run()
        except KvmeshError as cause:
            error, why = cause, f"{cause.message} ({cause.reason})"
            if streams.stood:
                log.info("pairing %d with %s ended: %s", streams.number, pipeline.pipeline, why)
                trouble.clear()
            elif not isinstance(cause, Misfit):
                trouble.warning(f"no pairing with {pipeline.pipeline}: {why}")
            raise
        finally:
            self._falls(streams)
            if self._book.lost(generation, streams.number):
                metrics.PAIRINGS_ENDED_TOTAL.labels(reason=error.label).inc()
                self._lost(generation, error)

    def _falls(self, pairing: PairingStreams) -> None:
        """No room is given to it any more. Repeated, or it never stood: nothing."""
        if self._book.falls(pairing.generation, pairing.number):
            del self._streams[pairing.generation]
            metrics.PAIRINGS_STANDING.set(len(self.standing))
            self._changed()

    def _stands(self, pairing: PairingStreams) -> None:
        self._book.stands(pairing.generation, pairing.number)
        self._streams[pairing.generation] = pairing
        metrics.PAIRINGS_TOTAL.inc()
        metrics.PAIRINGS_STANDING.set(len(self.standing))
        self._changed()
