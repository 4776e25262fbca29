"""A stage's part in one generation: steps in, steps on, `applied` back, KV out to the links. As services/prefill/generation.py.

Called by the stage's process, which owns the step streams and ends its life by what is raised here.
"""

from dataclasses import dataclass, field

from kvmesh.errors import Fault, Fenced
from kvmesh.protocol.chain import Chain
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import Generation, Incarnation, PairingKey, PairingNumber, StepNumber
from kvmesh.protocol.links import replaced_by
from kvmesh.protocol.members import Load
from kvmesh.protocol.scheduler import Limits
from kvmesh.protocol.steps import Step
from simulator.head import Head
from simulator.messages import Applied, Closed, FirstToken, Forwarded, Frame, Hello, Message, Welcome
from simulator.process import Process, Stream
from simulator.stage_worker import Copied, Copy, Failed, RunStep, StepDone


@dataclass(slots=True)
class Part:
    """One stage in one generation."""

    number: Generation
    chain: Chain
    head: Head | None = None
    """Rank 0's, once it was admitted."""
    links: dict[PairingKey, Stream] = field(default_factory=dict)
    newest: dict[Incarnation, PairingNumber] = field(default_factory=dict)

    # Steps.

    def run(self, stage: Process, step: Step) -> None:
        """Hands a step to the worker."""
        self.chain.received += 1
        stage.queue("steps", RunStep(self.number, step))

    def reported(self, stage: Process, report: object, before: Stream | None, behind: Stream | None) -> None:
        """The worker did something.

        Raises:
            Fault: it could not: the generation is over.
        """
        match report:
            case StepDone():
                self._step_done(stage, report, before, behind)
            case Copied(_, key, Frame() as frame):
                stage.send(self.links.get(key), frame)
            case Failed(_, reason):
                raise Fault(f"{stage.name} could not apply a step", reason=reason)
            case _:
                pass

    def _step_done(self, stage: Process, done: StepDone, before: Stream | None, behind: Stream | None) -> None:
        for key, room, token in done.sampled:
            stage.send(self.links.get(key), FirstToken(room, key[1], token))
        for span in done.computed:
            if span.key in self.links:
                stage.queue("copies", Copy(self.number, span))
        if self.head is not None:
            self.head.scheduler.applied_here(done.step.number)
        confirmed = self.chain.applied_here(done.step.number, done.digest, stage.now)
        stage.send(behind, Forwarded(done.step))
        if confirmed:
            self._confirmed(stage, before)
        else:
            self._pump(stage)

    def heard_behind(self, stage: Process, message: Message, before: Stream | None) -> None:
        """The rank behind confirms, or shows that it lives.

        Raises:
            Fault: it confirms what it should not.
        """
        if isinstance(message, Applied):
            self.chain.applied_behind(message.number, message.digest, stage.now)
            self._confirmed(stage, before)
        else:
            self.chain.heard(stage.now)

    def _confirmed(self, stage: Process, before: Stream | None) -> None:
        number = StepNumber(self.chain.confirmed.num_steps - 1)
        if self.head is not None:
            self.head.scheduler.applied(number)
            self._pump(stage)
        else:
            stage.send(before, Applied(number, self.chain.confirmed.digest))

    def _pump(self, stage: Process) -> None:
        if self.head is not None:
            for step in self.head.steps(stage):
                self.run(stage, step)

    # Decoders.

    def open_pairing(self, stage: Process, stream: Stream, hello: Hello, shard: ShardSpan) -> None:
        """A decoder opens a link, or the control stream.

        Raises:
            Fenced: a newer pairing stands, or this one has no link to rank 0.
        """
        key = (hello.decoder, hello.pairing)
        if stream.kind == "link":
            for older in replaced_by(key, self.links.keys(), self.newest):
                stage.close(self.links.pop(older), Closed("Unavailable", "pairing_replaced"))
            self.links[key] = stream
            stage.world.witness.link_opened(stage, key)
            stage.send(stream, Welcome(self.chain.rank, shard))
            return
        if self.head is None or key not in self.links:
            raise Fenced("this pairing has no link to rank 0")
        self.head.pair(stage, stream, key)
        stage.world.witness.control_opened(stage, key)
        self._pump(stage)

    def heard_decoder(self, stage: Process, stream: Stream, message: Message) -> None:
        """A message on a control stream.

        Raises:
            Fault: see Scheduler.received.
        """
        if self.head is not None:
            self.head.heard(stage, stream, message)
            self._pump(stage)

    def lost_decoder(self, stage: Process, stream: Stream) -> None:
        """A link or a control stream is over."""
        for key in [k for k, link in self.links.items() if link is stream]:
            del self.links[key]
        if self.head is not None:
            self.head.unpair(stream)
            self._pump(stage)

    def close(self, stage: Process, end: Closed) -> None:
        """The generation is over: rank 0's last words, then every decoder's streams."""
        controls: list[Stream] = []
        if self.head is not None:
            self.head.last_words(stage)
            controls = list(self.head.controls.values())
        for stream in [*controls, *self.links.values()]:
            stage.close(stream, end)

    def load(self, limits: Limits) -> Load:
        """What a heartbeat tells."""
        if self.head is None:
            return Load(free_pages=limits.num_pages)
        scheduler = self.head.scheduler
        return Load(
            waiting_rooms=scheduler.waiting_rooms,
            running_rooms=scheduler.running_rooms,
            free_pages=scheduler.free_pages,
            queued_tokens=scheduler.queued_tokens,
        )
