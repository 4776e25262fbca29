"""A decoder: the machines of `kvmesh.protocol` wired as services/decode wires them.

Two threads share its pages: the copier, which rooms opening and closing and frames reach through one queue, and the decode
worker. It owns a pairing with each generation that the registry names.
"""

from dataclasses import dataclass, field

from kvmesh.errors import Fenced, Full, KvmeshError, Misfit, Unavailable
from kvmesh.protocol.directives import WholePipeline, WholePipelines
from kvmesh.protocol.fence import Fence
from kvmesh.protocol.ids import Generation, Incarnation, LeaseId, Rank, RoomId
from kvmesh.protocol.members import Decoder, Load, Member
from kvmesh.protocol.pairing import Ask as PairingAsk
from kvmesh.protocol.pairing import Pairing
from kvmesh.protocol.pairings import PairingBook
from kvmesh.protocol.rooms import Action, Ask, DecoderRooms, RoomEvent, RoomState
from simulator.copier import Arrived, Broken, Complete, Copier, OpenRoom
from simulator.decode_worker import CloseRoom, DecodeStep, DecodeWorker, Drawn, Woken
from simulator.messages import (
    Admit,
    Closed,
    Directed,
    Drop,
    FirstToken,
    Frame,
    Generate,
    Heartbeat,
    Hello,
    Message,
    Opened,
    Received,
    RegisterDecoder,
    RoomRefused,
    Tokens,
    Welcome,
)
from simulator.process import Process, Stream
from simulator.shapes import DecoderShape


@dataclass(slots=True)
class Pair:
    """One pairing on its way, or standing."""

    pipeline: WholePipeline
    machine: Pairing
    links: dict[Rank, Stream] = field(default_factory=dict)
    control: Stream | None = None


@dataclass(slots=True)
class Call:
    """A room and the stream its tokens leave on."""

    generate: Generate
    stream: Stream
    pair: Pair
    index: int


class DecoderProcess(Process):
    """One process."""

    local_kinds = ("inbox", "decoding", "results")
    threads = (("inbox",), ("decoding",))

    def __init__(self, world: object, name: str, address: str, incarnation: int, shape: DecoderShape) -> None:
        super().__init__(world, name, address, incarnation)
        self.shape = shape
        self.fence = Fence()
        self.books = DecoderRooms(shape.limits)
        self.pairs = PairingBook()
        self.calls: dict[RoomId, Call] = {}
        self.lease: Stream | None = None
        self.named: dict[Generation, WholePipeline] = {}
        self.trying: dict[Generation, Pair] = {}
        """Pairings on their way, or standing."""
        self.links: dict[int, tuple[Pair, Rank]] = {}
        """By the number of a stream: whose it is, and from which rank. Control streams are rank 0's."""
        self.rooms: dict[int, RoomId] = {}
        """By the number of a stream."""
        self.worker = DecodeWorker()
        self.copier = Copier(self.worker)

    def start(self) -> None:
        """Registers; and keeps watch, where time passes."""
        self._register()
        self.after(self.shape.watchdog_seconds / 4, "watch")

    def _register(self) -> None:
        member = Member(Incarnation(self.incarnation), self.address)
        registration = Decoder(LeaseId(0), member, self.shape.descriptor, self.fence.term)
        self.lease = self.dial("registry", "lease", RegisterDecoder(registration))

    # Streams.

    def opened(self, stream: Stream, first: Message) -> None:
        """A gateway brings a room."""
        assert isinstance(first, Generate)
        try:
            if first.to != self.incarnation:
                raise Fenced("meant for another decoder process")
            self.fence.hear_room(first.room)
            self.pairs.require(first.generation)
            actions = self.books.open(
                first.room,
                first.generation,
                prompt_len=first.prompt_len,
                max_output_len=first.max_output_len - first.output_index,
            )
        except KvmeshError as error:
            self.close(stream, Closed.by(error))
            return
        self.rooms[stream.number] = first.room
        self.calls[first.room] = Call(first, stream, self.trying[first.generation], first.output_index)
        self._carry_out(actions)

    def heard(self, stream: Stream, message: Message) -> None:
        """A directive, an answer to a dial, a frame, a refusal."""
        try:
            if stream is self.lease:
                assert isinstance(message, Directed)
                self.fence.hear_term(message.term)
                if isinstance(message.directive, WholePipelines):
                    self._named(message.directive)
                return
            if stream.number not in self.links:
                return
            pair, rank = self.links[stream.number]
            match message:
                case Welcome(_, shard):
                    self._follow(pair, pair.machine.linked(rank, [shard]))
                case Opened():
                    self._follow(pair, pair.machine.control_opened())
                case Frame() | FirstToken():
                    self.queue("inbox", Arrived((pair.machine.number, rank), message))
                case RoomRefused(room, reason):
                    self._refused(room, reason)
        except KvmeshError as error:
            self.close(stream, Closed.by(error))
            self.lost(stream, Closed.by(error))

    def lost(self, stream: Stream, end: Closed) -> None:
        """A lease is opened again; a pairing ends whole; a gateway's call ends its room."""
        if stream is self.lease:
            self.lease = None
            self.after(self.world.pause(), "lease again")
            return
        link, room = self.links.get(stream.number), self.rooms.pop(stream.number, None)
        if link is not None:
            self._end_pairing(link[0], end.raised())
        elif room in self.calls:
            self._tell(room, RoomEvent.CANCELLED)
            self._hang_up(room)

    # Pairings.

    def _named(self, whole: WholePipelines) -> None:
        self.named = {p.generation: p for p in whole.pipelines}
        begin, give_up = self.pairs.named(self.named.keys())
        for generation in give_up:
            pair = self.trying.pop(generation, None)
            if pair is not None:
                self._close_streams(pair)
            self.cancel_timer(f"pair again {generation}")
        for generation in begin:
            self._pair(generation)

    def _pair(self, generation: Generation) -> None:
        pipeline, descriptor = self.named[generation], self.shape.descriptor
        number = self.pairs.next_number()
        machine = Pairing(number, generation, len(pipeline.stages), descriptor.num_layers, descriptor.num_kv_heads)
        pair = self.trying[generation] = Pair(pipeline, machine)
        self._follow(pair, machine.start())

    def _follow(self, pair: Pair, asks: list[PairingAsk]) -> None:
        """Carries out what a pairing asks."""
        machine = pair.machine
        for ask in asks:
            if ask is PairingAsk.DIAL_TAIL:
                for rank in machine.tail:
                    self._dial_stage(pair, rank, "link")
            elif ask is PairingAsk.DIAL_HEAD:
                self._dial_stage(pair, Rank(0), "link")
            elif ask is PairingAsk.OPEN_CONTROL:
                self._dial_stage(pair, Rank(0), "control")
            elif ask is PairingAsk.ANNOUNCE:
                self.pairs.stands(machine.generation, machine.number)
                self._beat()

    def _dial_stage(self, pair: Pair, rank: Rank, kind: str) -> None:
        member, machine = pair.pipeline.stages[rank], pair.machine
        hello = Hello(machine.generation, machine.number, Incarnation(self.incarnation), member.incarnation)
        stream = self.dial(member.address, kind, hello)
        self.links[stream.number] = (pair, rank)
        if kind == "link":
            pair.links[rank] = stream
        else:
            pair.control = stream

    def _end_pairing(self, pair: Pair, error: KvmeshError) -> None:
        """One stream lost, and all are closed; its rooms hear of it if it stood; then again, while it is named."""
        machine, generation = pair.machine, pair.machine.generation
        if self.trying.get(generation) is not pair:
            return
        machine.lost()
        self._close_streams(pair)
        del self.trying[generation]
        if self.pairs.lost(generation, machine.number):
            lost, actions = self.books.generation_lost(generation)
            for room in lost:
                self.close(self.calls[room].stream, Closed.by(Unavailable(error.message, reason=error.reason)))
            self._carry_out(actions)
            for room in lost:
                self._hang_up(room)
            self._beat()
        if self.pairs.may_pair_again(generation) and not isinstance(error, Misfit):
            self.after(self.world.pause(), f"pair again {generation}")
        else:
            self.pairs.over(generation)

    def _close_streams(self, pair: Pair) -> None:
        streams = [*pair.links.values(), *([pair.control] if pair.control is not None else [])]
        for stream in streams:
            self.links.pop(stream.number, None)
            self.close(stream, Closed("Unavailable", "pairing_lost"))

    # Rooms.

    def _refused(self, room: RoomId, reason: str) -> None:
        if self.books.state_of(room) is not RoomState.RECEIVING:
            self._tell(room, RoomEvent.REFUSED)
            return
        error: KvmeshError = Full("full") if reason == "queue_full" else Unavailable("refused", reason=reason)
        self._fail(room, RoomEvent.REFUSED, error)

    def _fail(self, room: RoomId, event: RoomEvent, error: KvmeshError) -> None:
        """A room ends by an error, which its gateway hears."""
        call = self.calls.get(room)
        if call is not None:
            self.close(call.stream, Closed.by(error))
        self._tell(room, event)
        self._hang_up(room)

    def _hang_up(self, room: RoomId) -> None:
        call = self.calls.pop(room, None)
        if call is not None:
            self.rooms.pop(call.stream.number, None)

    def _tell(self, room: RoomId, event: RoomEvent) -> None:
        self._carry_out(self.books.tell(room, event))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            call = self.calls[action.room]
            if action.ask is Ask.RELEASE:
                self.queue("inbox", CloseRoom(action.room))
            elif action.ask is Ask.ADMIT:
                self._admit(call, action)
            elif action.ask is Ask.RECEIVED:
                self.send(call.pair.control, Received(action.room))
            elif action.ask is Ask.DROP:
                self.send(call.pair.control, Drop(action.room))

    def _admit(self, call: Call, action: Action) -> None:
        generate, machine = call.generate, call.pair.machine
        self.world.witness.reserved(self, generate)
        self.queue("inbox", OpenRoom(generate.room, machine.number, machine.shards, action.pages, generate))
        self.send(call.pair.control, self.admit_of(generate))

    def admit_of(self, call: Generate) -> Admit:
        """What rank 0 is asked for a room."""
        return Admit(call.room, call.request, call.prompt_len, call.output_index)

    # Its threads.

    def take(self, kind: str, item: object) -> None:
        """A thread's next job, or the next report of either."""
        if kind == "inbox":
            self.copier.take(self, item)
            return
        match item:
            case Woken() | DecodeStep():
                self.worker.take(self, item)
            case Complete(room):
                self._tell(room, RoomEvent.COMPLETE)
            case Drawn():
                self._drew(item)
            case Broken(room, reason):
                self._fail(room, RoomEvent.BROKEN, Unavailable("what came can't be used", reason=reason))

    def _drew(self, drawn: Drawn) -> None:
        call = self.calls.get(drawn.room)
        if call is None or self.books.state_of(drawn.room) not in (RoomState.RECEIVING, RoomState.RUNNING):
            return
        self.send(call.stream, Tokens(call.index, (drawn.token,), drawn.last))
        call.index += 1
        if drawn.last:
            self._tell(drawn.room, RoomEvent.FINISHED)
            self._hang_up(drawn.room)
            self.close(call.stream)

    # Time.

    def seconds_of(self, kind: str, item: object) -> float:
        """Of one decode step, of one frame, or of taking up anything else."""
        match item:
            case DecodeStep():
                return self.shape.step_seconds
            case Arrived(_, Frame()):
                return self.shape.copy_seconds
        return super().seconds_of(kind, item)

    def fired(self, timer: str) -> None:
        """Pauses, heartbeats and the watchdog."""
        if timer == "lease again" and self.lease is None:
            self._register()
        elif timer == "watch":
            self.after(self.shape.watchdog_seconds / 4, "watch")
            self._beat()
            age = self.age_seconds()
            if age is not None and age > self.shape.watchdog_seconds:
                self._fail_all(Unavailable("the decoder made no progress", reason="decoder_hung"))
        elif timer.startswith("pair again "):
            generation = Generation(int(timer.removeprefix("pair again ")))
            if generation in self.named:
                self._pair(generation)
            else:
                self.pairs.over(generation)

    def _fail_all(self, error: KvmeshError) -> None:
        for room in list(self.calls):
            self._fail(room, RoomEvent.CANCELLED, error)

    def _beat(self) -> None:
        books = self.books
        load = Load(
            waiting_rooms=books.waiting_rooms,
            running_rooms=books.running_rooms,
            free_pages=books.free_pages,
            paired_generations=tuple(self.pairs.standing),
        )
        self.send(self.lease, Heartbeat(load))
