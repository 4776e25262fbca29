"""The registry as a real process: who may register, and when. Rooms and ends are in the files beside this one."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from registry_players import Decoder, Stage, assign, descriptor, read_metrics, registry, whole
from service_process import end_in_background, start_in_background

from kvmesh.errors import InvalidInput, Misfit, Unavailable
from kvmesh.protocol.ids import MAX_TERM
from kvmesh.protocol.version import PROTOCOL_VERSION
from kvmesh.rpc import streams
from kvmesh.rpc.channels import dial
from kvmesh.v1 import bootstrap_pb2 as pb
from kvmesh.v1 import types_pb2
from kvmesh.v1.bootstrap_pb2_grpc import BootstrapServiceStub


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a registry for all tests that leave nothing behind."""
    directory = tmp_path_factory.mktemp("lasting")
    flags = ("--state-dir", str(directory / "state"), "--lease-seconds", "30")
    process, said = start_in_background("bootstrap", directory / "log", *flags)
    yield said["address"]
    assert end_in_background(process) == 0


@pytest.fixture
async def stub(lasting: str) -> AsyncIterator[BootstrapServiceStub]:
    """A connection of the test's own, so that its streams end with it."""
    async with dial(lasting) as channel:
        yield BootstrapServiceStub(channel)


# Registration.


async def test_stages_are_held_until_the_next_higher_rank_is_in_and_told_whom_they_wait_for(tmp_path: Path) -> None:
    """F-P1, F-N2, F-K5: held, not polled."""
    async with registry(tmp_path) as (_, stub):
        low = await Stage(stub, 0, 3).register()
        assert (await low.hear("wait_for")).wait_for.peer == "rank 1 of p0"
        middle = await Stage(stub, 1, 3).register()
        assert (await middle.hear("wait_for")).wait_for.peer == "rank 2 of p0"
        assert (await low.hear("wait_for")).wait_for.peer == "rank 1 of p0, which waits for rank 2"
        last = await Stage(stub, 2, 3).register()
        generation = (await last.hear("admitted")).admitted.generation
        order = (await middle.hear("link_next")).link_next
        assert (order.next.incarnation, order.next.address, order.generation) == (1002, "host2:1", generation)
        await middle.linked(generation)
        await middle.hear("admitted")
        assert (await low.hear("link_next")).link_next.next.incarnation == 1001
        await low.linked(generation)
        assert (await low.hear("admitted")).admitted.generation == generation


async def test_a_stage_lost_while_registering_takes_back_what_was_admitted(tmp_path: Path) -> None:
    async with registry(tmp_path) as (_, stub):
        stages = [Stage(stub, rank, 3) for rank in range(3)]
        for stage in reversed(stages[1:]):
            await stage.register()
        await stages[2].hear("admitted")
        await stages[1].linked((await stages[1].hear("link_next")).link_next.generation)
        await stages[1].hear("admitted")
        stages[2].call.cancel()
        assert "rank 2 of p0 was lost" in (await stages[1].hear("withdrawn")).withdrawn.reason


async def test_a_newcomer_waits_for_the_end_of_the_generation_and_is_part_of_the_next(tmp_path: Path) -> None:
    """F-D7"""
    async with registry(tmp_path) as (_, stub):
        first, last = await whole(stub)
        last.call.cancel()
        newcomer = await Stage(stub, 1, 2, incarnation=77).register()
        assert "until generation 1.1 is over" in (await newcomer.hear("wait_for")).wait_for.peer
        first.call.cancel()
        generation = (await newcomer.hear("admitted")).admitted.generation
        first = await Stage(stub, 0, 2).register()
        order = (await first.hear("link_next")).link_next
        assert (order.generation, order.next.incarnation) == (generation, 77)


async def test_a_second_stream_of_a_process_takes_the_place_of_the_first(stub: BootstrapServiceStub) -> None:
    older = await Stage(stub, 0, 1).register()
    await older.hear("admitted")
    newer = await Stage(stub, 0, 1).register()
    await newer.hear("admitted")
    with pytest.raises(Unavailable) as caught:
        await older.hear("admitted")
    assert caught.value.reason == "lease_replaced"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"page_size": 32}, "page_size: rank 0 of p0 has 32, rank 1 of p0 has 16"),
        ({"dtype": types_pb2.DTYPE_BF16}, "dtype: rank 0 of p0 has bf16, rank 1 of p0 has fp32"),
        ({"num_pages": 65}, "num_pages: rank 0 of p0 has 65, rank 1 of p0 has 64"),
        ({"layers": types_pb2.LayerRange(begin=0, end=7)}, r"rank 0 has \[0, 7\), rank 1 has \[6, 12\)"),
        ({"protocol_version": 99}, f"protocol_version: rank 0 of p0 has 99, the registry has {PROTOCOL_VERSION}"),
    ],
)
async def test_a_misfit_is_refused_with_both_values(
    stub: BootstrapServiceStub, changes: dict[str, object], says: str
) -> None:
    """F-M1, F-M2, F-A5"""
    last = await Stage(stub, 1, 2).register()
    await last.hear("admitted")
    misfit = Stage(stub, 0, 2)
    misfit.registration.descriptor.CopyFrom(descriptor(0, 2, **changes))
    await misfit.register()
    with pytest.raises(Misfit, match=says):
        await misfit.hear("link_next")


async def test_a_decoder_of_another_model_is_refused_with_both_values(stub: BootstrapServiceStub) -> None:
    await (await Stage(stub, 0, 1).register()).hear("admitted")
    decoder = Decoder(stub)
    decoder.registration.descriptor.model_fingerprint = "g"
    with pytest.raises(Misfit, match="model_fingerprint: decoder 0000000000001388 has g, rank 0 of p0 has f"):
        await decoder.register()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rank": 2}, "rank"),
        ({"pp_size": 0}, "pp_size"),
        ({"pp_size": 100_000}, "pp_size"),
        ({"pipeline": "P 0"}, "pipeline"),
        ({"pipeline": "p" * 64}, "pipeline"),
        ({"pipeline": ""}, "pipeline"),
        ({"highest_term": MAX_TERM + 1}, "highest_term"),
        ({"held_generation": 5}, "held_generation"),
        ({"member": types_pb2.Member(address="a:1")}, "member.incarnation"),
        ({"member": types_pb2.Member(incarnation=1)}, "member.address"),
        ({"member": types_pb2.Member(incarnation=1, address="0.0.0.0:1")}, "member.address"),
        ({"member": types_pb2.Member(incarnation=1, address="::1:1")}, "member.address"),
        ({"descriptor": None}, "descriptor"),
        ({"descriptor": descriptor(page_size=0)}, "descriptor.page_size"),
        ({"descriptor": descriptor(dtype=0)}, "descriptor.dtype"),
        ({"descriptor": descriptor(dtype=99)}, "descriptor.dtype"),
        ({"descriptor": descriptor(layers=types_pb2.LayerRange(begin=0, end=13))}, "descriptor.layers"),
        ({"descriptor": descriptor(layers=types_pb2.LayerRange(begin=6, end=6))}, "descriptor.layers"),
        ({"descriptor": descriptor(model_fingerprint="")}, "descriptor.model_fingerprint"),
        ({"descriptor": descriptor(model_name="m" * 257)}, "descriptor.model_name"),
    ],
)
async def test_a_malformed_registration_names_its_field(
    stub: BootstrapServiceStub, changes: dict[str, object], field: str
) -> None:
    """F-R6, F-N3, F-N4, and the service goes on."""
    stage = Stage(stub, 0, 2)
    for name, value in changes.items():
        stage.registration.ClearField(name)  # type: ignore[arg-type]
        if isinstance(value, types_pb2.Member | types_pb2.Descriptor):
            getattr(stage.registration, name).CopyFrom(value)
        elif value is not None:
            setattr(stage.registration, name, value)
    await stage.register()
    with pytest.raises(InvalidInput) as caught:
        await stage.hear("admitted")
    assert caught.value.field == field
    assert await whole(stub)


async def test_a_decoder_holds_all_layers(stub: BootstrapServiceStub) -> None:
    decoder = Decoder(stub)
    decoder.registration.descriptor.layers.end = 11
    with pytest.raises(InvalidInput, match=r"holds all 12 layers; this one has \[0, 11\)") as caught:
        await decoder.register()
    assert caught.value.field == "descriptor.layers"


async def test_a_lease_begins_with_one_registration(stub: BootstrapServiceStub) -> None:
    silent = Stage(stub, 0, 1)
    await silent.beat()
    with pytest.raises(InvalidInput) as caught:
        await silent.hear("admitted")
    assert caught.value.field == "registration"
    stage = await Stage(stub, 0, 1).register()
    await stage.hear("admitted")
    await stage.register()
    with pytest.raises(InvalidInput, match="registers once"):
        await stage.hear("admitted")


async def test_a_message_of_an_unknown_kind_is_counted_and_passed_over(tmp_path: Path) -> None:
    """F-A5"""
    async with registry(tmp_path) as (running, stub):
        stage = await Stage(stub, 0, 1).register()
        await stage.hear("admitted")
        await streams.write(stage.call, pb.RegisterStageRequest())
        await stage.beat()
        decoder = await Decoder(stub).register()
        await streams.write(decoder.call, pb.RegisterDecoderRequest())
        await decoder.pair()
        assert await assign(stub)
        page = await asyncio.to_thread(read_metrics, running.metrics)
    assert "kvmesh_unknown_messages_total 2.0" in page
    assert 'kvmesh_leases{role="decoder"} 1.0' in page
    assert "kvmesh_pipelines_whole 1.0" in page
