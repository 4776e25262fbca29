"""What every protocol is given: the same requests, and the same latency of the same message on the same edge.

Each latency is drawn from a source of its own, keyed by seed, edge, room and message, so neither the protocol nor the number
of stages shifts a draw. An edge keeps its order, as one connection does.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from kvmesh.protocol.ids import RoomId
from simulator.latency import Latencies, Latency

MEDIAN_PROMPT, PROMPT_SPREAD = 2500, 0.9
"""Prompt lengths are log-normal: tokens of the median, and the deviation of the logarithm."""
SHORTEST_PROMPT, LONGEST_PROMPT = 16, 32768
MEAN_WAIT_SECONDS = 0.05
"""From the arrival of a request until its decoder has reserved pages, when pages are at hand."""
LATE_FACTORS = (0.5, 1.5)
"""A late reservation takes so many times the bootstrap time-out: half of them miss it."""
MIN_FILL = 0.25
"""A step costs at least this share of a full one: the weights are read however few the tokens."""
POLL_SECONDS = 0.001
"""One turn of a stage's loop without work."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which a protocol runs. Seconds, tokens, shares of 1."""

    seed: int = 0
    requests: int = 1000
    rate: float = 3.0
    """Requests a second, Poisson. Three keep a stage a third busy: admission is measured, not a queue for compute."""
    abort_rate: float = 0.3
    abort_window_seconds: float = 2.0
    """Aborts fall evenly into so long after a request's arrival."""
    late_rate: float = 0.05
    """Share of requests whose decoder has no pages for a long while."""
    timeout_seconds: float = 2.0
    """Of the bootstrap: from when whoever keeps the timer knows the request until the decoder is heard."""
    latency: Latency = field(default_factory=lambda: Latency.parse("uniform:0:0.2"))
    """Decoder to stage, one way."""
    slow_stage: tuple[int, Latency] | None = None
    """One rank that decoders reach with another latency."""
    hop: Latency = field(default_factory=lambda: Latency.parse("uniform:0.0002:0.002"))
    """Stage to the next stage."""
    tell_gap_seconds: float = 0.005
    """Between a decoder's "ready" to one stage and to the next, as it packs the page list for each; aborts go out at once."""
    step_seconds: float = 0.1
    """One full step on one stage, however many stages there are."""
    step_tokens: int = 4096
    num_decoders: int = 4

    @property
    def rtt_seconds(self) -> float:
        """The mean round trip between decoder and stage: the unit of the results."""
        return 2 * self.latency.mean

    def step_cost(self, num_tokens: int) -> float:
        """Seconds that a step keeps a stage busy."""
        return self.step_seconds * max(MIN_FILL, num_tokens / self.step_tokens) if num_tokens else POLL_SECONDS


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Times in seconds since the run began."""

    room: RoomId
    decoder: int
    prompt_len: int
    arrived: float
    reserved: float | None
    """When its decoder has pages for it; None: it was aborted before."""
    aborted: float | None


def requests_of(conditions: Conditions) -> list[Request]:
    """The traffic of a run, in order of arrival."""
    random = Random(f"{conditions.seed}/traffic")
    now = 0.0
    requests = []
    for number in range(1, conditions.requests + 1):
        now += random.expovariate(conditions.rate)
        requests.append(_request(RoomId(number), now, conditions, random))
    return requests


def _request(room: RoomId, now: float, conditions: Conditions, random: Random) -> Request:
    """Draws the same number of values whatever the rates are, so that another rate leaves the rest as it was."""
    length = int(random.lognormvariate(math.log(MEDIAN_PROMPT), PROMPT_SPREAD))
    wait = random.expovariate(1 / MEAN_WAIT_SECONDS)
    late_wait = random.uniform(*LATE_FACTORS) * conditions.timeout_seconds
    is_late = random.random() < conditions.late_rate
    is_aborted = random.random() < conditions.abort_rate
    aborted = now + random.uniform(0, conditions.abort_window_seconds)
    reserved = now + (late_wait if is_late else wait)
    return Request(
        room=room,
        decoder=random.randrange(conditions.num_decoders),
        prompt_len=min(max(length, SHORTEST_PROMPT), LONGEST_PROMPT),
        arrived=now,
        reserved=None if is_aborted and aborted <= reserved else reserved,
        aborted=aborted if is_aborted else None,
    )


@dataclass(slots=True)
class Network:
    """Latencies between decoders and stages; draws are kept, for the next protocol asks for the same ones."""

    conditions: Conditions
    _latencies: Latencies = field(init=False)
    _drawn: dict[tuple[int, int, RoomId, str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        slow = self.conditions.slow_stage
        decoders = range(self.conditions.num_decoders)
        edges = {(f"decoder {d}", f"stage {slow[0]}"): slow[1] for d in decoders} if slow else {}
        self._latencies = Latencies(self.conditions.latency, edges)

    def latency(self, decoder: int, rank: int, room: RoomId, message: str) -> float:
        """Seconds that one message between a decoder and a stage takes, in either direction."""
        key = (decoder, rank, room, message)
        if key not in self._drawn:
            random = Random(f"{self.conditions.seed}/{decoder}/{rank}/{room}/{message}")
            self._drawn[key] = self._latencies.draw(f"decoder {decoder}", f"stage {rank}", random)
        return self._drawn[key]

    def arrivals(self, rank: int, requests: Iterable[Request], delay: float) -> dict[tuple[RoomId, str], float]:
        """When a stage hears "ready" and "abort" of each room; "ready" is sent `delay` seconds after the event."""
        sent = [(r.reserved + delay, r, "ready") for r in requests if r.reserved is not None]
        sent += [(r.aborted, r, "abort") for r in requests if r.aborted is not None]
        latest = [0.0] * self.conditions.num_decoders
        heard = {}
        for time, request, message in sorted(sent, key=lambda s: (s[0], s[1].room, s[2] == "abort")):
            arrival = time + self.latency(request.decoder, rank, request.room, message)
            latest[request.decoder] = max(latest[request.decoder], arrival)
            heard[request.room, message] = latest[request.decoder]
        return heard

    def hops(self, edge: str) -> "Hops":
        """A new stream of latencies for one edge between two stages."""
        return Hops(self.conditions.hop, Random(f"{self.conditions.seed}/{edge}"))


@dataclass(slots=True)
class Hops:
    """The edge from one stage to a neighbour; it keeps its order."""

    latency: Latency
    random: Random
    _latest: float = 0.0

    def arrival(self, sent: float) -> float:
        """When the next message arrives, sent at a time in seconds."""
        self._latest = max(self._latest, sent + self.latency.draw(self.random))
        return self._latest
