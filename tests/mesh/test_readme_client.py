"""The Python client that README.md shows is the one that works: taken from the page and run against a mesh."""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest
from harness import Mesh

from kvmesh.client import Client

README = (Path(__file__).parents[2] / "README.md").read_text()
MOST_LINES = 10


def shown_client() -> str:
    found = re.search(r"<!-- client -->\n```python\n(.*?)```", README, re.DOTALL)
    assert found is not None, "README.md marks its client with <!-- client -->"
    return found.group(1)


async def run(arguments: list[str], environment: dict[str, str], directory: Path) -> str:
    script = directory / "client.py"
    script.write_text(shown_client())
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), *arguments),
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(), 50)
    except BaseException:
        process.kill()
        await process.wait()
        raise
    assert (process.returncode, errors.decode()) == (0, "")
    return out.decode()


def test_the_client_has_ten_lines_and_needs_only_grpc_and_the_contracts() -> None:
    lines = shown_client().splitlines()
    assert len(lines) <= MOST_LINES
    assert max(len(line) for line in lines) <= 120
    imports = [line for line in lines if re.match(r"import|from", line)]
    assert [
        line for line in imports if not re.fullmatch(r"import os, sys, grpc|from kvmesh\.v1\..* import .*", line)
    ] == []


@pytest.mark.timeout(120)
async def test_the_client_prints_what_the_mesh_says(tiny_model_dir: Path, tmp_path: Path) -> None:
    (question,) = re.findall(r'content="(.*?)"', shown_client())
    (most,) = re.findall(r"max_output_tokens=(\d+)", shown_client())
    async with Mesh(tiny_model_dir, tmp_path, pp=2) as mesh:
        async with Client(mesh.gateway) as client:
            pieces = client.generate(messages=[{"role": "user", "content": question}], max_output_tokens=int(most))
            said = "".join([piece.text async for piece in pieces])
        assert said
        assert await run([mesh.gateway], {}, tmp_path) == said + "\n"
        assert await run([], {"KVMESH_GATEWAY": mesh.gateway}, tmp_path) == said + "\n"
