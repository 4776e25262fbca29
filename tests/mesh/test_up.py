"""`kvmesh up`, `chat` and `status` as a person meets them: real processes on a tiny random model."""

import asyncio
import json
import os
import pty
import re
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.waiting import process_end

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
_PATIENCE_SECONDS = 100
"""Four processes load torch on cores that others use as well."""
FAST = ("--stage-threads", "1", "--decoder-threads", "1")
ANYWHERE = ("--listen", "127.0.0.1:0", "--bootstrap-listen", "127.0.0.1:0")


class Command:
    """A `kvmesh` command that runs, and what it said so far."""

    def __init__(self, process: asyncio.subprocess.Process, temporary: Path) -> None:
        self.process = process
        self.temporary = temporary
        """Where it makes its own directories."""
        self.out = ""

    async def said(self, pattern: str) -> re.Match[str]:
        """Waits until its output matches."""
        assert self.process.stdout is not None
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while not (found := re.search(pattern, self.out)):
                line = (await self.process.stdout.readline()).decode()
                assert line, f"ended without {pattern!r}:\n{self.out}"
                self.out += line
        return found

    async def end(self) -> int:
        """Waits for its end; its exit code."""
        out, _ = await asyncio.wait_for(self.process.communicate(), _PATIENCE_SECONDS)
        self.out += out.decode()
        assert self.process.returncode is not None
        return self.process.returncode

    async def children(self) -> dict[str, int]:
        """Its services by module, as the system sees them now."""
        return await asyncio.to_thread(_children_of, self.process.pid)


def _children_of(parent: int) -> dict[str, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            stat, words = (
                (entry / "stat").read_text().rpartition(")")[2].split(),
                (entry / "cmdline").read_text().split("\0"),
            )
        except OSError:
            continue
        module = next((w for w in words if w.startswith("services.")), None)
        if module is not None and (int(stat[1]) == parent or str(parent) in words) and stat[0] != "Z":
            found[module] = int(entry.name)
    return found


@asynccontextmanager
async def kvmesh(*arguments: str) -> AsyncIterator[Command]:
    """Runs a command; nothing of it is left at the end."""
    with tempfile.TemporaryDirectory() as temporary:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvmesh.cli", *arguments),
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": temporary},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        command = Command(process, Path(temporary))
        try:
            yield command
        finally:
            left = await command.children()
            if process.returncode is None:
                process.kill()
                await process.communicate()
            for pid in left.values():
                await process_end(pid)


async def test_one_prompt_is_answered_with_order_and_time_split_and_nothing_is_left(tiny_model_dir: Path) -> None:
    flags = ("--model", str(tiny_model_dir), "--pp", "2", "--max-tokens", "8", *FAST)
    async with kvmesh("up", *flags, "--prompt", "Why is the sky blue?") as up:
        code = await up.end()
        assert code == 0, up.out
        assert await up.children() == {}
        assert list(up.temporary.iterdir()) == []
    order = [
        "p0 rank 1 admitted",
        "p0 rank 0 admitted → p0 whole",
        "paired with p0",
        "ready: gateway",
        "> Why is the sky blue?",
    ]
    assert [up.out.index(line) for line in order] == sorted(up.out.index(line) for line in order)
    for part in ("assign", "reserve", "queue", "prefill", "transfer tail", "join", "other", "total", "decode"):
        assert re.search(rf"^{part} +[0-9.]+ ", up.out, re.MULTILINE), part
    assert re.search(r"tokens, [0-9.]+ tokens/s", up.out)


@asynccontextmanager
async def up_and_ready(model: Path, *flags: str) -> AsyncIterator[tuple[Command, str, str]]:
    """A mesh that is up, its gateway and its registry; Ctrl-C ends it well."""
    async with kvmesh("up", "--model", str(model), *ANYWHERE, *FAST, *flags) as up:
        gateway = (await up.said(r"chat --gateway (\S+)")).group(1)
        registry = (await up.said(r"status --bootstrap (\S+)")).group(1)
        await up.said("Ctrl-C ends")
        yield up, gateway, registry
        up.process.send_signal(signal.SIGINT)
        code = await up.end()
        assert code == 0, up.out
        assert await up.children() == {}


async def test_a_mesh_that_is_up_can_be_talked_to_and_looked_at(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with up_and_ready(tiny_model_dir, "--pp", "1", "--state-dir", str(tmp_path)) as (_, gateway, registry):
        await _talks_over_a_pipe(gateway)
        await _talks_in_a_terminal(gateway)
        await _shows_the_mesh(registry)
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert set(logs) == {"bootstrap.log", "p0-rank-0.log", "decoder-0.log", "gateway.log"}
    ended = [
        re.search(r"(\S+) info \S+ (?:\[.*?\] )?SIGTERM: draining", logs[n]) for n in sorted(logs, key=_END_ORDER.index)
    ]
    times = [found.group(1) for found in ended if found is not None]
    assert len(times) == 4
    assert times == sorted(times), "gateway, decoder, stage, registry"


MOST_HURRIED = 5
"""Answers of the tiny model take a second: on a busy machine one may end before this test has seen its beginning."""
_END_ORDER = ["gateway.log", "decoder-0.log", "p0-rank-0.log", "bootstrap.log"]


async def _talks_over_a_pipe(gateway: str) -> None:
    """Each line is a turn; answers to stdout, how fast to stderr."""
    chat = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli", "chat", "--gateway", gateway, "--max-tokens", "6"),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(chat.communicate(b"hello\n\nand again\n"), 30)
    assert chat.returncode == 0, err
    assert out
    assert len(re.findall(rb"tokens, the first after [0-9.]+ s", err)) == 2


async def _talks_in_a_terminal(gateway: str) -> None:
    """Ctrl-C cancels the answer, Ctrl-D ends."""
    terminal, side = pty.openpty()
    chat = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli", "chat", "--gateway", gateway, "--max-tokens", "400"),
        cwd=ROOT,
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # makes it the controlling terminal
    )
    os.close(side)
    try:
        await _seen(terminal, b"you> ")
        for _ in range(MOST_HURRIED):
            os.write(terminal, b"hello\n")
            await _seen(terminal, b"hello\r\n(?s:.)")
            os.write(terminal, b"\x03")
            if b"(cancelled)" in await _seen(terminal, rb"\(\w.*\)(?s:.)*you> "):
                break
        else:
            raise AssertionError("each answer ended before Ctrl-C was heard")
        os.write(terminal, b"\x04")
        assert await asyncio.wait_for(chat.wait(), 20) == 0
    finally:
        if chat.returncode is None:
            chat.kill()
            await chat.wait()
        os.close(terminal)


async def _seen(terminal: int, pattern: bytes) -> bytes:
    """Reads the terminal until it shows a pattern; returns all that it showed."""
    shown = b""
    async with asyncio.timeout(20):
        while not re.search(pattern, shown):
            shown += await asyncio.to_thread(os.read, terminal, 4096)
    return shown


async def _shows_the_mesh(registry: str) -> None:
    async with kvmesh("status", "--bootstrap", registry) as status:
        assert await status.end() == 0
    assert re.search(r"p0 +1\.1 +0 +admitted +0:6", status.out)
    assert re.search(r"[0-9a-f]{6} +p0 ", status.out)
    async with kvmesh("status", "--bootstrap", registry, "--json") as status:
        assert await status.end() == 0
    picture = json.loads(status.out)
    assert picture["pipelines"][0]["seats"][0]["state"] == "SEAT_STATE_ADMITTED"
    async with kvmesh("status", "--bootstrap", registry, "--watch") as status:
        await status.said(r"decoder [0-9a-f]{6} paired with p0")
        status.process.send_signal(signal.SIGINT)
        assert await status.end() == 0


async def test_dead_children_are_started_again_where_that_was_asked_for(tiny_model_dir: Path) -> None:
    async with up_and_ready(tiny_model_dir, "--pp", "1", "--restart") as (up, gateway, _):
        children = await up.children()
        for module in ("services.prefill", "services.bootstrap"):
            os.kill(children[module], signal.SIGKILL)
        await up.said(r"p0 rank 0 was ended by SIGKILL; its last lines:")
        await up.said(r"bootstrap is started again")
        await up.said(r"p0 rank 0 is started again")
        await up.said(r"the registry restarted: term 2")
        await up.said(r"paired with p0(?s:.)*started again(?s:.)*paired with p0")
        await _talks_over_a_pipe(gateway)


@asynccontextmanager
async def just_started(model: Path) -> AsyncIterator[tuple[Command, dict[str, int]]]:
    """A mesh whose registry serves and whose members still load, and its processes."""
    async with kvmesh("up", "--model", str(model), "--pp", "1", *ANYWHERE, *FAST) as up:
        await up.said("started: bootstrap, p0 rank 0, decoder 0, gateway")
        children = await up.children()
        assert len(children) == 4
        yield up, children
        for pid in children.values():
            await process_end(pid)


async def test_a_dead_child_is_named_with_its_last_lines_and_ends_the_rest(tiny_model_dir: Path) -> None:
    async with just_started(tiny_model_dir) as (up, children):
        os.kill(children["services.bootstrap"], signal.SIGKILL)
        assert await up.end() == 1
        assert re.search(r"bootstrap was ended by SIGKILL; its last lines:\n.* info bootstrap ", up.out)
        [kept] = up.temporary.iterdir()
        assert f"logs: {kept}" in up.out


async def test_an_interrupt_while_members_still_load_ends_all_of_them_well(tiny_model_dir: Path) -> None:
    async with just_started(tiny_model_dir) as (up, _):
        up.process.send_signal(signal.SIGTERM)
        assert await up.end() == 0, up.out


async def test_a_second_interrupt_kills_what_hangs(tiny_model_dir: Path) -> None:
    async with just_started(tiny_model_dir) as (up, children):
        os.kill(children["services.gateway"], signal.SIGSTOP)
        up.process.send_signal(signal.SIGINT)
        await up.said("ending: gateway, decoders, stages, registry")
        up.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(up.end(), 8) == 130


async def test_no_process_outlives_a_parent_that_was_killed(tiny_model_dir: Path) -> None:
    async with just_started(tiny_model_dir) as (up, _):
        up.process.kill()
        await up.end()


async def test_a_port_in_use_names_the_service_and_the_setting(tiny_model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        async with kvmesh("up", "--model", str(tiny_model_dir), "--bootstrap-listen", address) as up:
            assert await up.end() == 1
    assert "bootstrap ended with exit code 2" in up.out
    assert f"listen is {address}: Address already in use" in up.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("up", "--model", "/nonexistent"), "model '/nonexistent' is neither"),
        (("up", "--pp", "0"), "'0' is not a whole number above 0"),
        (("up", "--dtype", "int3"), "invalid choice"),
        ((), "up | chat | status"),
    ],
)
async def test_wrong_use_is_told_before_anything_starts(arguments: tuple[str, ...], said: str) -> None:
    async with kvmesh(*arguments) as command:
        assert await command.end() == 2
    assert said in command.out


@pytest.mark.parametrize("arguments", [(), ("--json",)])
async def test_a_registry_that_is_away_is_one_line(arguments: tuple[str, ...]) -> None:
    async with kvmesh("status", "--bootstrap", "127.0.0.1:1", *arguments) as command:
        assert await command.end() == 1
    assert command.out == "the registry: unreachable\n"
