"""Runs the bench; see the package's docstring. Exits 1 where less than the aim is hidden at the median."""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median

import torch

from bench.first_token import Load, ask, spread
from bench.kv_overlap.link import RoomShape, receiving
from bench.kv_overlap.tails import Tail, tail_of
from kvmesh.cli.mesh import LocalMesh
from kvmesh.cli.shape import Shape
from kvmesh.cli.spans import collect, members
from kvmesh.cli.watch import picture_now, until_ready
from kvmesh.client import Client
from kvmesh.model.source import resolve
from kvmesh.rpc.allocator import keep_freed_megabytes
from kvmesh.rpc.tasks import race

MOST_LEFT = 0.1
"""Of the transfer's time, that may lie after the last compute."""
OUTPUT_LEN = 2
"""A room whose first token is its last would need no KV."""
WARM_UPS = 8
"""Rooms over the link alone: until then both ends' heaps grow."""
MOST_SECONDS = 120.0
"""Of one request: then something is broken."""
CACHE_DIR = Path(os.environ.get("KVMESH_CACHE_DIR", "~/.cache/kvmesh")).expanduser()


def report(tails: Sequence[Tail], transfers: Sequence[float], room_bytes: int) -> dict[str, object]:
    """The figures, in seconds unless named otherwise.

    Args:
        transfers: of one room's KV by itself, one for each tail.
        room_bytes: of its KV.
    """
    tail, transfer = spread([t.seconds for t in tails]), median(transfers)
    left = tail["p50"] / transfer
    return {
        "tail_seconds_p50": tail["p50"],
        "tail_seconds_p99": tail["p99"],
        "transfer_seconds": round(transfer, 6),
        "hidden_share": round(1 - left, 4),
        "is_hidden": left <= MOST_LEFT,
        "requests": len(tails),
        "room_bytes": room_bytes,
        "link_bytes_per_second": round(room_bytes / transfer),
        "transfer": spread(transfers),
        "tail_parts": {part: spread([getattr(t, part) for t in tails]) for part in ("send", "arrive", "write")},
    }


async def measure(model: str, shape: RoomShape, requests: int, seed: int, directory: Path) -> dict[str, object]:
    """Brings a mesh up and asks; before each question the same KV goes its way without one."""
    rng, load = Random(seed), Load(requests, 1, (shape.prompt_len, shape.prompt_len), OUTPUT_LEN, seed)
    mesh_shape = Shape(
        model=model,
        cache_dir=CACHE_DIR,
        pp=shape.pp,
        dtype=shape.dtype,
        stage_flags=("--step-tokens", str(shape.step_tokens)),
        decoder_flags=("--shared-mib", "0"),  # over the network, as the link whose rate it is compared with
        stage_threads=1,
        decoder_threads=1,
    )
    async with LocalMesh(mesh_shape, directory) as mesh, receiving(shape) as receiver:
        await race(mesh.watch(), mesh.serving())
        await until_ready(mesh.health("gateway"))
        transfers, rooms = list[float](), list[int]()
        async with Client(mesh.gateway) as client:
            async with asyncio.timeout(MOST_SECONDS):
                for _ in range(WARM_UPS):
                    await receiver.room()
                await ask(client, rng, load)
            for _ in range(requests):
                async with asyncio.timeout(MOST_SECONDS):
                    transfers.append(await receiver.room())
                    rooms.append((await ask(client, rng, load)).end.room)
        addresses = members(await picture_now(mesh.registry, 5.0))
        tails = [await _tail(addresses, room) for room in rooms]
    figures = report(tails, transfers, shape.num_bytes)
    return {**figures, "model": model, "pp": shape.pp, "prompt_tokens": shape.prompt_len}


async def _tail(addresses: Sequence[str], room: int) -> Tail:
    answers, silent = await collect(addresses, room)
    assert not silent, silent
    return tail_of(answers, room)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.kv_overlap", description=__doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print nothing but the JSON line")
    add("--model", default="smollm2", help="default %(default)s")
    add("--pp", type=int, default=2, help="stages; default %(default)s")
    add("--requests", type=int, default=20, help="one after the other; default %(default)s")
    add("--prompt-len", type=int, default=2048, help="tokens; default %(default)s")
    add("--step-tokens", type=int, default=128, help="of a stage; default %(default)s, as its own")
    add("--dtype", default="fp32", choices=("fp32", "bf16"), help="default %(default)s")
    add("--seed", type=int, default=0, help="default %(default)s")
    options = parser.parse_args(arguments)
    if options.requests < 2:
        parser.error("--requests: at least 2")
    for name in ("pp", "prompt_len", "step_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and tells whether the aim is reached."""
    options = _options(arguments)
    keep_freed_megabytes()
    torch.set_num_threads(1)
    config = resolve(options.model, CACHE_DIR).config
    shape = RoomShape(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        options.dtype,
        options.pp,
        options.prompt_len,
        options.step_tokens,
    )
    with tempfile.TemporaryDirectory(prefix="kvmesh-kv-overlap-") as directory:
        found = asyncio.run(measure(options.model, shape, options.requests, options.seed, Path(directory)))
    if not options.json:
        print(json.dumps(found, indent=2))
    print(json.dumps(found))
    if not found["is_hidden"]:
        print(f"more than {MOST_LEFT:.0%} of the transfer's time lies after the last compute", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
