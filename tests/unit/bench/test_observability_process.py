"""The parts of bench.observability that reach out: a process that turns, pages and their scraper, the command's exit code."""

import asyncio
import json
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from bench.observability import __main__ as command
from bench.observability import process, switch, tiny
from bench.observability.load import Arrivals
from bench.observability.pages import LIKE_PROMETHEUS, Scraper, own_series, read
from bench.observability.pairs import Pair
from kvmesh.model.source import resolve
from kvmesh.rpc.tasks import race
from kvmesh.telemetry.page import MetricsPage
from kvmesh.text.tokenizer import Tokenizer


def test_a_process_turns_when_it_is_told_and_says_so() -> None:
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as asking:
        door = socket.socket(socket.AF_UNIX)
        door.bind(f"{directory}/control")
        door.listen(1)
        thread = threading.Thread(target=process.obey, args=(door,))
        thread.start()
        asking.connect(f"{directory}/control")
        try:
            for line in (b"off\n", b"on\n"):
                asking.sendall(line)
                assert asking.recv(16) == line
                assert all(vars(r.owner)[r.name] is (r.on if line == b"on\n" else r.off) for r in switch.RECORDERS)
        finally:
            switch.turn(on=True)
            asking.close()
            thread.join()


def test_on_is_the_product_itself_and_not_a_wrapper_of_it() -> None:
    for recorder in switch.RECORDERS:
        there = vars(recorder.owner)[recorder.name]
        function = there.fget if isinstance(there, property) else there
        assert there is recorder.on
        assert function.__module__ in ("prometheus_client.metrics", "kvmesh.telemetry.traces")


async def test_a_page_is_read_as_the_product_serves_it() -> None:
    async with MetricsPage("gateway", "127.0.0.1", 0) as page:
        host, port = page.address
        assert own_series((await read(f"{host}:{port}", {})).decode()).keys() >= {"kvmesh_requests_open"}
        assert (await read(f"{host}:{port}", LIKE_PROMETHEUS)).startswith(b"\x1f\x8b"), "compressed"


class Server:
    """A page that says what it is told to, and when it was asked."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.asked: asyncio.Queue[int] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(self._answer)
        await writer.drain()
        writer.close()
        self.asked.put_nowait(writer.get_extra_info("sockname")[1])


async def test_the_scraper_reads_page_after_page_and_goes_on_where_it_stopped() -> None:
    played = Server(b"HTTP/1.0 200 OK\r\n\r\n")
    async with (
        await asyncio.start_server(played.serve, "127.0.0.1", 0) as one,
        await asyncio.start_server(played.serve, "127.0.0.1", 0) as other,
    ):
        ports = [server.sockets[0].getsockname()[1] for server in (one, other)]
        scraper = Scraper([f"127.0.0.1:{port}" for port in ports], every_seconds=0.05)
        asked: list[int] = []

        async def hear(num: int) -> None:
            for _ in range(num):
                asked.append(await played.asked.get())

        for num in (1, 2, 3):
            await race(scraper.run(), hear(num))
        assert asked == [ports[0], ports[1]] * 3


async def test_what_is_no_page_is_said_so() -> None:
    played = Server(b"HTTP/1.1 404 Not Found\r\n\r\nnothing here")
    async with await asyncio.start_server(played.serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(OSError, match=f"{host}:{port} answered no page: .*404"):
            await read(f"{host}:{port}", {})


async def test_what_came_is_waited_for_and_marked_as_it_stands() -> None:
    arrivals = Arrivals()
    waiting = asyncio.ensure_future(arrivals.reach(3))
    for _ in range(2):
        await asyncio.sleep(0)
        assert not waiting.done()
        arrivals.came(2)
    assert (await waiting) == arrivals.latest == await arrivals.reach(1)
    assert arrivals.latest.num_tokens == 4


@pytest.mark.parametrize(("ratio", "code"), [(1.01, 0), (1.1, 1)])
def test_the_command_ends_with_what_it_found(
    ratio: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measured(*_: Any) -> tuple[list[Pair], int]:
        return [Pair(on=100.0, off=100.0 * ratio)] * 10, 7

    monkeypatch.setattr(command, "measure", measured)
    assert command.main(["--json", "--model", "tiny"]) == code
    shown = capsys.readouterr()
    (line,) = shown.out.splitlines()
    assert list(json.loads(line))[:4] == ["ratio_median", "ratio_low", "ratio_high", "pairs"]
    assert shown.err == (f"metrics and spans cost too much: ratio_low is {ratio}, above 1.02\n" if code else "")


def test_the_tiny_model_is_one_that_a_mesh_serves(tmp_path: Path) -> None:
    files = resolve(str(tiny.write(tmp_path / "model")), tmp_path)
    tokenizer = Tokenizer.open(files)
    assert (tokenizer.vocab_size, len(tokenizer.encode("tide"))) == (256, 4)
    assert files.config.max_positions > command.ANSWER_TOKENS
