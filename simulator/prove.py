"""All the evidence in one run: every small world searched whole, then seeds at random. `make prove`; its short form is a test.

Work is spread over the machine's cores; results do not depend on how many there are.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from os import cpu_count
from time import monotonic

from simulator import small
from simulator.explore import Explored, Search, SmallWorld
from simulator.plan import LARGE, SMALL, Scale, draw
from simulator.run import Run, Seen
from simulator.violation import Violation

WORLDS: dict[str, Callable[[], SmallWorld]] = {
    "rooms side by side, crash": partial(small.rooms, sharing=False, abort=0, crash=1),
    "registration of 3": partial(small.registration, 3),
    "rooms on one page": partial(small.rooms, sharing=True, abort=1, crash=1),
    "rooms side by side, abort": partial(small.rooms, sharing=False, abort=1, crash=0),
    "rooms on one page, a slow copier": partial(small.rooms, sharing=True, abort=1, crash=0, copier_is_eager=False),
    "registration of 2": partial(small.registration, 2),
    "pairing": small.pairing,
    "whole": small.whole,
}
"""The longest first."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is run."""

    worlds: tuple[str, ...]
    small_seeds: int
    large_seeds: int


FULL = Effort(tuple(WORLDS), 2000, 20)
SHORT = Effort(("registration of 2", "pairing", "whole"), 120, 0)


@dataclass(slots=True)
class Evidence:
    """What was run, and what it showed."""

    explored: list[Explored] = field(default_factory=list)
    seeds: Counter[str] = field(default_factory=Counter)
    events: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Nothing was broken, and every search was complete."""
        return not self.violations and all(e.complete for e in self.explored)

    def lines(self) -> Iterator[str]:
        """For people."""
        yield "every order of events, searched whole"
        for e in self.explored:
            whole = "complete" if e.complete else "NOT COMPLETE"
            yield f"  {e.name:<58} {e.states:>9,} states {e.moves:>11,} moves  {e.rests:>6,} ends  {whole}"
        yield "at random, on virtual time"
        for name, count in self.seeds.items():
            yield f"  {count:,} {name} seeds"
        yield f"  {self.events:,} events; requests {sum(self.ends.values()):,}: {_counted(self.ends)}"
        yield f"  faults: {_counted(self.faults)}"
        yield f"violations: {len(self.violations)}"
        yield from (f"  {v}" for v in self.violations)
        yield f"{self.seconds:.0f} s"


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{name or 'well'} {count:,}" for name, count in counter.most_common())


def prove(effort: Effort, workers: int | None = None) -> Evidence:
    """Runs it all."""
    began, evidence = monotonic(), Evidence()
    with ProcessPoolExecutor(workers or cpu_count() or 1) as pool:
        searches = [pool.submit(_search, name) for name in effort.worlds]
        runs = [pool.submit(_run, seed, name) for name, count in _seeds(effort) for seed in range(count)]
        for search in searches:
            found, violation = search.result()
            evidence.explored.append(found)
            evidence.violations += [violation] if violation else []
        for run in runs:
            name, seen, violation = run.result()
            evidence.seeds[name] += 1
            evidence.violations += [violation] if violation else []
            if seen is not None:
                evidence.events += seen.events
                evidence.faults += seen.faults
                evidence.ends += seen.ends
    evidence.seconds = monotonic() - began
    return evidence


def _seeds(effort: Effort) -> list[tuple[str, int]]:
    return [("large", effort.large_seeds), ("small", effort.small_seeds)]


def _search(name: str) -> tuple[Explored, str]:
    search = Search(WORLDS[name]())
    try:
        return search.run(), ""
    except Violation as violation:
        path = "\n    ".join(violation.__notes__)
        return search.explored, f"{search.small.name}: {violation}, after\n    {path}"


SCALES: dict[str, Scale] = {"small": SMALL, "large": LARGE}


def _run(seed: int, scale: str) -> tuple[str, Seen | None, str]:
    try:
        return scale, Run(draw(seed, SCALES[scale]), noting=False).run(), ""
    except Violation as violation:
        return scale, None, f"{scale} seed {seed}: {violation}; python -m simulator --seed {seed} --scale {scale}"
