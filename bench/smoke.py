"""How fast is a whole mesh on this machine, next to transformers in one process? `python -m bench.smoke --json`

All processes share the machine: one thread a stage, two for the decoder and for the reference. The same prompt and weights
for both, greedy; mesh and reference take turns, so that noise hits both. Exits 1 if the tokens differ.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvmesh.cli.mesh import LocalMesh
from kvmesh.cli.shape import Shape
from kvmesh.cli.watch import until_ready
from kvmesh.client import Client
from kvmesh.model.files import ModelFiles
from kvmesh.model.source import resolve
from kvmesh.rpc.tasks import race
from kvmesh.text.tokenizer import Tokenizer

PP, THREADS, PROMPT_TOKENS, NEW_TOKENS, REPEATS = 2, 2, 512, 64, 3
NEAR_TIE = {"fp32": 1e-3, "bf16": 0.5}
"""How far below the reference's top logit a token of the mesh may lie: another batch or chunking rounds differently."""
TEXT = (
    "The tide turned before dawn, and the harbour master wrote down every boat that left: its name, its load, the hour. "
    "By noon the list was long, and nobody could say which of them would come back before the weather changed. "
)


@dataclass(frozen=True, slots=True)
class Run:
    """One answer."""

    tokens: list[int]
    ttft_seconds: float
    decode_seconds: float
    """First token until last."""

    @property
    def decode_rate(self) -> float:
        """Tokens a second, after the first."""
        return (len(self.tokens) - 1) / self.decode_seconds

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second, until the first token."""
        return PROMPT_TOKENS / self.ttft_seconds


async def ask_mesh(gateway: str, prompt: Sequence[int]) -> Run:
    """One request to a mesh."""
    tokens: list[int] = []
    first = 0.0
    async with Client(gateway) as client:
        began = perf_counter()
        async for piece in client.generate(tokens=prompt, max_output_tokens=NEW_TOKENS, ignore_eos=True):
            first = first or perf_counter()
            tokens += piece.tokens
        return Run(tokens, first - began, perf_counter() - first)


def ask_transformers(model: PreTrainedModel, prompt: Sequence[int]) -> Run:
    """The same of transformers' generate: once for the first token, once for all; the difference decodes."""
    ids = torch.tensor([list(prompt)])
    options = {
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
        "min_new_tokens": 1,
    }
    generate: Any = model.generate
    with torch.inference_mode():
        began = perf_counter()
        generate(ids, max_new_tokens=1, **options)
        first = perf_counter()
        out = generate(ids, **{**options, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS})
        ended = perf_counter()
    return Run(out[0, len(prompt) :].tolist(), first - began, (ended - first) - (first - began))


def worst_gap(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """The reference is fed the mesh's own tokens: how far the worst of them lies below its top logit."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    drawn = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((logits.max(dim=1).values - drawn).max())


async def measure(files: ModelFiles, dtype: str, directory: Path) -> dict[str, object]:
    """Runs both, in turns."""
    torch.set_num_threads(THREADS)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(files.directory, dtype=dtypes[dtype])
    model.train(False)
    words = Tokenizer.open(files).encode(TEXT * 30)
    shape = Shape(
        model=str(files.directory), cache_dir=directory, pp=PP, dtype=dtype, stage_threads=1, decoder_threads=THREADS
    )
    mesh_runs: list[Run] = []
    reference_runs: list[Run] = []
    worst = 0.0
    async with LocalMesh(shape, directory) as mesh:
        await race(mesh.watch(), mesh.serving())
        await until_ready(mesh.health("gateway"))
        for repeat in range(-1, REPEATS):  # the first warms both up
            prompt = words[repeat + 1 : repeat + 1 + PROMPT_TOKENS]
            ours, theirs = await ask_mesh(mesh.gateway, prompt), ask_transformers(model, prompt)
            worst = max(worst, worst_gap(model, prompt, ours.tokens))
            if repeat >= 0:
                mesh_runs.append(ours)
                reference_runs.append(theirs)
    decode, their_decode = (median(r.decode_rate for r in runs) for runs in (mesh_runs, reference_runs))
    prefill, their_prefill = (median(r.prefill_rate for r in runs) for runs in (mesh_runs, reference_runs))
    same = worst <= NEAR_TIE[dtype] and all(len(r.tokens) == NEW_TOKENS for r in mesh_runs)
    return {
        "pp": PP,
        "dtype": dtype,
        "threads": {"stage": 1, "decoder": THREADS, "transformers": THREADS},
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "repeats": REPEATS,
        "ttft_seconds": round(median(r.ttft_seconds for r in mesh_runs), 4),
        "decode_tokens_per_second": round(decode, 2),
        "prefill_tokens_per_second": round(prefill, 1),
        "transformers_decode_tokens_per_second": round(their_decode, 2),
        "transformers_prefill_tokens_per_second": round(their_prefill, 1),
        "decode_over_transformers": round(decode / their_decode, 3),
        "prefill_over_transformers": round(prefill / their_prefill, 3),
        "tokens_equal": same,
        "worst_logit_gap": round(worst, 6),
    }


def main() -> int:
    """Measures, prints, and tells whether the tokens agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    parser.add_argument("--model", default="smollm2", help="default %(default)s")
    parser.add_argument("--dtype", choices=sorted(NEAR_TIE), default="fp32", help="default %(default)s")
    options = parser.parse_args()
    cache = Path(os.environ.get("KVMESH_CACHE_DIR", "~/.cache/kvmesh"))
    files = resolve(options.model, cache)
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as directory:
        result = asyncio.run(measure(files, options.dtype, Path(directory)))
    if not options.json:
        for name, value in result.items():
            print(f"{name:42} {value}")
    print(json.dumps(result))
    return 0 if result["tokens_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
