import dataclasses
from pathlib import Path

import pytest

from kvmesh.cli.processes import ChildSpec
from kvmesh.cli.shape import Shape
from kvmesh.settings import load
from services.bootstrap.config import BootstrapSettings
from services.decode.config import DecodeSettings
from services.gateway.config import GatewaySettings
from services.prefill.config import PrefillSettings

SHAPE = Shape(model="/m", cache_dir=Path("/c"), pp=2, pipelines=2, decoders=2, dtype="bf16", drain_seconds=5)


def test_every_stage_of_every_pipeline_is_there_rank_0_first() -> None:
    stages = SHAPE.stages("h:1")
    assert [s.name for s in stages] == ["p0 rank 0", "p1 rank 0", "p0 rank 1", "p1 rank 1"]
    settings = [load(PrefillSettings, s.flags, {}) for s in stages]
    assert [(s.pipeline, s.rank, s.pp_size) for s in settings] == [
        ("p0", 0, 2),
        ("p1", 0, 2),
        ("p0", 1, 2),
        ("p1", 1, 2),
    ]
    assert {(s.dtype, s.threads, s.drain_seconds) for s in settings} == {("bf16", 1, 5.0)}


def test_decoders_are_told_apart_and_have_threads_of_their_own() -> None:
    decoders = SHAPE.decoder_specs("h:1")
    assert [d.name for d in decoders] == ["decoder 0", "decoder 1"]
    assert [load(DecodeSettings, d.flags, {}).threads for d in decoders] == [2, 2]


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        (SHAPE.bootstrap(Path("/s")), BootstrapSettings),
        (SHAPE.gateway("h:1"), GatewaySettings),
        (SHAPE.stages("h:1")[0], PrefillSettings),
        (SHAPE.decoder_specs("h:1")[0], DecodeSettings),
    ],
    ids=["bootstrap", "gateway", "prefill", "decode"],
)
def test_each_service_understands_the_flags_it_is_started_with(spec: ChildSpec, settings: type) -> None:
    load(settings, spec.flags, {})


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("bootstrap_flags", lambda s: s.bootstrap(Path("/s"))),
        ("stage_flags", lambda s: s.stages("h:1")[-1]),
        ("decoder_flags", lambda s: s.decoder_specs("h:1")[-1]),
        ("gateway_flags", lambda s: s.gateway("h:1")),
    ],
)
def test_more_flags_come_last_and_so_win(field: str, spec: object) -> None:
    more = ["--log-level", "debug"]
    made = spec(dataclasses.replace(SHAPE, **{field: more}))  # type: ignore[operator]
    assert list(made.flags[-2:]) == more
