"""How KV reaches a decoder: in memory that both map, or over the network; the same tokens, and nothing left of it."""

import asyncio
import random
from pathlib import Path

import pytest
from faults import Fault, brought_back, struck
from harness import Mesh
from load import LoadOf
from parity import Reference, answers, random_prompts

LENGTHS = [1, 7, 16, 37, 74, 200, 333, 333]
VICTIMS = ["p0 rank 0", "p0 rank 1", "decoder 0", "decoder 1"]


def named_segments() -> list[Path]:
    """Shared memory that has a name."""
    return sorted(Path("/dev/shm").iterdir())


def segments(mesh: Mesh, name: str) -> int:
    """Segments that a process maps."""
    lines = Path(f"/proc/{mesh.child(name).pid}/maps").read_text().splitlines()
    return sum("kvmesh-kv" in line for line in lines)


def descriptors(mesh: Mesh, name: str) -> int:
    """Descriptors of shared memory that a process has open."""
    links = []
    for path in Path(f"/proc/{mesh.child(name).pid}/fd").iterdir():
        try:
            links.append(str(path.readlink()))
        except FileNotFoundError:  # closed since it was listed
            continue
    return sum("kvmesh-kv" in link for link in links)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shared_mib", [0, 4, 16])
async def test_a_mesh_says_the_same_however_its_kv_travels(
    tmp_path: Path, tiny_model_dir: Path, shared_mib: int
) -> None:
    reference = Reference(tiny_model_dir)
    prompts = random_prompts(LENGTHS, reference.vocab_size)
    flags = ["--shared-mib", str(shared_mib), "--page-size", "5"]
    async with Mesh(tiny_model_dir, tmp_path, pp=2, decoder_flags=flags) as mesh:
        outputs = await answers(mesh.gateway, prompts, 12)
        pages = [await mesh.metrics(f"p0 rank {rank}") for rank in range(2)]
        mapped = segments(mesh, "decoder 0")
    for prompt, output in zip(prompts, outputs, strict=True):
        reference.check(prompt, output, 12)
    assert [page["kvmesh_segments_open"] for page in pages] == [float(shared_mib > 0)] * 2
    assert mapped == (2 if shared_mib else 0)
    assert min(page["kvmesh_kv_sent_bytes_total"] for page in pages) > 0


@pytest.mark.deep
@pytest.mark.slice
@pytest.mark.timeout(400)
async def test_kills_at_random_moments_leave_no_shared_memory_behind(tmp_path: Path, tiny_model_dir: Path) -> None:
    """F-A3, F-D17: what the dead had mapped is gone, the survivors map what they did before, and /dev/shm is untouched."""
    reference = Reference(tiny_model_dir)
    before = named_segments()
    load_of, at_random = LoadOf(prompt_lens=(60, 300), output_lens=(10, 30)), random.Random(5)
    async with Mesh(tiny_model_dir, tmp_path, pp=2, decoders=2, stage_flags=["--step-tokens", "16"]) as mesh:
        for victim in VICTIMS:
            async with load_of.on(mesh.gateway, reference, VICTIMS.index(victim)) as during:
                await during.more(2)
                await asyncio.sleep(at_random.uniform(0, 0.5))
                await struck(mesh, victim, Fault.KILL)
                await brought_back(mesh, victim, Fault.KILL)
            during.check(reference)
            assert not during.lost
        await mesh.idle()
        for name in ("p0 rank 0", "p0 rank 1", "decoder 0", "decoder 1"):
            assert (segments(mesh, name), descriptors(mesh, name)) == (2, 2), name
    assert named_segments() == before
