"""What travels on the simulated streams: the contracts of protos/, less what no rule depends on.

Records only. An error crosses a stream by its class and reason, as in a status.
"""

from dataclasses import dataclass

from kvmesh import errors
from kvmesh.errors import KvmeshError
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.directives import Directive, Grant
from kvmesh.protocol.ids import Generation, Incarnation, PairingNumber, Rank, RoomId, StepNumber, Term
from kvmesh.protocol.members import Decoder, Load, Stage
from kvmesh.protocol.placement import RoomRequest
from kvmesh.protocol.steps import Step

Cell = tuple[int, int]
"""Whose KV a slot of a page holds, as the stage that wrote it knows: (room, token)."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The end of a stream, as one of its ends learns of it."""

    error: str
    """Name of a class of kvmesh.errors; empty for an ordinary end."""
    reason: str

    @staticmethod
    def by(error: KvmeshError) -> "Closed":
        """With an error."""
        return Closed(type(error).__name__, error.reason)

    def raised(self) -> KvmeshError:
        """The error at the other end."""
        made: KvmeshError = getattr(errors, self.error or "Unavailable")(self.reason, reason=self.reason)
        return made


# Leases.


@dataclass(frozen=True, slots=True)
class RegisterStage:
    """First message of a stage's lease; the registry numbers the lease."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class RegisterDecoder:
    """First message of a decoder's lease."""

    decoder: Decoder


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life, and the load."""

    load: Load


@dataclass(frozen=True, slots=True)
class Linked:
    """The step stream to the rank behind stands."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Directed:
    """A directive, and the term it is given under."""

    term: Term
    directive: Directive


# Rooms.


@dataclass(frozen=True, slots=True)
class AssignRoom:
    """A gateway asks for a room."""

    request: RoomRequest


@dataclass(frozen=True, slots=True)
class Assigned:
    """Its answer."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class Generate:
    """First message of a room's call to its decoder."""

    room: RoomId
    generation: Generation
    to: Incarnation
    request: int
    """What stands for the prompt: the tokens of a request are a function of it."""
    prompt_len: int
    output_index: int
    max_output_len: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a room, from an index in the request on."""

    index: int
    tokens: tuple[int, ...]
    last: bool


# Steps.


@dataclass(frozen=True, slots=True)
class OpenSteps:
    """First message of a step stream."""

    pipeline: str
    generation: Generation
    from_rank: Rank
    to: Incarnation


@dataclass(frozen=True, slots=True)
class Opened:
    """Answer to an opening of any kind that says nothing else."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A step, with its activations."""

    step: Step


@dataclass(frozen=True, slots=True)
class Applied:
    """This rank and all behind applied a step."""

    number: StepNumber
    digest: bytes


@dataclass(frozen=True, slots=True)
class Progress:
    """This rank lives."""


# Pairings.


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a link, and of a control stream."""

    generation: Generation
    pairing: PairingNumber
    decoder: Incarnation
    to: Incarnation


@dataclass(frozen=True, slots=True)
class Welcome:
    """A stage's answer on its link."""

    rank: Rank
    shard: ShardSpan


@dataclass(frozen=True, slots=True)
class Admit:
    """A decoder has reserved, and asks rank 0."""

    room: RoomId
    request: int
    prompt_len: int
    output_index: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The decoder ended a room."""

    room: RoomId


@dataclass(frozen=True, slots=True)
class Received:
    """All KV of a room arrived."""

    room: RoomId


@dataclass(frozen=True, slots=True)
class RoomRefused:
    """Rank 0 does not take a room, or names it as one that had work in the step its generation died in."""

    room: RoomId
    reason: str


@dataclass(frozen=True, slots=True)
class Frame:
    """KV of tokens [begin, end) of a room, one shard."""

    room: RoomId
    pairing: PairingNumber
    shard: ShardSpan
    begin: int
    end: int
    cells: tuple[Cell | None, ...]
    """Whose KV was read out of the pages, token by token; None where nothing was ever written."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The last rank drew a room's first token."""

    room: RoomId
    pairing: PairingNumber
    token: int


Message = (
    RegisterStage
    | RegisterDecoder
    | Heartbeat
    | Linked
    | Directed
    | AssignRoom
    | Assigned
    | Generate
    | Tokens
    | OpenSteps
    | Opened
    | Forwarded
    | Applied
    | Progress
    | Hello
    | Welcome
    | Admit
    | Drop
    | Received
    | RoomRefused
    | Frame
    | FirstToken
)


def token_of(request: int, index: int) -> int:
    """The one right token of a request at an index: what a greedy model would draw."""
    return (request * 31 + index) % 997
