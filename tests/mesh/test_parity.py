"""The tokens of a mesh are those of one process, whatever its shape and however prompts are cut."""

import os
from pathlib import Path

import pytest
from harness import Mesh
from parity import Reference, answers, random_prompts

from kvmesh.model.source import resolve

CACHE = Path(os.environ.get("KVMESH_CACHE_DIR", "~/.cache/kvmesh"))
TINY_LENGTHS = [1, 2, 7, 36, 37, 38, 74, 111, 200, 333]
LENGTHS = [1, 2, 15, 16, 17, 40, 96, 97, 128, 129, 200, 255, 300, 512, 513, 700, 1000, 1300, 1777, 2000]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("pp", [1, 3])
async def test_a_tiny_model_says_the_same_through_any_number_of_stages(
    tmp_path: Path, tiny_model_dir: Path, pp: int
) -> None:
    """Chunks of 37 tokens, pages of 16 and 5 that divide nothing, all prompts at once."""
    reference = Reference(tiny_model_dir)
    prompts = random_prompts(TINY_LENGTHS, reference.vocab_size)
    flags = {"stage_flags": ["--step-tokens", "37"], "decoder_flags": ["--page-size", "5"]}
    async with Mesh(tiny_model_dir, tmp_path, pp=pp, **flags) as mesh:
        outputs = await answers(mesh.gateway, prompts, 12)
    for prompt, output in zip(prompts, outputs, strict=True):
        reference.check(prompt, output, 12)


@pytest.mark.timeout(180)
async def test_the_real_model_says_the_same_through_two_stages(tmp_path: Path) -> None:
    files = resolve("smollm2", CACHE)
    prompts = random_prompts([1, 53, 160], files.config.vocab_size)
    async with Mesh("smollm2", tmp_path, pp=2, cache_dir=CACHE, stage_flags=["--step-tokens", "47"]) as mesh:
        outputs = await answers(mesh.gateway, prompts, 10)
    reference = Reference(files.directory)
    for prompt, output in zip(prompts, outputs, strict=True):
        reference.check(prompt, output, 10)


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("pp", "step_tokens"), [(1, 113), pytest.param(2, 97, marks=pytest.mark.slice), (3, 61)])
async def test_twenty_prompts_of_the_real_model(tmp_path: Path, pp: int, step_tokens: int) -> None:
    files = resolve("smollm2", CACHE)
    prompts = random_prompts(LENGTHS, files.config.vocab_size, seed=pp)
    shape = {
        "stage_flags": ["--step-tokens", str(step_tokens), "--num-pages", "1500"],
        "decoder_flags": ["--page-size", "24", "--num-pages", "700"],
    }
    async with Mesh("smollm2", tmp_path, pp=pp, cache_dir=CACHE, **shape) as mesh:
        outputs = await answers(mesh.gateway, prompts, 16)
    reference = Reference(files.directory)
    for prompt, output in zip(prompts, outputs, strict=True):
        reference.check(prompt, output, 16)
