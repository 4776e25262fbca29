"""Many requests at once, some of them cancelled at random moments: the others are right, and nothing is left behind."""

import asyncio
import random
from pathlib import Path

import pytest
from harness import Mesh
from parity import Reference, answer, random_prompts
from storm import storm

from kvmesh.client import Client

REQUESTS, OUTPUT = 32, 24


@pytest.mark.timeout(150)
async def test_a_third_of_32_requests_is_cancelled_and_every_other_is_right(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """F-A1, F-A2, F-P4: the harness checks that every page is free and no room is open."""
    reference = Reference(tiny_model_dir)
    rng = random.Random(5)
    prompts = random_prompts([rng.randint(1, 400) for _ in range(REQUESTS)], reference.vocab_size)
    flags = {"stage_flags": ["--num-pages", "96", "--step-tokens", "48"], "decoder_flags": ["--num-pages", "128"]}
    async with Mesh(tiny_model_dir, tmp_path, pp=2, **flags) as mesh:
        served = 0
        for wave in range(2):
            outputs = await storm(mesh.gateway, prompts, output_len=OUTPUT, share=1 / 3, within_seconds=1.5, seed=wave)
            await mesh.idle()
            for prompt, output in zip(prompts, outputs, strict=True):
                if output is not None:
                    reference.check(prompt, output, OUTPUT)
            served += sum(output is not None for output in outputs)
            assert served < REQUESTS * (wave + 1)
        # A client of ours hangs up with its last token: it was served, and is not counted among those that gave up.
        assert (await mesh.metrics("gateway"))['kvmesh_requests_total{code="OK"}'] >= served


@pytest.mark.deep
@pytest.mark.slice
@pytest.mark.timeout(150)
async def test_two_pipelines_and_two_decoders_share_the_load(tmp_path: Path, tiny_model_dir: Path) -> None:
    reference = Reference(tiny_model_dir)
    prompts = random_prompts([60] * 24, reference.vocab_size)
    async with Mesh(tiny_model_dir, tmp_path, pp=2, pipelines=2, decoders=2) as mesh:
        async with Client(mesh.gateway) as client:
            outputs = await asyncio.gather(*(answer(client, prompt, 8) for prompt in prompts))
        for prompt, output in zip(prompts, outputs, strict=True):
            reference.check(prompt, output, 8)
        for name in ("p0 rank 0", "p1 rank 1", "decoder 0", "decoder 1"):
            page = await mesh.metrics(name)
            done = page.get("kvmesh_prefill_tokens_total", 0) + page.get("kvmesh_decode_tokens_total", 0)
            assert done > 0, f"{name} did nothing"
