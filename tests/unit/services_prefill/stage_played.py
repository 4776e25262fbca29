"""A stage without a model: a worker that notes what it is asked, and what it would say of a step at times that a test gives."""

from kvmesh.kv.layout import Shard
from kvmesh.protocol.ids import Generation, Incarnation, PageId, PairingNumber, RoomId, StepNumber
from kvmesh.protocol.sending import Computed
from kvmesh.protocol.steps import Entry, RoomAdmitted, Step, Work
from kvmesh.telemetry import metrics, traces
from services.prefill.worker import BeginGeneration, CopyFrame, RunStep, Sampled, StepDone

G = Generation(5)
KEY = (Incarnation(3), PairingNumber(1))
SHARD = Shard(0, 2, 0, 1, 8, "fp32")
PROMPT_LEN = 40
PROMPT_BYTES = PROMPT_LEN * SHARD.bytes_per_token


class PlayedWorker:
    """Does nothing by itself."""

    def __init__(self) -> None:
        self.posted: list[BeginGeneration | RunStep | CopyFrame] = []
        self.age: float | None = None

    def post(self, record: BeginGeneration | RunStep | CopyFrame) -> None:
        self.posted.append(record)

    def age_seconds(self) -> float | None:
        return self.age

    @property
    def steps(self) -> list[Step]:
        return [record.step for record in self.posted if isinstance(record, RunStep)]


def admitted(room: int, prompt_len: int = PROMPT_LEN) -> RoomAdmitted:
    return RoomAdmitted(RoomId(room), KEY[1], KEY[0], prompt_len, 0, (PageId(1),))


def step(number: int, *entries: Entry, work: tuple[tuple[int, int, int], ...] = ()) -> Step:
    """Args: work: room, begin and end of each span."""
    return Step(StepNumber(number), entries, tuple(Work(RoomId(room), begin, end) for room, begin, end in work))


def done(of: Step, began: float, ended: float, *, drawn: tuple[int, ...] = (), num_rooms: int = 1) -> StepDone:
    """Args: drawn: rooms whose first token this stage drew."""
    return StepDone(
        G,
        of,
        b"digest",
        b"",
        tuple(Computed(KEY, work.room, work.begin, work.end) for work in of.work),
        tuple(Sampled(KEY, RoomId(room), 9) for room in drawn),
        began=began,
        ended=ended,
        num_rooms=num_rooms,
        free_pages=7,
    )


def spans_of(room: int) -> dict[str, tuple[float, float, str]]:
    """Begin, end and error of each span of a room, by name."""
    found = [s for s in traces.RING.all() if s.room == room]
    assert len({span.name for span in found}) == len(found)
    return {span.name: (span.begun, span.ended, span.error) for span in found}


def shown(name: str, **labels: str) -> float:
    """What the page of a stage says now."""
    return metrics.page_of("prefill").get_sample_value(name, labels) or 0.0
