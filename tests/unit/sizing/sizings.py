"""What sizings of tests start from: round figures, and random ones."""

import random
from dataclasses import replace

from kvmesh.sizing.given import Given, StepTimes
from kvmesh.sizing.lengths import Lengths

ROUND = Given(
    prompt=Lengths(500, sigma=0),
    output_tokens=101,
    max_output_tokens=140,
    first_token_seconds=2.5,
    prefill_rate=1000,
    num_stages=2,
    step_tokens=100,
    pipeline_pages=1000,
    step_seconds=StepTimes(((1, 0.01), (11, 0.02))),
    decoder_pages=2000,
    max_running_rooms=64,
    page_size=16,
)
"""One prompt computes for half a second; a step takes 0.009 s and 0.001 s for each room."""


def some(chance: random.Random) -> Given:
    """Any that an idle mesh can serve."""
    return replace(
        ROUND,
        prompt=Lengths(chance.uniform(50, 800), chance.uniform(0, 1)),
        output_tokens=chance.uniform(1, 140),
        first_token_seconds=chance.uniform(6, 10),
        token_gap_seconds=chance.choice([0.02, 0.05, float("inf")]),
        num_stages=chance.randint(1, 4),
        decoder_pages=chance.choice([400, 4000, 10**6]),
        kv_bytes_per_token=chance.choice([0, 50_000]),
        link_bytes_per_second=chance.choice([5e7, 1e9]),
    )
