"""bench.kv_transfer run for real, in its own processes, on rooms of a few MiB; and what it makes of the rounds."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path as Directory

import numpy as np
import pytest
import torch

from bench.kv_transfer import __main__ as command
from bench.kv_transfer import content, mooncake, nixl, side
from bench.kv_transfer.certificates import make
from bench.kv_transfer.ends import End, NotHere
from bench.kv_transfer.link import LinkSource, LinkTarget
from bench.kv_transfer.memory import MemorySource, MemoryTarget
from bench.kv_transfer.outcome import WITHOUT, outcome
from bench.kv_transfer.pair import Broken, Damaged, Missing, Pair, Path, Run, context
from bench.kv_transfer.paths import all_paths
from bench.kv_transfer.rooms import PAGE_BYTES, PAGE_SIZE, Room, Turn, drawn
from bench.kv_transfer.sockets import SocketSource, SocketTarget
from bench.kv_transfer.turns import Turns
from kvmesh.kv.checksum import checksum
from kvmesh.kv.pool import PagePool

ROOM_PAGES = (1, 2)
KEYS = {
    "grpc_tcp_gbps",
    "grpc_tcp_tls_gbps",
    "shm_gbps",
    "raw_tcp_gbps",
    "memcpy_gbps",
    "mooncake_tcp_gbps",
    "nixl_tcp_gbps",
    "nixl_host_gbps",
    "grpc_over_raw",
    "shm_over_memcpy",
    "grpc_over_mooncake",
    "shm_over_nixl_host",
    "grpc_checksum_cost",
    "shm_checksum_cost",
    "cpu_s_per_gb",
    "peak_bytes",
    "frame_bytes",
    "shm_frame_bytes",
    "reasons",
    "aims_missed",
}


class _Damaging(End):
    """A target in one of whose pages one number is wrong in the end."""

    async def carry(self, turn: Turn) -> None:
        await super().carry(turn)  # type: ignore[safe-super]  # it stands before a whole target
        page = self.page_of(turn.rooms[-1].pages[-1]).view(torch.uint8)
        page[(-1,) * page.dim()] ^= 1


class DamagingMemory(_Damaging, MemoryTarget):
    pass


class DamagingSocket(_Damaging, SocketTarget):
    pass


class DamagingLink(_Damaging, LinkTarget):
    pass


class Lazy(MemorySource):
    """As the target of a path, one that leaves what it should fetch where it is."""

    begins = True


class Absent(MemorySource):
    def __init__(self, pool: PagePool) -> None:
        raise NotHere("the absent peer can't be imported")


class Failing(MemorySource):
    async def carry(self, turn: Turn) -> None:
        if turn.rooms:
            raise ConnectionError("gone")


MEMORY = Path("memory", MemorySource, MemoryTarget, is_straight=True)
LINK = Path("link", LinkSource, LinkTarget)
SHARED = Path("shared memory", LinkSource, partial(LinkTarget, num_cells=2))
DAMAGING = (
    replace(MEMORY, target=DamagingMemory),
    Path(
        "socket",
        partial(SocketSource, piece_bytes=1 << 20),
        partial(DamagingSocket, piece_bytes=1 << 20),
        is_straight=True,
    ),
    replace(LINK, target=DamagingLink),
    replace(SHARED, target=partial(DamagingLink, num_cells=2)),
)


def rounds(gbps: list[float]) -> list[Run]:
    return [Run(num_bytes=10**9, seconds=1 / speed, cpu_seconds=0.5, peak_bytes=7) for speed in gbps]


# Whole runs.


def test_a_run_prints_every_figure_or_why_it_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--json", "--quick"], ROOM_PAGES) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert set(result) == KEYS
    speeds = {key.removesuffix("_gbps"): value for key, value in result.items() if key.endswith("_gbps")}
    assert {name for name, speed in speeds.items() if speed is None} == set(result["reasons"])
    measured = {name for name, speed in speeds.items() if speed is not None}
    assert measured >= {"grpc_tcp", "grpc_tcp_tls", "shm", "raw_tcp", "memcpy"}, (
        "none of them needs what may be missing"
    )
    assert all(speeds[name] > 0 for name in measured)
    assert set(result["cpu_s_per_gb"]) == set(result["peak_bytes"]) == measured
    assert result["shm_over_memcpy"] > 0
    assert result["grpc_over_raw"] > 0
    assert result["grpc_checksum_cost"] < 1


@pytest.mark.parametrize("path", DAMAGING, ids=lambda path: path.name)
def test_one_wrong_byte_in_a_page_is_noticed(path: Path) -> None:
    with Pair(path, ROOM_PAGES, context()) as pair:
        pair.connect()
        with pytest.raises(Damaged, match=rf"{path.name}: the target's pages of rooms \[2\] are not"):
            pair.run(np.random.default_rng(0))


def test_what_an_earlier_round_left_does_not_pass_for_what_was_moved() -> None:
    with Pair(replace(MEMORY, target=Lazy), ROOM_PAGES, context()) as pair:
        pair.connect()
        with pytest.raises(Damaged, match=r"rooms \[1, 2\]"):
            pair.run(np.random.default_rng(0))


def test_a_damaging_peer_is_no_reason_but_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "all_paths", lambda _: [replace(DAMAGING[0], is_peer=True)])
    assert command.main(["--json", "--quick"], ROOM_PAGES) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "memory: the target's pages of rooms [2] are not what the source sent\n")


@pytest.mark.parametrize("path", [LINK, SHARED], ids=lambda path: path.name)
def test_a_link_brings_the_same_with_and_without_checksums(path: Path) -> None:
    with Pair(path, ROOM_PAGES, context()) as pair:
        pair.connect()
        draw = np.random.default_rng(0)
        runs = [pair.run(draw, checked=checked) for checked in (True, False, True)]
    assert all(run.num_bytes == sum(ROOM_PAGES) * PAGE_BYTES and run.seconds > 0 for run in runs)


def test_a_missing_peer_is_a_reason_and_a_broken_one_too() -> None:
    absent = Path("mooncake_tcp", Absent, MemoryTarget, is_peer=True)
    broken = Path("nixl_tcp", Failing, MemoryTarget, is_peer=True)
    turns = Turns([absent, MEMORY, broken], ROOM_PAGES)
    turns.measure(2)
    assert turns.reasons == {
        "mooncake_tcp": "mooncake_tcp source: the absent peer can't be imported",
        "nixl_tcp": "nixl_tcp source: ConnectionError: gone",
    }
    assert {name: len(runs) for name, runs in turns.runs.items()} == {"memory": 2}
    result = outcome(turns.runs, turns.reasons)
    assert (result["mooncake_tcp_gbps"], result["nixl_tcp_gbps"], result["grpc_over_mooncake"]) == (None, None, None)
    assert result["reasons"] == turns.reasons


@pytest.mark.parametrize(("source", "error"), [(Absent, Missing), (Failing, Broken)])
def test_a_path_of_our_own_that_fails_ends_the_bench(source: type[End], error: type[Exception]) -> None:
    with pytest.raises(error):
        Turns([replace(MEMORY, source=source)], ROOM_PAGES).measure(1)


@pytest.mark.parametrize(
    ("end", "names", "message"),
    [
        (mooncake.MooncakeSource, ["mooncake", "mooncake.engine"], "mooncake can't be imported: "),
        (nixl.NixlTarget, ["nixl_cu12", "nixl", *nixl.MODULES], "nixl can't be imported: "),
    ],
)
def test_a_peer_that_is_not_installed_is_not_here(
    end: type[End], names: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NotHere, match=message):
        end(content.make_pool(1))


# Rooms and pages.


def test_rooms_together_are_all_pages_and_lie_scattered() -> None:
    draw = np.random.default_rng(0)
    one, other = drawn((8, 4, 20), draw), drawn((8, 4, 20), draw)
    assert [len(room.pages) for room in one] == [8, 4, 20]
    assert sorted(page for room in one for page in room.pages) == list(range(32))
    assert [room.pages for room in one] != [room.pages for room in other]
    assert one[0].num_tokens == 8 * PAGE_SIZE


@pytest.mark.parametrize("page_of", [content.slots_of_page, content.blocks_of_page])
def test_pages_tile_a_pool(page_of: Callable[[PagePool, int], torch.Tensor]) -> None:
    pool = content.make_pool(3)
    for page in range(3):
        page_of(pool, page).view(torch.uint8).add_(page + 1)
    assert torch.bincount(pool.slots.view(torch.uint8).flatten()).tolist() == [0, *[PAGE_BYTES] * 3]


def test_block_numbers_find_the_blocks_of_a_room() -> None:
    pool = content.make_pool(5)
    content.fill(pool)
    room = Room(1, [3, 0])
    flat = content.blocks(pool).flatten(0, 1)
    numbered = flat[content.block_numbers(room, 5)].view(-1, 2, flat.shape[-1])
    for index, page in enumerate(room.pages):
        assert torch.equal(numbered[:, index], content.blocks_of_page(pool, page))


def test_without_a_checksum_credits_still_have_one() -> None:
    credit, frame = bytes(64), bytes(1 << 20)
    assert side._no_checksum(credit) == checksum(credit) != 0
    assert side._no_checksum(credit, frame) == 0


# Figures.


def test_ratios_are_medians_of_the_ratios_within_rounds() -> None:
    grpc, mooncake_runs = rounds([1.0, 4.0, 9.0]), rounds([1.0, 2.0, 3.0])
    result = outcome({"grpc_tcp": grpc, "mooncake_tcp": mooncake_runs}, {})
    assert result["grpc_over_mooncake"] == 2.0
    assert result["grpc_tcp_gbps"] == 4.0
    assert result["cpu_s_per_gb"] == {"grpc_tcp": 0.5, "mooncake_tcp": 0.5}


def test_the_faster_size_of_pieces_is_raw_tcp() -> None:
    measured = {"raw_tcp 1 MiB": rounds([2.0, 2.0, 9.0]), "raw_tcp 4 MiB": rounds([3.0, 3.0, 1.0])}
    result = outcome({**measured, "grpc_tcp": rounds([1.5, 1.5, 1.5])}, {})
    assert (result["raw_tcp_gbps"], result["grpc_over_raw"]) == (3.0, 0.5)


def test_aims_are_missed_where_they_are_and_nowhere_else() -> None:
    speeds = {"grpc_tcp": 6.0, "raw_tcp 1 MiB": 10.0, "mooncake_tcp": 5.0, "shm": 6.5, "memcpy": 10.0, "nixl_host": 3.0}
    without = {"grpc_tcp" + WITHOUT: 6.5, "shm" + WITHOUT: 8.0}
    result = outcome({name: rounds([speed]) for name, speed in {**speeds, **without}.items()}, {})
    assert result["aims_missed"] == ["grpc_over_mooncake", "grpc_checksum_cost"]
    assert set(result) == KEYS


def test_a_ratio_of_what_was_not_measured_is_none_and_no_missed_aim() -> None:
    result = outcome({"memcpy": rounds([10.0])}, {"nixl_host": "not installed"})
    assert (result["shm_over_memcpy"], result["shm_gbps"], result["aims_missed"]) == (None, None, [])
    assert result["reasons"] == {"nixl_host": "not installed"}


def test_too_few_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--rounds", "4"])
    assert "at least 5 are needed" in capsys.readouterr().err


def test_kvmesh_is_its_own_path_and_others_are_peers(tmp_path: Directory) -> None:
    paths = {path.name: path for path in all_paths(make(tmp_path))}
    assert {name for name, path in paths.items() if path.is_peer} == {"mooncake_tcp", "nixl_tcp", "nixl_host"}
    assert paths["nixl_tcp"].environment == {"UCX_TLS": "tcp"}
    assert paths["grpc_tcp"].source is paths["shm"].source is LinkSource
