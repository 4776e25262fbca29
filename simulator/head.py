"""Rank 0's half of a generation: rooms come in over control streams, decisions go out as steps. As services/prefill/head.py.

Called by the stage's process; it runs the steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvmesh.errors import KvmeshError
from kvmesh.protocol.ids import PairingKey, RoomId
from kvmesh.protocol.request import LOST_STEP
from kvmesh.protocol.scheduler import Scheduler
from kvmesh.protocol.steps import Sampling, Step
from simulator.messages import Admit, Drop, Message, Opened, Received, RoomRefused
from simulator.process import Process, Stream


@dataclass(slots=True)
class Head:
    """The one that decides."""

    scheduler: Scheduler
    controls: dict[PairingKey, Stream] = field(default_factory=dict)
    prompts: dict[RoomId, Admit] = field(default_factory=dict)

    def pair(self, stage: Process, stream: Stream, key: PairingKey) -> None:
        """A control stream opens.

        Raises:
            Fenced, Unavailable: see Scheduler.pair.
        """
        self._forget(self.scheduler.pair(key))
        self.controls[key] = stream
        stage.send(stream, Opened())

    def unpair(self, stream: Stream) -> None:
        """A control stream ended: its rooms are dropped. Another stream: nothing."""
        for key in [k for k, control in self.controls.items() if control is stream]:
            del self.controls[key]
            self._forget(self.scheduler.unpair(key))

    def heard(self, stage: Process, stream: Stream, message: Message) -> None:
        """A decoder's word.

        Raises:
            Fault: see Scheduler.received.
        """
        key = next((k for k, control in self.controls.items() if control is stream), None)
        if key is None:
            return
        match message:
            case Admit():
                self._admit(stage, stream, key, message)
            case Drop(room):
                self.scheduler.drop(key, room)
                self._forget([room])
            case Received(room):
                self.scheduler.received(key, room)

    def _admit(self, stage: Process, stream: Stream, key: PairingKey, admit: Admit) -> None:
        try:
            self.scheduler.admit(
                key,
                admit.room,
                prompt_len=admit.prompt_len,
                cached_len=0,
                sampling=Sampling(seed=admit.request),  # what stands for the prompt travels in the log
                output_index=admit.output_index,
            )
        except KvmeshError as error:
            stage.send(stream, RoomRefused(admit.room, error.reason))
        else:
            self.prompts[admit.room] = admit

    def steps(self, stage: Process) -> Iterator[Step]:
        """All that is due, in order."""
        while (step := self.scheduler.next_step()) is not None:
            stage.world.witness.written(stage, step)
            self._forget([entry.room for entry in step.entries])
            yield step
        stage.world.witness.pumped(stage, self.scheduler)

    def last_words(self, stage: Process) -> None:
        """Names the rooms that had work in the step the generation died in."""
        for key, stream in self.controls.items():
            for room in self.scheduler.rooms_in_flight(key):
                stage.send(stream, RoomRefused(room, LOST_STEP))

    def _forget(self, rooms: Sequence[RoomId]) -> None:
        for room in rooms:
            if not self.scheduler.holds(room):
                self.prompts.pop(room, None)
