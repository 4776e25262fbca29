"""Where does the time to the first token go, on the real model? `python -m bench.first_token --json`

Each answer carries its own split (`Timing`). The parts lie on the critical path, each on one clock; `other` is what no part
names. Times of single ranks overlap each other, so they stand apart: from the stages' own spans. Exits 1 where `other` is
more than a share of the whole and more than a few milliseconds, both at the median, or where the parts of an answer add up
to more than its client saw.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median, quantiles
from time import perf_counter

from kvmesh.cli.mesh import LocalMesh
from kvmesh.cli.shape import Shape
from kvmesh.cli.spans import collect, members, rows
from kvmesh.cli.watch import picture_now, until_ready
from kvmesh.client import TIMING_PARTS, Client, End
from kvmesh.rpc.tasks import race

MOST_SHARE, MOST_SECONDS = 0.02, 0.005
"""Of `other`: either is enough."""
VOCABULARY = 10_000
"""Prompts are drawn from these tokens: what they say does not matter here."""
WARM_UPS = 3
CACHE_DIR = Path(os.environ.get("KVMESH_CACHE_DIR", "~/.cache/kvmesh")).expanduser()


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: what the gateway tells of its time, and what its client saw."""

    end: End
    client_seconds: float
    """From the call until the first token was read."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked."""

    requests: int
    clients: int
    prompt_lens: tuple[int, int]
    """Tokens, shortest and longest."""
    output_len: int
    seed: int


async def ask(client: Client, rng: Random, load: Load) -> Asked:
    """One request of a random prompt."""
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(*load.prompt_lens))]
    began, first, end = perf_counter(), 0.0, None
    async for piece in client.generate(tokens=prompt, max_output_tokens=load.output_len, ignore_eos=True):
        first = first or perf_counter()
        end = piece.end or end
    assert end is not None, "an answer ends"
    return Asked(end, first - began)


async def ask_all(gateway: str, load: Load) -> list[Asked]:
    """All requests: each client asks one after the other."""
    rng = Random(load.seed)
    asked: list[Asked] = []
    async with Client(gateway) as client:
        for _ in range(WARM_UPS):
            await ask(client, rng, load)

        async def keep_asking(number: int) -> None:
            own = Random(f"{load.seed} {number}")
            for _ in range(load.requests // load.clients + (number < load.requests % load.clients)):
                asked.append(await ask(client, own, load))

        await asyncio.gather(*map(keep_asking, range(load.clients)))
    return asked


async def compute_seconds(mesh: LocalMesh, rooms: Iterable[int]) -> dict[str, list[float]]:
    """What each stage computed for each room, by stage."""
    addresses = members(await picture_now(mesh.registry, 5.0))
    by_stage: dict[str, list[float]] = {}
    for room in rooms:
        answers, silent = await collect(addresses, room)
        assert not silent, silent
        for row in rows(answers, room):
            if row.name == "prefill":
                by_stage.setdefault(row.process, []).append(float(row.attributes["compute_seconds"]))
    return dict(sorted(by_stage.items()))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and tails, in the unit of the values."""
    cuts = quantiles(values, n=100, method="inclusive")
    return {"p50": round(median(values), 6), "p95": round(cuts[94], 6), "p99": round(cuts[98], 6)}


def report(asked: Sequence[Asked], by_stage: dict[str, list[float]]) -> dict[str, object]:
    """The figures, in seconds unless named otherwise."""
    wholes = [one.end.time_to_first_token_seconds for one in asked]
    parts = {part: [one.end.parts_seconds[part] for one in asked] for part in TIMING_PARTS}
    beyond = [whole - one.client_seconds for one, whole in zip(asked, wholes, strict=True)]
    shares = [other / whole for other, whole in zip(parts["other"], wholes, strict=True)]
    other, share = median(parts["other"]), median(shares)
    return {
        "requests": len(asked),
        "other_seconds_p50": round(other, 6),
        "other_share_p50": round(share, 4),
        "is_explained": max(beyond) <= 0 and (share <= MOST_SHARE or other <= MOST_SECONDS),
        "time_to_first_token": spread(wholes),
        "parts": {part: spread(values) for part, values in parts.items()},
        "seen_by_client": spread([one.client_seconds for one in asked]),
        "parts_exceed_what_client_saw": sum(seconds > 0 for seconds in beyond),
        "compute_by_rank": {stage: spread(values) for stage, values in by_stage.items()},
    }


async def measure(model: str, pp: int, load: Load, directory: Path) -> dict[str, object]:
    """Brings a mesh up, asks, and reports."""
    shape = Shape(model=model, cache_dir=CACHE_DIR, pp=pp, stage_threads=1, decoder_threads=1)
    async with LocalMesh(shape, directory) as mesh:
        await race(mesh.watch(), mesh.serving())
        await until_ready(mesh.health("gateway"))
        asked = await ask_all(mesh.gateway, load)
        by_stage = await compute_seconds(mesh, [one.end.room for one in asked])
    return {"model": model, "pp": pp, "clients": load.clients, **report(asked, by_stage)}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.first_token", description=__doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print nothing but the JSON line")
    add("--model", default="smollm2", help="default %(default)s")
    add("--pp", type=int, default=2, help="stages; default %(default)s")
    add("--requests", type=int, default=100, help="default %(default)s")
    add("--clients", type=int, default=1, help="each asks one after the other; default %(default)s")
    add("--prompt-lens", type=int, nargs=2, default=(64, 512), help="tokens, shortest and longest; default 64 512")
    add("--output-len", type=int, default=8, help="tokens; default %(default)s")
    add("--seed", type=int, default=0, help="default %(default)s")
    options = parser.parse_args(arguments)
    if options.requests < max(2, options.clients) or options.clients < 1:
        parser.error("--requests: at least 2, and at least one for each of --clients")
    if not 1 <= options.prompt_lens[0] <= options.prompt_lens[1]:
        parser.error("--prompt-lens: 1 or more, the shortest first")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and tells whether the parts explain the whole."""
    options = _options(arguments)
    load = Load(options.requests, options.clients, tuple(options.prompt_lens), options.output_len, options.seed)
    with tempfile.TemporaryDirectory(prefix="kvmesh-first-token-") as directory:
        found = asyncio.run(measure(options.model, options.pp, load, Path(directory)))
    if not options.json:
        print(json.dumps(found, indent=2))
    print(json.dumps(found))
    if not found["is_explained"]:
        limits = f"`other` above {MOST_SHARE:.0%} and above {MOST_SECONDS * 1e3:g} ms"
        print(f"the parts do not explain the whole: {limits}, or more than clients saw", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
