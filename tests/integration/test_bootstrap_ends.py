"""The registry as a real process: how leases, terms and the registry itself begin and end."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from registry_players import Decoder, Stage, Watcher, assign, read_metrics, registry, whole
from service_process import refused

from kvmesh.errors import Fenced, InvalidInput, Unavailable
from kvmesh.protocol.ids import term_of

# The end of a lease.


AWAY = "the registry is stopping|unreachable"
"""Its last words, or the end of the connection where its process was gone before they were sent. Members come back."""


async def test_a_lease_ends_when_nothing_is_heard(tmp_path: Path) -> None:
    async with registry(tmp_path, "--lease-seconds", "0.6", "--heartbeat-seconds", "0.2") as (_, stub):
        stage = await Stage(stub, 0, 1).register()
        await stage.hear("admitted")
        with pytest.raises(Unavailable) as caught:
            await stage.hear("admitted")
    assert caught.value.reason == "lease_expired"


async def test_who_opens_a_lease_and_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    async with registry(tmp_path, "--lease-seconds", "0.3", "--heartbeat-seconds", "0.1") as (_, stub):
        with pytest.raises(InvalidInput, match="no registration came"):
            await Stage(stub, 0, 1).hear("admitted")


async def test_sigterm_ends_leases_watches_and_calls_and_then_the_process(tmp_path: Path) -> None:
    async with registry(tmp_path) as (running, stub):
        stage = await Stage(stub, 0, 1).register()
        await stage.hear("admitted")
        held = asyncio.ensure_future(assign(stub))
        with Watcher(stub) as watcher:
            await watcher.next()
            running.process.send_signal(signal.SIGTERM)
            with pytest.raises(Unavailable, match=AWAY):
                while True:
                    await watcher.next()
        for waiting in (held, stage.hear("admitted")):
            with pytest.raises(Unavailable, match=AWAY):
                await waiting
        assert await running.ended() == 0


async def test_a_registry_that_was_frozen_longer_than_a_lease_keeps_the_leases_of_those_who_live(
    tmp_path: Path,
) -> None:
    """It starts every lease anew: nobody is lost because the registry itself was late."""
    flags = ("--lease-seconds", "1", "--heartbeat-seconds", "0.2", "--watchdog-seconds", "30")
    async with registry(tmp_path, *flags, watchdog_seconds=30) as (running, stub):
        stage = await Stage(stub, 0, 1).register()
        await stage.hear("admitted")
        decoder = await Decoder(stub).register()
        generations = await decoder.pair()
        running.process.send_signal(signal.SIGSTOP)
        held = asyncio.ensure_future(assign(stub))
        done, _ = await asyncio.wait([held], timeout=1.5)
        assert not done, "it is frozen"
        running.process.send_signal(signal.SIGCONT)
        assert (await held).generation == generations[0]
        await stage.beat(free_pages=1)
        await decoder.beat(paired_generations=generations)
        assert (await assign(stub)).generation == generations[0]
        page = await asyncio.to_thread(read_metrics, running.metrics)
        assert 'kvmesh_leases_ended_total{reason="lease_expired"} 0.0' in page


# Terms.


async def test_a_restarted_registry_has_a_higher_term_and_seats_what_runs(tmp_path: Path) -> None:
    """F-D15: rooms never repeat, and the generation goes on."""
    async with registry(tmp_path) as (running, stub):
        await whole(stub)
        decoder = await Decoder(stub).register()
        (generation,) = await decoder.pair()
        first = [(await assign(stub)).room for _ in range(5)]
        running.process.kill()
    async with registry(tmp_path) as (_, stub):
        for rank in (0, 1):
            stage = Stage(stub, rank, 2)
            stage.registration.held_generation = generation
            stage.registration.highest_term = 1
            await stage.register()
            assert (await stage.hear("admitted")).term == 2
        decoder = await Decoder(stub).register()
        assert await decoder.pair() == [generation]
        second = [await assign(stub) for _ in range(5)]
    assert {room.generation for room in second} == {generation}
    rooms = first + [room.room for room in second]
    assert len(set(rooms)) == 10
    assert [term_of(room) for room in rooms] == [1] * 5 + [2] * 5


async def test_a_stale_registry_ends_and_the_next_starts_above_the_term_it_heard(tmp_path: Path) -> None:
    async with registry(tmp_path) as (running, stub):
        other = await Stage(stub, 0, 1, "p1", 77).register()
        await other.hear("admitted")
        stage = Stage(stub, 0, 1)
        stage.registration.highest_term = 7
        await stage.register()
        with pytest.raises(Fenced, match="obeys term 7; this registry has 1"):
            await stage.hear("admitted")
        with pytest.raises(Unavailable):
            await other.hear("admitted")
        assert await running.ended() == 4
    async with registry(tmp_path) as (_, stub):
        stage = await Stage(stub, 0, 1).register()
        assert (await stage.hear("admitted")).term == 8


# Start.


async def test_two_registries_can_not_share_a_state_directory(tmp_path: Path) -> None:
    """F-N9"""
    async with registry(tmp_path):
        code, said = await refused("bootstrap", "--state-dir", str(tmp_path / "state"))
    assert code == 2
    assert said.count("\n") == 1
    assert "held by another registry" in said


async def test_a_damaged_term_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "term").write_text("nonsense\n")
    code, said = await refused("bootstrap", "--state-dir", str(tmp_path))
    assert (code, said.count("\n")) == (2, 1)
    assert "damaged" in said


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--lease-seconds", "1", "--heartbeat-seconds", "2"), "heartbeat_seconds is 2 and lease_seconds is 1"),
        (("--lease-seconds", "1", "--heartbeat-seconds", "1"), "heartbeat_seconds is 1 and lease_seconds is 1"),
        (("--assign-wait-seconds", "-1"), "assign_wait_seconds is -1"),
        (("--max-waiting-rooms", "0"), "max_waiting_rooms is 0"),
    ],
)
async def test_settings_that_contradict_each_other_are_refused_by_name(
    tmp_path: Path, flags: tuple[str, ...], says: str
) -> None:
    code, said = await refused("bootstrap", "--state-dir", str(tmp_path), *flags)
    assert (code, said.count("\n")) == (2, 1)
    assert says in said


def test_the_registry_loads_nothing_heavy() -> None:
    """It starts in well under a second because of what it does not import."""
    code = "import sys, services.bootstrap.__main__; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True, env=os.environ
    )
    loaded = set(done.stdout.split())
    assert "grpc" in loaded
    heavy = {"torch", "transformers", "numpy", "tokenizers", "safetensors", "gguf", "jinja2", "rich"}
    assert loaded & heavy == set()
