"""The registry as a real process: rooms and the picture."""

import asyncio
from pathlib import Path

import pytest
from registry_players import SECONDS, Decoder, Stage, Watcher, assign, registry, whole

from kvmesh.errors import Full, InvalidInput, KvmeshError, Unavailable, UnknownModel
from kvmesh.protocol.ids import term_of
from kvmesh.v1 import bootstrap_pb2 as pb

# Rooms.


async def test_a_room_is_held_until_a_pair_stands(tmp_path: Path) -> None:
    async with registry(tmp_path) as (_, stub):
        waiting = asyncio.ensure_future(assign(stub))
        await whole(stub)
        decoder = await Decoder(stub).register()
        (generation,) = await decoder.pair()
        room = await waiting
        assert (room.pipeline, room.generation, room.decoder.incarnation) == ("p0", generation, 5000)
        assert term_of(room.room) == 1


async def test_a_room_without_a_pair_ends_with_a_time_to_come_back(tmp_path: Path) -> None:
    async with registry(tmp_path, "--assign-wait-seconds", "0.2") as (_, stub):
        with pytest.raises(Unavailable) as caught:
            await assign(stub)
    assert (caught.value.reason, caught.value.retry_after_seconds) == ("no_pair", 0.5)


async def test_a_caller_with_less_time_hears_the_reason_before_its_own_clock_ends_the_call(tmp_path: Path) -> None:
    async with registry(tmp_path) as (_, stub):
        with pytest.raises(KvmeshError) as caught:
            await assign(stub, seconds=2)
    assert caught.value.reason == "no_pair"


async def test_a_call_that_is_cancelled_is_forgotten(tmp_path: Path) -> None:
    async with registry(tmp_path) as (_, stub):
        gone = asyncio.ensure_future(assign(stub))
        await asyncio.wait([gone], timeout=0.2)
        gone.cancel()
        await asyncio.wait([gone], timeout=SECONDS)
        with pytest.raises(InvalidInput):  # a later call on the same connection: the registry has heard of the cancel
            await assign(stub, prompt_len=0)
        await whole(stub)
        decoder = await Decoder(stub).register()
        await decoder.pair()
        await assign(stub)
        with Watcher(stub) as watcher:
            assert (await watcher.next()).rooms_minted == 1


async def test_rooms_go_to_the_least_loaded_pair(tmp_path: Path) -> None:
    async with registry(tmp_path) as (_, stub):
        first, second = await whole(stub, 1, "p0", 1000), await whole(stub, 1, "p1", 2000)
        decoders = [await Decoder(stub, incarnation).register() for incarnation in (5000, 5001)]
        generations = await decoders[0].pair(2)
        await first[0].beat(free_pages=64, queued_tokens=500)
        await second[0].beat(free_pages=64)
        await decoders[0].beat(paired_generations=generations, free_pages=10)
        await decoders[1].beat(paired_generations=generations, free_pages=60)
        await seen(stub, lambda picture: picture.decoders[1].load.free_pages == 60)
        rooms = [await assign(stub) for _ in range(3)]
        assert {(room.pipeline, room.decoder.incarnation) for room in rooms} == {("p1", 5001)}
        await second[0].beat(free_pages=64, waiting_rooms=1)
        await seen(stub, lambda picture: picture.pipelines[1].seats[0].load.waiting_rooms == 1)
        assert (await assign(stub)).pipeline == "p0"


async def seen(stub: object, wanted: object) -> pb.WatchMeshResponse:
    """The first picture that shows it: what was sent on another stream has arrived."""
    with Watcher(stub) as watcher:  # type: ignore[arg-type]
        while not wanted(picture := await watcher.next()):  # type: ignore[operator]
            pass
    return picture


async def test_full_queues_are_refused_with_a_time_to_come_back(tmp_path: Path) -> None:
    """F-K1, F-T2"""
    async with registry(tmp_path, "--max-waiting-rooms", "3") as (_, stub):
        await whole(stub)
        decoder = await Decoder(stub).register()
        generations = await decoder.pair()
        await decoder.beat(paired_generations=generations, waiting_rooms=3)
        await seen(stub, lambda picture: picture.decoders[0].load.waiting_rooms == 3)
        with pytest.raises(Full) as caught:
            await assign(stub)
    assert (caught.value.reason, caught.value.retry_after_seconds) == ("full", 0.5)


async def test_another_model_is_not_found(tmp_path: Path) -> None:
    async with registry(tmp_path) as (_, stub):
        await whole(stub)
        with pytest.raises(UnknownModel, match="'other' is not served here; 'm' is"):
            await assign(stub, model="other")


@pytest.mark.parametrize("field", ["prompt_len", "max_output_len"])
async def test_a_room_of_no_tokens_is_refused(tmp_path: Path, field: str) -> None:
    async with registry(tmp_path) as (_, stub):
        with pytest.raises(InvalidInput) as caught:
            await assign(stub, **{field: 0})
    assert caught.value.field == field


# The picture.


async def test_the_picture_is_whole_at_once_and_follows(tmp_path: Path) -> None:
    async with registry(tmp_path) as (_, stub):
        with Watcher(stub) as watcher:
            empty = await watcher.next()
            assert (empty.term, len(empty.pipelines), len(empty.decoders)) == (1, 0, 0)
            await whole(stub)
            while not (picture := await watcher.next()).pipelines or not picture.pipelines[0].generation:
                pass
            seats = picture.pipelines[0].seats
            assert [seat.state for seat in seats] == [pb.SEAT_STATE_ADMITTED] * 2
            assert [seat.admitted_order for seat in seats] == [2, 1], "rank 1 before rank 0"
            assert [(seat.layers.begin, seat.layers.end) for seat in seats] == [(0, 6), (6, 12)]
            assert picture.limits == pb.MeshLimits(
                max_tokens=512, max_prompt_tokens=511, model_name="m", model_fingerprint="f"
            )


async def test_the_picture_names_whom_a_stage_waits_for(tmp_path: Path) -> None:
    async with registry(tmp_path) as (_, stub):
        await Stage(stub, 0, 2).register()
        with Watcher(stub) as watcher:
            while not (pipelines := (await watcher.next()).pipelines):
                pass
        assert [seat.state for seat in pipelines[0].seats] == [pb.SEAT_STATE_WAITING, pb.SEAT_STATE_EMPTY]
        assert pipelines[0].seats[0].waits_for == "rank 1 of p0"


async def test_a_storm_of_changes_is_at_most_ten_pictures_a_second(tmp_path: Path) -> None:
    async with registry(tmp_path) as (_, stub):
        stage = await Stage(stub, 0, 1).register()
        await stage.hear("admitted")
        loop = asyncio.get_running_loop()
        with Watcher(stub) as watcher:
            await watcher.next()
            began, pictures = loop.time(), 0
            for number in range(1, 300):
                await stage.beat(queued_tokens=number)
            while (await watcher.next()).pipelines[0].seats[0].load.queued_tokens < 299:
                pictures += 1
            took = loop.time() - began
        assert pictures <= took / 0.1 + 1
        stage.call.cancel()
