"""One life of a stage: from its registration to the end of the generation it serves in, as a table.

Says which directives and which step stream a stage obeys, and under which generation it serves. Called by the prefill service
and the simulator, which own the streams. The weights outlive a life, nothing else does.
"""

from dataclasses import dataclass
from enum import Enum

from kvmesh.errors import Fenced, Unavailable
from kvmesh.protocol.fence import Fence
from kvmesh.protocol.ids import Generation, Incarnation, Rank, short
from kvmesh.protocol.members import NO_GENERATION
from kvmesh.protocol.table import Table


class LifeState(Enum):
    """Where a stage's life is."""

    REGISTERED = "registered"
    """At the registry, or on the way there; part of no generation."""
    LINKING = "linking"
    """Ordered to open its step stream to the rank behind."""
    LINKED = "linked"
    """That stream stands; the rank before has not opened its own."""
    SERVING = "serving"
    OVER = "over"
    """Closes its streams, rests its worker; the next life registers."""


class LifeEvent(Enum):
    """What happens to a stage's life."""

    ORDERED = "ordered to link"
    LINKED = "linked to the rank behind"
    BEGUN = "the generation begins here"
    """The rank before opened its step stream; or, at rank 0, the registry admitted it."""
    ENDED = "ended"


class Nothing(Enum):
    """The table asks for nothing: its caller knows what each event is."""


_R, _G, _L, _S, _O = LifeState.REGISTERED, LifeState.LINKING, LifeState.LINKED, LifeState.SERVING, LifeState.OVER
LIFE_TABLE: Table[LifeState, LifeEvent, Nothing] = Table(
    "life of a stage",
    {
        (_R, LifeEvent.ORDERED): (_G, ()),
        (_R, LifeEvent.BEGUN): (_S, ()),
        (_R, LifeEvent.ENDED): (_O, ()),
        (_G, LifeEvent.LINKED): (_L, ()),
        (_G, LifeEvent.ENDED): (_O, ()),
        (_L, LifeEvent.BEGUN): (_S, ()),
        (_L, LifeEvent.ENDED): (_O, ()),
        (_S, LifeEvent.ENDED): (_O, ()),
        (_O, LifeEvent.LINKED): (_O, ()),
        (_O, LifeEvent.ENDED): (_O, ()),
    },
)


@dataclass(frozen=True, slots=True)
class Opening:
    """How a step stream opens: who means to reach whom, and under which generation."""

    pipeline: str
    generation: Generation
    from_rank: Rank
    to_incarnation: Incarnation


class Verdict(Enum):
    """What a stage makes of a step stream that opens."""

    BEGIN = "begin"
    WAIT = "wait"
    """The stream overtook the registry's word; a stage waits for that, for a bounded time."""
    GIVE_WAY = "give way"
    """A higher generation: what runs here is over. The stream is refused, and finds the next life."""


@dataclass(slots=True)
class StageLife:
    """The life that runs now. `fence` is the process's and outlives it."""

    incarnation: Incarnation
    pipeline: str
    rank: Rank
    pp_size: int
    fence: Fence
    state: LifeState = LifeState.REGISTERED
    generation: Generation = NO_GENERATION
    """It links, or serves, under."""
    admitted_to: Generation = NO_GENERATION
    """As the registry said last, in this life."""

    @property
    def is_last(self) -> bool:
        """Whether this is the rank that samples."""
        return self.rank == self.pp_size - 1

    @property
    def serving(self) -> bool:
        """Whether its generation runs here."""
        return self.state is LifeState.SERVING

    @property
    def held(self) -> Generation:
        """What it tells a registry that it holds; 0 for nothing."""
        return self.generation if self.serving else NO_GENERATION

    # The registry's word.

    def ordered(self, generation: Generation) -> None:
        """To open the step stream to the rank behind, under a generation.

        Raises:
            Unavailable: it was ordered before: the registry and this life disagree, so the life must end.
        """
        if self.state is not LifeState.REGISTERED:
            raise Unavailable("ordered to link twice", reason="withdrawn")
        self._step(LifeEvent.ORDERED)
        self.generation = generation

    def linked(self) -> bool:
        """The rank behind took the stream. False: the life ended meanwhile."""
        self._step(LifeEvent.LINKED)
        return self.state is LifeState.LINKED

    def admitted(self, generation: Generation) -> bool:
        """To a generation, or again after a lease was lost. Returns whether it begins to serve now: rank 0 only.

        Raises:
            Fenced: rank 0 is not linked under that generation, or served it before: the life must end.
        """
        self.admitted_to = generation
        if self.rank != 0 or self.state in (LifeState.SERVING, LifeState.OVER):
            return False
        if not self.is_last and generation != self.generation:
            raise Fenced(f"admitted to generation {short(generation)}, linked under {short(self.generation)}")
        self._begin(generation)
        return True

    # The rank before.

    def judge(self, opening: Opening) -> Verdict:
        """What to make of a step stream. It begins a generation that a middle rank was ordered to link under; at the last rank,
        one that it was admitted to in this very life: what the registry minted for an earlier lease is over, whatever the rank
        before believes. What runs here gives way to any higher one.

        Raises:
            Fenced: it means another process, pipeline or rank, or a generation that can't begin here.
        """
        number = opening.generation
        if (opening.to_incarnation, opening.pipeline, opening.from_rank + 1) != (
            self.incarnation,
            self.pipeline,
            self.rank,
        ):
            raise Fenced(
                f"meant for rank {opening.from_rank + 1} of {opening.pipeline}, or another process; "
                f"this is rank {self.rank} of {self.pipeline}"
            )
        if self.serving and number > self.generation:
            return Verdict.GIVE_WAY
        if self.state in (LifeState.SERVING, LifeState.OVER) or number <= self.fence.generation:
            raise Fenced(f"generation {short(number)} can't begin here: another one stands, or it was here before")
        if self.is_last:
            if self.admitted_to < number:
                return Verdict.WAIT
            own = self.admitted_to
        elif self.state is not LifeState.LINKED:
            raise Fenced(f"rank {self.rank} is not linked to rank {self.rank + 1} yet")
        else:
            own = self.generation
        if own != number:
            raise Fenced(f"generation {short(number)} can't begin here: this stage is part of {short(own)}")
        return Verdict.BEGIN

    def begin(self, generation: Generation) -> None:
        """The rank before opened; called after `judge` said so."""
        self._begin(generation)

    # Serving.

    def require_serving(self, generation: Generation) -> None:
        """A link or a control stream opens.

        Raises:
            Fenced: its generation does not run here.
        """
        if not self.serving or self.generation != generation:
            raise Fenced(f"generation {short(generation)} is not served here")

    def end(self) -> None:
        """The life is over, for whatever reason. Repeated: nothing."""
        self._step(LifeEvent.ENDED)

    def _begin(self, generation: Generation) -> None:
        after, _ = LIFE_TABLE.step(self.state, LifeEvent.BEGUN)  # both may refuse, and then nothing is changed
        self.fence.begin(generation)
        self.state, self.generation = after, generation

    def _step(self, event: LifeEvent) -> None:
        self.state, _ = LIFE_TABLE.step(self.state, event)
