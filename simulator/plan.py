"""A plan: everything about a run that is not the protocol. Drawn from a seed, or read from JSON; shrunk by leaving things out.

A run is a function of its plan: same plan, same events.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

from simulator.gateway import Wish
from simulator.latency import Latencies, Latency
from simulator.mesh import REGISTRY, MeshShape, names_of

SLOW_FACTOR = 5.0
LASTING = {
    "kill": (0.2, 4.0),
    "stop": (0.2, 6.0),
    "hang": (0.2, 6.0),
    "apart": (0.2, 5.0),
    "cut": (0.0, 0.0),
    "again": (0.0, 1.0),
    "stale registry": (2.5, 6.0),
}
"""Kinds of faults, and how long one lasts: until a process is started again, goes on, or is reached again. Stopping for twice
the watchdog's time and more is in the range."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    kind: str
    at: float
    lasts: float
    target: str
    other: str = ""
    """The process that `target` can't reach."""
    pick: int = 0
    """Which of the target's streams, rooms or threads, by number."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run."""

    seed: int
    shape: MeshShape
    latency: str
    wishes: tuple[Wish, ...]
    faults: tuple[Fault, ...]
    slow: str = ""
    """A process whose every message takes longer."""
    starts: tuple[tuple[str, float], ...] = ()
    """When each process first comes up; one not named does at 0."""

    @property
    def quiet_at(self) -> float:
        """When the last fault is over and the last client has come."""
        ends = [f.at + f.lasts for f in self.faults] + [w.arrives for w in self.wishes] + [t for _, t in self.starts]
        return max(ends, default=0.0)

    def to_json(self) -> str:
        """To be kept, or typed."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Plan":
        """The plan of `to_json`."""
        made = json.loads(text)
        made["shape"] = MeshShape(**made["shape"])
        made["wishes"] = tuple(Wish(**w) for w in made["wishes"])
        made["faults"] = tuple(Fault(**f) for f in made["faults"])
        made["starts"] = tuple((name, at) for name, at in made["starts"])
        return Plan(**made)


@dataclass(frozen=True, slots=True)
class Scale:
    """How large plans are drawn."""

    pp: tuple[int, int]
    pipelines: tuple[int, int]
    decoders: tuple[int, int]
    gateways: tuple[int, int]
    wishes: tuple[int, int]
    faults: tuple[int, int]
    seconds: float
    """In which clients come and faults begin."""
    latencies: tuple[str, ...] = (
        "constant:0.005",
        "uniform:0.0:0.02",
        "uniform:0.0:0.2",
        "heavy:0.005:1.3",
        "heavy:0.002:1.1",
    )
    abort_rates: tuple[float, ...] = (0.0, 0.3)
    shapes: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Of other numbers of MeshShape, which to choose from."""


SMALL = Scale(
    pp=(1, 4),
    pipelines=(1, 2),
    decoders=(1, 2),
    gateways=(1, 2),
    wishes=(2, 14),
    faults=(0, 4),
    seconds=8.0,
    shapes={
        "stage_pages": (6, 12, 24),
        "decoder_pages": (8, 16, 40),
        "step_tokens": (3, 8, 16),
        "max_steps_in_flight": (1, 2, 4),
        "decode_step_seconds": (0.005, 0.1),
    },
)
LARGE = Scale(
    pp=(2, 16),
    pipelines=(2, 8),
    decoders=(2, 16),
    gateways=(1, 4),
    wishes=(1000, 2500),
    faults=(10, 30),
    seconds=40.0,
    abort_rates=(0.3,),
    latencies=("uniform:0.0:0.02", "heavy:0.005:1.3"),
    shapes={
        "stage_pages": (64, 128),
        "decoder_pages": (64, 256),
        "step_tokens": (32, 64),
        "max_steps_in_flight": (4, 16),
    },
)


def draw(seed: int, scale: Scale) -> Plan:
    """The plan of a seed."""
    random = Random(f"{seed} plan")
    counts = {n: random.randint(*getattr(scale, n)) for n in ("pp", "pipelines", "decoders", "gateways")}
    more: dict[str, Any] = {name: random.choice(choices) for name, choices in scale.shapes.items()}
    shape = MeshShape(**counts, **more)
    everyone = names_of(shape)
    members = [n for n in everyone if not n.startswith("gateway")]
    return Plan(
        seed=seed,
        shape=shape,
        latency=random.choice(scale.latencies),
        wishes=tuple(_wishes(random, shape, scale)),
        faults=tuple(_faults(random, scale, everyone)),
        slow=random.choice(members) if random.random() < 0.2 else "",
        starts=tuple((name, random.uniform(0.0, 1.0)) for name in members),
    )


def _wishes(random: Random, shape: MeshShape, scale: Scale) -> Iterator[Wish]:
    abort_rate = random.choice(scale.abort_rates)
    for number in range(random.randint(*scale.wishes)):
        output_len = random.choice((1, 2, 5, 12))
        prompt_len = random.randint(1, min(shape.max_tokens - output_len, 30))
        cancelled = random.expovariate(2.0) if random.random() < abort_rate else None
        yield Wish(
            number,
            random.uniform(0.0, scale.seconds),
            prompt_len,
            output_len,
            deadline_seconds=random.choice((6.0, 25.0)),
            cancelled_after=cancelled,
            gateway=random.randrange(shape.gateways),
        )


def _faults(random: Random, scale: Scale, everyone: list[str]) -> Iterator[Fault]:
    members = [n for n in everyone if not n.startswith("gateway")]
    workers, decoders = [n for n in members if n != REGISTRY], [n for n in members if n.startswith("decoder")]
    for _ in range(random.randint(*scale.faults)):
        kind = random.choice(list(LASTING))
        targets = {"hang": workers, "again": decoders, "stale registry": [REGISTRY], "apart": members}
        target = random.choice(targets.get(kind, everyone))
        other = random.choice([m for m in everyone if m != target]) if kind == "apart" else ""
        lasts = random.uniform(*LASTING[kind])
        yield Fault(kind, random.uniform(0.0, scale.seconds), lasts, target, other, random.randrange(1 << 20))


def slowed(usual: Latency) -> Latency:
    """Of a slow process. Streams give up on what takes longer than the watchdog's time: so slow is none, but as a fault."""
    factor = SLOW_FACTOR if usual.shape != "heavy" else 2.0
    return Latency(usual.shape, usual.low * factor, usual.high if usual.shape == "heavy" else usual.high * factor)


def latencies_of(plan: Plan) -> Latencies:
    """With the slow process, if there is one, on every edge from and to it."""
    usual = Latency.parse(plan.latency)
    slow = slowed(usual)
    edges = {
        edge: slow for name in names_of(plan.shape) if plan.slow for edge in ((name, plan.slow), (plan.slow, name))
    }
    return Latencies(usual, edges)


def smaller(plan: Plan) -> Iterator[Plan]:
    """Plans with something left out, the boldest first."""
    for size in (16, 8, 4, 2, 1):
        for name in ("faults", "wishes"):
            items = getattr(plan, name)
            for at in range(0, len(items), size):
                if len(items) >= size:
                    yield replace(plan, **{name: items[:at] + items[at + size :]})
    for name in ("pipelines", "decoders", "gateways", "pp"):
        value = getattr(plan.shape, name)
        if value > 1:
            shape = replace(plan.shape, **{name: value - 1})
            yield _fitted(replace(plan, shape=shape))
    if plan.slow:
        yield replace(plan, slow="")
    if plan.starts:
        yield replace(plan, starts=())
    if any(w.cancelled_after is not None for w in plan.wishes):
        yield replace(plan, wishes=tuple(replace(w, cancelled_after=None) for w in plan.wishes))
    if plan.latency != "constant:0.005":
        yield replace(plan, latency="constant:0.005")


def _fitted(plan: Plan) -> Plan:
    """Without what names a process that is gone."""
    shape = plan.shape
    names = set(names_of(shape))
    return replace(
        plan,
        faults=tuple(f for f in plan.faults if f.target in names and (not f.other or f.other in names)),
        wishes=tuple(replace(w, gateway=w.gateway % shape.gateways) for w in plan.wishes),
        slow=plan.slow if plan.slow in names else "",
        starts=tuple((name, at) for name, at in plan.starts if name in names),
    )
