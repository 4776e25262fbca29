"""All paths side by side, taking turns round by round. Called by `__main__`."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from bench.kv_transfer.outcome import WITHOUT
from bench.kv_transfer.pair import Broken, Missing, Pair, Path, Run, context
from bench.kv_transfer.paths import UNCHECKED

DRAW_SEED = 11


class Turns:
    """Measures the rounds of some paths."""

    def __init__(self, paths: Sequence[Path], room_pages: Sequence[int]) -> None:
        """Args:
        room_pages: of each room.
        """
        self._paths, self._room_pages = paths, room_pages
        self._draw = np.random.default_rng(DRAW_SEED)
        self.runs: dict[str, list[Run]] = {}
        self.reasons: dict[str, str] = {}
        """Why a peer was not measured."""

    def measure(self, num_rounds: int) -> None:
        """So many rounds of each path, after one that warms up.

        Raises:
            Broken: a path of kvmesh failed.
            Damaged: a path, a peer's too, brought something else than it was given.
        """
        processes = context()
        with ExitStack() as stack:
            pairs = [stack.enter_context(Pair(path, self._room_pages, processes)) for path in self._paths]
            for pair in pairs:
                self._try(pair, pair.connect)
            for number in range(-1, num_rounds):
                # Each round begins with another path, so that none always comes after the same one.
                first = number % len(pairs)
                for pair in (*pairs[first:], *pairs[:first]):
                    if pair.path.name not in self.reasons:
                        self._try(pair, partial(self._round, pair, keep=number >= 0))

    def _try(self, pair: Pair, attempt: Callable[[], None]) -> None:
        """A peer that fails is left out from then on, with its reason."""
        path = pair.path
        try:
            attempt()
        except (Missing, Broken) as error:
            if not path.is_peer:
                raise
            self.reasons[path.name] = str(error)
            self.runs.pop(path.name, None)

    def _round(self, pair: Pair, *, keep: bool) -> None:
        name = pair.path.name
        runs = {name: pair.run(self._draw)}
        if name in UNCHECKED:
            runs[name + WITHOUT] = pair.run(self._draw, checked=False)
        for key, run in runs.items() if keep else ():
            self.runs.setdefault(key, []).append(run)
