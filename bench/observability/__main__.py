"""Measures: `python -m bench.observability --json`; the last line is JSON. Exits 1 where what observes costs over 2 %."""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from statistics import median
from time import monotonic

from bench.observability import tiny
from bench.observability.interval import of_median
from bench.observability.load import PROMPT_TOKENS, Load
from bench.observability.mesh import SwitchedMesh
from bench.observability.pages import Scraper
from bench.observability.pairs import Pair, Pairs
from kvmesh.cli.shape import Shape
from kvmesh.model.files import ModelFiles
from kvmesh.model.source import resolve

PP, ANSWER_TOKENS = 2, 1000
HIGHEST_RATIO = 1.02
"""Where even the low end of the interval is above it, the cost is certain, and too much."""
PAIRS, FEWEST_PAIRS, RUN_TOKENS = 120, 10, 8
QUICK_SECONDS = 40.0
"""After the start: no further pair begins then. With the mesh's end that stays within a minute."""
SCRAPE_SECONDS = 15.0
"""As in deploy/monitoring/prometheus.yaml."""
MOST_ANSWERS = 16
"""What fits the pages that a decoder has by default."""

Result = dict[str, float]


async def measure(
    files: ModelFiles, directory: Path, options: argparse.Namespace, wanted: Callable[[int], bool]
) -> tuple[list[Pair], int]:
    """The pairs of one mesh, and how many pages were scraped."""
    # One thread for the decoder: a second one would wait for the cores that all the others use.
    shape = Shape(model=str(files.directory), cache_dir=directory, pp=PP, stage_threads=1, decoder_threads=1)
    load = Load(options.concurrency, min(ANSWER_TOKENS, files.config.max_positions - PROMPT_TOKENS))
    async with SwitchedMesh(shape, directory) as mesh:
        scraper = Scraper(mesh.metrics_addresses, options.scrape_seconds)
        pairs = await Pairs(mesh, load, scraper, options.tokens).measure(wanted)
    return pairs, scraper.num_pages


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.observability", description=__doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print nothing but the JSON line")
    add("--quick", action="store_true", help=f"under a minute: {FEWEST_PAIRS} pairs, and as many more as fit")
    add("--model", default="smollm2", help=f"as `kvmesh up` takes it, or {tiny.NAME}; default %(default)s")
    add("--pairs", type=int, default=PAIRS, help=f"{FEWEST_PAIRS} or more; default %(default)s")
    add("--tokens", type=int, default=RUN_TOKENS, help="of each answer in a run; default %(default)s")
    add("--concurrency", type=int, default=4, help=f"answers at once, at most {MOST_ANSWERS}; default %(default)s")
    add(
        "--scrape-seconds",
        type=float,
        default=SCRAPE_SECONDS,
        help="between two readings of a page; default %(default)s",
    )
    options = parser.parse_args(arguments)
    for name, least, most in (("pairs", FEWEST_PAIRS, inf), ("tokens", 1, inf), ("concurrency", 1, MOST_ANSWERS)):
        if not least <= getattr(options, name) <= most:
            parser.error(f"--{name} is {getattr(options, name)}; {least} to {most} is possible")
    if options.scrape_seconds <= 0:
        parser.error(f"--scrape-seconds is {options.scrape_seconds:g}; more than 0 is needed")
    return options


def report(pairs: Sequence[Pair]) -> Result:
    """What comes out of the pairs."""
    ratio = of_median([pair.ratio for pair in pairs])
    return {
        "ratio_median": round(ratio.median, 4),
        "ratio_low": round(ratio.low, 4),
        "ratio_high": round(ratio.high, 4),
        "pairs": len(pairs),
        "confidence": round(ratio.confidence, 4),
        "on_tokens_per_second": round(median(pair.on for pair in pairs), 1),
        "off_tokens_per_second": round(median(pair.off for pair in pairs), 1),
    }


def too_much(result: Result) -> str:
    """What is said where the cost is certain, and too much; else nothing."""
    if result["ratio_low"] <= HIGHEST_RATIO:
        return ""
    return f"metrics and spans cost too much: ratio_low is {result['ratio_low']}, above {HIGHEST_RATIO}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and tells whether the cost is small enough."""
    began = monotonic()
    options = parse(arguments)
    until = began + QUICK_SECONDS if options.quick else inf

    def wanted(num_pairs: int) -> bool:
        return num_pairs < FEWEST_PAIRS or (num_pairs < options.pairs and monotonic() < until)

    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as name:
        directory = Path(name)
        model = str(tiny.write(directory / "model")) if options.model == tiny.NAME else options.model
        files = resolve(model, Path(os.environ.get("KVMESH_CACHE_DIR", "~/.cache/kvmesh")))
        pairs, num_pages = asyncio.run(measure(files, directory, options, wanted))
    result = report(pairs)
    settings = {
        "model": options.model,
        "pp": PP,
        "concurrency": options.concurrency,
        "run_tokens": options.tokens,
        "scrape_seconds": options.scrape_seconds,
        "pages_scraped": num_pages,
        "total_seconds": round(monotonic() - began, 1),
    }
    if not options.json:
        for key, value in {**result, **settings}.items():
            print(f"{key:24} {value}")
    print(json.dumps({**result, **settings}))
    refusal = too_much(result)
    if refusal:
        print(refusal, file=sys.stderr)
    return 1 if refusal else 0


if __name__ == "__main__":
    sys.exit(main())
