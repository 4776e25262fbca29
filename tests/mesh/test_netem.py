"""Storms of aborts through bad weather: every process on a host of its own, packets late, lost and overtaking each other.

A cut pairing is allowed where packets are lost; a log that differs between two stages is not, anywhere.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from applied_log import equal_logs, followed_logs
from harness import Mesh
from network import Network, why_not
from parity import Reference, random_prompts
from storm import storm
from weather import Forecast, Weather

REQUESTS, OUTPUT = 40, 24
LONGEST_MS = 200.0
PIPELINE = [f"p0 rank {rank}" for rank in range(3)]
HOSTS = ["bootstrap", *PIPELINE, "decoder 0", "decoder 1", "gateway"]
GATEWAY_FLAGS = ["--max-attempts", "10"]
"""A pairing that is cut under loss costs each of its rooms an attempt."""

pytestmark = [pytest.mark.deep, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def _can_run() -> None:
    if reason := why_not():
        pytest.skip(reason)


def forecast(seed: int, loss_percent: Callable[[str, str], float]) -> Forecast:
    """Each edge between two stages and between a stage and a decoder has a delay of its own, of 0 to 200 ms with jitter.

    Args:
        loss_percent: packets lost on an edge, between the names that are there.
    """

    def weather(a: str, b: str) -> Weather | None:
        if not {a, b} & set(PIPELINE) or {a, b} & {"bootstrap", "gateway"}:
            return None
        rng = random.Random(f"{seed} {a} {b}")
        least, most = sorted(rng.uniform(0, LONGEST_MS) for _ in range(2))
        return Weather(least_ms=least, most_ms=most, loss_percent=loss_percent(a, b))

    return weather


def nowhere(a: str, b: str) -> float:
    return 0.0


def to_one_stage_of_each_decoder(a: str, b: str) -> float:
    return 1.0 if {a, b} in ({"decoder 0", "p0 rank 1"}, {"decoder 1", "p0 rank 2"}) else 0.0


def everywhere(a: str, b: str) -> float:
    return 0.2 if {a, b} <= set(PIPELINE) else 0.5


@pytest.mark.parametrize(
    ("seed", "loss_percent", "waves"),
    [
        pytest.param(0, nowhere, 1, id="lost-nowhere", marks=pytest.mark.slice),
        pytest.param(1, to_one_stage_of_each_decoder, 2, id="lost-to-one-stage-of-each-decoder"),
        pytest.param(2, everywhere, 2, id="lost-everywhere"),
    ],
)
async def test_a_storm_of_aborts_through_bad_weather_leaves_equal_logs_and_no_room(
    tmp_path: Path, tiny_model_dir: Path, seed: int, loss_percent: Callable[[str, str], float], waves: int
) -> None:
    reference = Reference(tiny_model_dir)
    rng = random.Random(seed)
    prompts = random_prompts([rng.randint(1, 160) for _ in range(REQUESTS)], reference.vocab_size, seed)
    with Network(HOSTS, forecast(seed, loss_percent)) as network:
        async with Mesh(
            tiny_model_dir,
            tmp_path,
            pp=3,
            decoders=2,
            placed=network.placed,
            gateway_flags=GATEWAY_FLAGS,
            decoder_flags=["--shared-mib", "0"],  # network namespaces share their memory: no weather would reach the KV
        ) as mesh:
            for wave in range(waves):
                async with followed_logs(mesh) as ledger:
                    outputs = await storm(
                        mesh.gateway, prompts, output_len=OUTPUT, share=0.3, within_seconds=8, seed=seed + wave
                    )
                    await mesh.paired()
                    await mesh.idle()
                await equal_logs(mesh)
                assert ledger.compared, "no step was seen at two stages"
                for prompt, output in zip(prompts, outputs, strict=True):
                    if output is not None:
                        reference.check(prompt, output, OUTPUT)
            attempts = (await mesh.metrics("gateway"))["kvmesh_attempts_total"]
            print(
                f"{network.carrier}: {network.lost()} packets lost, {attempts:g} rooms for {waves * REQUESTS} requests"
            )
        assert (network.lost() > 0) == (loss_percent is not nowhere)
