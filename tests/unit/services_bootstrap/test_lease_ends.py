"""Each lease that ran is counted and logged once when it ends, whoever's it was; what never ran is not. No stream."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from kvmesh.protocol.ids import Rank, Term
from kvmesh.protocol.members import Decoder, Member, Stage
from kvmesh.protocol.registry import Registry, RegistryLimits
from kvmesh.telemetry import metrics
from services.bootstrap.driver import Driver, LeaseStream
from tests.protocol.registry_peers import descriptor

REASONS = ("stream_ended", "misfit", "lease_expired", "lease_replaced", "stopping", "stale_term")


class Bench:
    """A registry and its driver."""

    def __init__(self) -> None:
        self.registry = Registry(Term(3), RegistryLimits(), now=0.0)
        self.driver = Driver(self.registry, lambda _: None)
        self._incarnations = count(100)

    def _member(self, incarnation: int | None) -> Member:
        return Member(incarnation or next(self._incarnations), "host:1")  # type: ignore[arg-type]

    def decoder(self, incarnation: int | None = None, **changes: Any) -> LeaseStream:
        stream = self.driver.open()
        member = Decoder(stream.number, self._member(incarnation), descriptor(**changes))
        stream.name = member.name
        self.driver.carry_out(self.registry.register_decoder(member, 0.0))
        return stream

    def stage(self) -> LeaseStream:
        stream = self.driver.open()
        member = Stage(stream.number, self._member(None), "p0", Rank(0), 1, descriptor())
        stream.name = member.name
        self.driver.carry_out(self.registry.register_stage(member, 0.0))
        return stream


@pytest.fixture
async def bench() -> Bench:
    return Bench()


@contextmanager
def ended(**wanted: int) -> Iterator[None]:
    """What was counted inside, by reason; nothing else was."""

    def counted() -> dict[str, float]:
        page = metrics.page_of("bootstrap")
        return {r: page.get_sample_value("kvmesh_leases_ended_total", {"reason": r}) or 0.0 for r in REASONS}

    before = counted()
    yield
    now = counted()
    assert {r: now[r] - before[r] for r in REASONS if now[r] != before[r]} == wanted


@pytest.mark.parametrize("role", ["decoder", "stage"])
async def test_a_stream_that_ends_is_a_lease_that_ended(
    bench: Bench, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    stream = getattr(bench, role)()
    with ended(stream_ended=1), caplog.at_level(logging.INFO):
        bench.driver.close(stream)
    assert f"{stream.name}: the lease stream ended" in caplog.text


async def test_who_is_refused_at_registration_had_no_lease(bench: Bench) -> None:
    bench.decoder()
    with ended():
        bench.driver.close(bench.decoder(model_fingerprint="another"))
        bench.driver.close(bench.driver.open())


async def test_a_lease_that_was_silent_is_counted_once_by_that(bench: Bench) -> None:
    stream = bench.decoder()
    with ended(lease_expired=1):
        for now in (0.25, 0.5, 1.0, 1.5, 2.0, 2.5):
            bench.driver.carry_out(bench.registry.tick(now))
        bench.driver.close(stream)


async def test_a_lease_that_a_newer_stream_replaced_is_counted_once_by_that(bench: Bench) -> None:
    older = bench.decoder(77)
    with ended(lease_replaced=1):
        newer = bench.decoder(77)
        bench.driver.close(older)
    with ended(stream_ended=1):
        bench.driver.close(newer)


async def test_a_registry_that_leaves_ends_every_lease_once(bench: Bench) -> None:
    streams = [bench.decoder(), bench.stage()]
    with ended(stopping=2):
        bench.driver.carry_out(bench.registry.stop())
        for stream in streams:
            bench.driver.close(stream)
