"""A lost process: what it ends, what it leaves alone, and that its place can be taken."""

import asyncio
import signal
from pathlib import Path

import pytest
from harness import Mesh
from parity import Reference, answer, answers, random_prompts

from kvmesh.client import Client


def is_whole(generation: int) -> object:
    return lambda picture: bool(picture.pipelines) and picture.pipelines[0].generation not in (0, generation)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("p0 rank 0", marks=[pytest.mark.deep, pytest.mark.slice]),
        "p0 rank 1",
        pytest.param("p0 rank 2", marks=[pytest.mark.deep, pytest.mark.slice]),
    ],
)
async def test_a_killed_stage_is_replaced_and_the_survivors_serve_on(
    tmp_path: Path, tiny_model_dir: Path, victim: str
) -> None:
    """F-D3, F-D7, F-D10: the request that was under way continues in the next generation, no token twice, none missing."""
    reference = Reference(tiny_model_dir)
    (prompt,) = random_prompts([200], reference.vocab_size)
    async with Mesh(tiny_model_dir, tmp_path, pp=3, stage_flags=["--step-tokens", "2"]) as mesh:
        before = (await mesh.paired()).pipelines[0].generation
        async with Client(mesh.gateway) as client:
            under_way = asyncio.ensure_future(answer(client, prompt, 40))
            while not (await mesh.metrics("p0 rank 0"))["kvmesh_rooms_open"] and not under_way.done():
                pass
            await mesh.killed(victim)
            await mesh.started_again(victim)
            await mesh.pictured(is_whole(before))
            reference.check(prompt, await under_way, 40)


@pytest.mark.timeout(150)
async def test_a_room_in_the_step_that_was_lost_is_named_and_tried_again(tmp_path: Path, tiny_model_dir: Path) -> None:
    """docs/protocol.md §4: the decoder's link to the dead stage breaks first; rank 0's last words are heard all the same."""
    reference = Reference(tiny_model_dir)
    (prompt,) = random_prompts([50], reference.vocab_size)
    async with Mesh(tiny_model_dir, tmp_path, pp=2) as mesh:
        await mesh.paired()
        async with Client(mesh.gateway) as client:
            mesh.signal("p0 rank 1", signal.SIGSTOP)
            under_way = asyncio.ensure_future(answer(client, prompt, 8))
            while not (await mesh.metrics("p0 rank 0"))["kvmesh_steps_in_flight"]:
                pass
            await mesh.killed("p0 rank 1")
            await mesh.started_again("p0 rank 1")
            reference.check(prompt, await under_way, 8)
        page = await mesh.metrics("gateway")
        assert page['kvmesh_attempts_failed_total{reason="in_lost_step"}'] == 1


@pytest.mark.timeout(150)
async def test_a_killed_registry_touches_nothing_that_runs(tmp_path: Path, tiny_model_dir: Path) -> None:
    """F-D15, F-N1"""
    reference = Reference(tiny_model_dir)
    prompts = random_prompts([100, 50], reference.vocab_size)
    async with Mesh(tiny_model_dir, tmp_path, pp=2) as mesh:
        before = (await mesh.paired()).pipelines[0].generation
        async with Client(mesh.gateway) as client:
            running = client.generate(tokens=prompts[0], max_output_tokens=200, ignore_eos=True)
            output = list((await anext(running)).tokens)
            await mesh.killed("bootstrap")
            async for piece in running:
                output += piece.tokens
            reference.check(prompts[0], output, 200)
            waiting = asyncio.ensure_future(answer(client, prompts[1], 8))
            await mesh.started_again("bootstrap")
            reference.check(prompts[1], await waiting, 8)
        assert (await mesh.paired()).pipelines[0].generation == before


@pytest.mark.deep
@pytest.mark.slice
@pytest.mark.timeout(150)
async def test_a_killed_decoder_takes_only_its_own_rooms_with_it(tmp_path: Path, tiny_model_dir: Path) -> None:
    """F-D5, F-D17: its requests go on at the other decoder."""
    reference = Reference(tiny_model_dir)
    prompts = random_prompts([80] * 8, reference.vocab_size)
    async with Mesh(tiny_model_dir, tmp_path, pp=2, decoders=2) as mesh:
        waiting = asyncio.ensure_future(answers(mesh.gateway, prompts, 150))
        while not (await mesh.metrics("decoder 1"))["kvmesh_rooms_open"] and not waiting.done():
            pass
        await mesh.killed("decoder 1")
        for prompt, output in zip(prompts, await waiting, strict=True):
            reference.check(prompt, output, 150)


@pytest.mark.deep
@pytest.mark.slice
@pytest.mark.timeout(150)
async def test_a_decoder_that_leaves_hands_over_what_it_can_not_finish(tmp_path: Path, tiny_model_dir: Path) -> None:
    """F-D14"""
    reference = Reference(tiny_model_dir)
    prompts = random_prompts([30] * 4, reference.vocab_size)
    async with Mesh(tiny_model_dir, tmp_path, pp=1, decoders=2) as mesh:
        waiting = asyncio.ensure_future(answers(mesh.gateway, prompts, 100))
        while not (await mesh.metrics("decoder 0"))["kvmesh_rooms_open"] and not waiting.done():
            pass
        mesh.lost("decoder 0")
        mesh.signal("decoder 0", signal.SIGTERM)
        for prompt, output in zip(prompts, await waiting, strict=True):
            reference.check(prompt, output, 100)
