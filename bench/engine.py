"""How fast is one process' engine, next to transformers on the same weights? `python -m bench.engine --json`

Prefill of 512 tokens and greedy decode at batch 1 and 8, in fp32 and bf16, with 1 and 2 threads; starting and loading.
Two worker processes, ours and transformers', take turns at every figure, so that noise hits both. Exits 1 if the fp32
logits differ. The rounds stop early when the time is up; `repeats` says how many there were.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter

from bench.engine_sides import PROMPT_TOKENS
from kvmesh.model.source import resolve

SIDES = ("kvmesh", "transformers")
DTYPES, THREADS, BATCHES = ("fp32", "bf16"), (2, 1), (1, 8)
REPEATS = 3
BUDGET_SECONDS = 75.0
"""No round begins after this; a round takes 20 to 35 s on two cores, and all of it should stay within 120."""
LOGIT_TOLERANCE = 1e-3
"""Where fp32 logits of the same prompt may differ: the near-tie rule of docs/protocol.md."""

Ask = Mapping[str, object]
Answer = dict[str, object]


@contextmanager
def worker(side: str, directory: Path) -> Iterator[Callable[[Ask], Answer]]:
    """A process that answers one JSON line with another."""
    # Threads that wait must not spin: the two sides, and whatever else runs, share the cores.
    env = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    command = [sys.executable, "-m", "bench.engine_sides", side, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        stdin, stdout = process.stdin, process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("a worker without pipes")

        def ask(what: Ask) -> Answer:
            stdin.write(json.dumps(what) + "\n")
            stdin.flush()
            line = stdout.readline()
            if not line:
                raise RuntimeError(f"the {side} worker ended; its last words are on stderr")
            answer: Answer = json.loads(line)
            return answer

        yield ask
        stdin.close()


def seconds(answer: Answer, name: str = "seconds") -> float:
    """One duration of an answer."""
    return float(str(answer[name]))


def rates(rounds: list[dict[str, float]], side: str) -> dict[str, float]:
    """Tokens a second of every figure, medians over the rounds."""
    return {name: median(r[name] for r in rounds) for name in rounds[0] if name.startswith(side)}


def one_round(asks: Mapping[str, Callable[[Ask], Answer]]) -> dict[str, float]:
    """Every figure once, the sides in turns: name → tokens a second."""
    found: dict[str, float] = {}
    for dtype, threads in product(DTYPES, THREADS):
        for side in SIDES:
            setup = {"dtype": dtype, "threads": threads}
            took = seconds(asks[side]({"what": "prefill", **setup}))
            found[f"{side}_prefill_{dtype}_{threads}t"] = PROMPT_TOKENS / took
        for batch, side in product(BATCHES, SIDES):
            answer = asks[side]({"what": "decode", "batch": batch, "dtype": dtype, "threads": threads})
            found[f"{side}_decode_{dtype}_{threads}t_batch{batch}"] = float(str(answer["tokens"])) / seconds(answer)
    return found


def measure(directory: Path, began: float) -> dict[str, object]:
    """Starts both sides, runs the rounds, compares."""
    with worker(SIDES[0], directory) as ours, worker(SIDES[1], directory) as theirs:
        asks = {SIDES[0]: ours, SIDES[1]: theirs}
        result: dict[str, object] = {"prompt_tokens": PROMPT_TOKENS}
        for side, dtype in product(SIDES, DTYPES):
            loaded = asks[side]({"what": "load", "dtype": dtype})
            result[f"{side}_import_seconds"] = loaded["import_seconds"]
            result[f"{side}_load_{dtype}_seconds"] = loaded["seconds"]
        gap = max(abs(a - b) for a, b in zip(*(logits(asks[side]) for side in SIDES), strict=True))
        rounds: list[dict[str, float]] = []
        while len(rounds) < REPEATS and (not rounds or perf_counter() - began < BUDGET_SECONDS):
            rounds.append(one_round(asks))
    mine, others = (rates(rounds, side) for side in SIDES)
    for (name, rate), other in zip(mine.items(), others.values(), strict=True):
        figure = name.removeprefix(f"{SIDES[0]}_")
        result[f"{figure}_tokens_per_second"] = round(rate, 1)
        result[f"transformers_{figure}_tokens_per_second"] = round(other, 1)
        result[f"{figure}_over_transformers"] = round(rate / other, 2)
    return result | {"repeats": len(rounds), "max_logit_difference": gap, "logits_equal": gap < LOGIT_TOLERANCE}


def logits(ask: Callable[[Ask], Answer]) -> list[float]:
    """The fp32 logits after the prompt."""
    found = ask({"what": "logits", "dtype": "fp32", "threads": THREADS[0]})["logits"]
    if not isinstance(found, list):
        raise TypeError("a worker answered without logits")
    return found


def main() -> int:
    """Measures, prints, and tells whether the logits agree."""
    began = perf_counter()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    parser.add_argument("--model", default="smollm2", help="default %(default)s")
    options = parser.parse_args()
    files = resolve(options.model, Path(os.environ.get("KVMESH_CACHE_DIR", "~/.cache/kvmesh")))
    result = measure(files.directory, began)
    result["total_seconds"] = round(perf_counter() - began, 1)
    if not options.json:
        for name, value in result.items():
            print(f"{name:60} {value}")
    print(json.dumps(result))
    return 0 if result["logits_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
