"""How does the time of a prompt token grow with its context? `python -m bench.prefill_curve --json`

The last stage of a pipeline by itself, one thread, no mesh: step after step over one long prompt; a straight line through the
seconds a token of each step, by the middle of its context. docs/recompute-or-move.md calculates with the two numbers.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import linear_regression, median
from time import perf_counter

import torch

from kvmesh.kv.wire import TORCH_DTYPES
from kvmesh.model.runner import Runner, Span
from kvmesh.model.source import resolve

CACHE_DIR = Path(os.environ.get("KVMESH_CACHE_DIR", "~/.cache/kvmesh")).expanduser()
PAGE_SIZE = 16


def curve(runner: Runner, dtype: torch.dtype, prompt_len: int, step_tokens: int, rounds: int) -> dict[float, float]:
    """Seconds a token by context, each the median of the rounds; a round before them warms up."""
    seconds: dict[float, list[float]] = {}
    pages = range(runner.pool.num_pages)
    for _ in range(1 + rounds):
        for begin in range(0, prompt_len - step_tokens + 1, step_tokens):
            inputs = torch.randn(step_tokens, runner.hidden_size, dtype=dtype)
            began = perf_counter()
            runner.forward([Span(pages, begin, begin + step_tokens, sample=False)], inputs)
            seconds.setdefault(begin + step_tokens / 2, []).append((perf_counter() - began) / step_tokens)
    return {context: median(taken[1:]) for context, taken in seconds.items()}


def report(found: dict[float, float]) -> dict[str, float]:
    """The line through it, and its two ends as rates."""
    line = linear_regression(list(found), list(found.values()))
    first, last = min(found), max(found)
    return {
        "token_seconds": line.intercept,
        "context_seconds": line.slope,
        "tokens_per_second_first": round(1 / found[first], 1),
        "tokens_per_second_last": round(1 / found[last], 1),
        "context_last": last,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefill_curve", description=__doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print nothing but the JSON line")
    add("--model", default="smollm2", help="default %(default)s")
    add("--pp", type=int, default=2, help="stages; default %(default)s")
    add("--prompt-len", type=int, default=4096, help="tokens; default %(default)s")
    add("--step-tokens", type=int, default=128, help="default %(default)s")
    add("--rounds", type=int, default=3, help="default %(default)s")
    add("--dtype", default="fp32", choices=("fp32", "bf16"), help="default %(default)s")
    options = parser.parse_args(arguments)
    if options.step_tokens < 1 or options.prompt_len < 2 * options.step_tokens:
        parser.error("--prompt-len: at least two steps")
    if options.pp < 2 or options.rounds < 1:
        parser.error("--pp: at least 2; --rounds: at least 1")
    torch.set_num_threads(1)
    files = resolve(options.model, CACHE_DIR)
    num_layers = files.config.num_layers
    runner = Runner.load(
        files,
        (options.pp - 1) * num_layers // options.pp,
        num_layers,
        dtype=options.dtype,
        device="cpu",
        num_pages=-(-options.prompt_len // PAGE_SIZE),
        page_size=PAGE_SIZE,
    )
    found = curve(runner, TORCH_DTYPES[options.dtype], options.prompt_len, options.step_tokens, options.rounds)
    if not options.json:
        for context, seconds in found.items():
            print(f"{context:8g} tokens of context: {1 / seconds:8.1f} tokens/s")
    print(json.dumps({**report(found), "model": options.model, "pp": options.pp, "dtype": options.dtype}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
