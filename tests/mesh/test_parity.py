"""The tokens of a mesh are those of one process, whatever its shape and however prompts are cut."""

import os
from pathlib import Path

import pytest
from harness import Mesh
from parity import NEAR_TIE, NEAR_TIE_ROUNDED, NEAR_TIE_ROUNDED_TINY, Reference, answers, random_prompts

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


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("stage_dtype", "decoder_dtype", "kv_wire", "near_tie"),
    [
        ("bf16", "fp32", "auto", NEAR_TIE_ROUNDED_TINY),
        ("fp32", "bf16", "auto", NEAR_TIE_ROUNDED_TINY),
        ("fp16", "fp32", "auto", NEAR_TIE_ROUNDED_TINY),
        ("fp32", "fp32", "int8", NEAR_TIE_ROUNDED_TINY),
        ("fp32", "fp32", "fp8", NEAR_TIE_ROUNDED_TINY),
        ("fp32", "fp32", "auto", NEAR_TIE),
    ],
)
async def test_a_tiny_model_says_the_same_between_any_two_formats(
    tmp_path: Path, tiny_model_dir: Path, stage_dtype: str, decoder_dtype: str, kv_wire: str, near_tie: float
) -> None:
    """Three stages in one format and pages of 16, a decoder in another and pages of 7."""
    reference = Reference(tiny_model_dir)
    prompts = random_prompts(TINY_LENGTHS, reference.vocab_size)
    flags = {
        "stage_flags": ["--step-tokens", "37", "--dtype", stage_dtype],
        "decoder_flags": ["--page-size", "7", "--dtype", decoder_dtype, "--kv-wire", kv_wire],
    }
    async with Mesh(tiny_model_dir, tmp_path, pp=3, **flags) as mesh:
        outputs = await answers(mesh.gateway, prompts, 12)
    for prompt, output in zip(prompts, outputs, strict=True):
        reference.check(prompt, output, 12, near_tie)


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


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("stage_dtype", "decoder_dtype"), [("bf16", "fp32"), ("fp32", "bf16")])
async def test_the_real_model_says_the_same_between_two_formats(
    tmp_path: Path, stage_dtype: str, decoder_dtype: str
) -> None:
    files = resolve("smollm2", CACHE)
    prompts = random_prompts([1, 17, 130, 300], files.config.vocab_size)
    flags = {
        "stage_flags": ["--step-tokens", "61", "--dtype", stage_dtype],
        "decoder_flags": ["--page-size", "24", "--dtype", decoder_dtype],
    }
    async with Mesh("smollm2", tmp_path, pp=3, cache_dir=CACHE, **flags) as mesh:
        outputs = await answers(mesh.gateway, prompts, 10)
    reference = Reference(files.directory)
    for prompt, output in zip(prompts, outputs, strict=True):
        reference.check(prompt, output, 10, NEAR_TIE_ROUNDED)
