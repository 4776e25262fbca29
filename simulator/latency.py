"""How long a message takes: distributions by name, drawn from a seeded source.

    constant:0.02            always 20 ms
    uniform:0.0:0.2          anything between, evenly
    heavy:0.01:1.3           Pareto: at least 10 ms, the smaller the second number the heavier the tail; cut at 100 times

A single slow stage is one edge with another latency than the rest: `Latencies(default, {edge: other})`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log
from random import Random

NUMBER = re.compile(r"\d+(\.\d*)?(e-?\d+)?")
"""Not negative, finite."""
TAIL_CUT = 100.0
"""A heavy tail ends at so many times its shortest value: a link slower than that is broken, and broken links are faults."""


@dataclass(frozen=True, slots=True)
class Latency:
    """One way, seconds."""

    shape: str
    low: float
    high: float = 0.0
    """Uniform: the upper end; heavy: the tail's exponent."""

    @staticmethod
    def parse(text: str) -> "Latency":
        """From its name and numbers.

        Raises:
            ValueError: it is not one of the three forms, or no latency is so.
        """
        shape, *rest = text.split(":")
        wanted = {"constant": 1, "uniform": 2, "heavy": 2}.get(shape)
        numbers = [float(n) for n in rest if NUMBER.fullmatch(n)]
        if wanted is None or not wanted == len(numbers) == len(rest):
            raise ValueError(f"latency {text!r} is none of constant:S, uniform:LOW:HIGH, heavy:LOW:EXPONENT")
        latency = Latency(shape, *numbers)
        if (shape == "uniform" and latency.high < latency.low) or (shape == "heavy" and latency.high == 0):
            raise ValueError(f"latency {text!r}: the upper end is below the lower, or the exponent is not positive")
        return latency

    def __str__(self) -> str:
        return f"{self.shape}:{self.low:g}" + ("" if self.shape == "constant" else f":{self.high:g}")

    @property
    def mean(self) -> float:
        """Of many messages, seconds."""
        if self.shape == "constant":
            return self.low
        if self.shape == "uniform":
            return (self.low + self.high) / 2
        if self.high == 1:
            return self.low * (1 + log(TAIL_CUT))
        beyond: float = TAIL_CUT ** (1 - self.high)
        return self.low * (self.high - beyond) / (self.high - 1)

    def draw(self, random: Random) -> float:
        """One message's latency."""
        if self.shape == "constant":
            return self.low
        if self.shape == "uniform":
            return random.uniform(self.low, self.high)
        return min(self.low * random.paretovariate(self.high), self.low * TAIL_CUT)


@dataclass(frozen=True, slots=True)
class Latencies:
    """One for every edge; an edge is (from, to), by name."""

    default: Latency
    edges: Mapping[tuple[str, str], Latency] = field(default_factory=dict)

    def draw(self, sender: str, receiver: str, random: Random) -> float:
        """One message's latency on an edge."""
        return self.edges.get((sender, receiver), self.default).draw(random)
