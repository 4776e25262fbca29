"""Drawing tokens: the right distribution, and the same token everywhere for (seed, index)."""

import subprocess
import sys

import pytest
import torch

from kvmesh.model.sampling import SamplingParams, draw, sample, uniform

NUM_DRAWS = 4000


def draws(logits: torch.Tensor, params: SamplingParams, count: int = NUM_DRAWS) -> torch.Tensor:
    """Shares of the tokens over the indices 0 … count - 1 of one request."""
    tokens = [sample(logits[None], [params], [index])[0] for index in range(count)]
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / count


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def test_greedy_takes_the_most_likely_and_the_lowest_id_on_ties() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 1.0], [-1.0, -5.0, -1.0]])
    assert sample(logits, [SamplingParams()] * 3, [0, 0, 0]) == [1, 0, 0]


def test_each_row_draws_by_its_own_parameters() -> None:
    logits = logits_of(0.5, 0.3, 0.2).repeat(3, 1)
    params = [SamplingParams(), SamplingParams(1.0, seed=1), SamplingParams(1.0, top_k=1, seed=2)]
    together = sample(logits, params, [5, 6, 7])
    assert together == [sample(logits[:1], [p], [i])[0] for p, i in zip(params, [5, 6, 7], strict=True)]


def test_draws_follow_the_distribution() -> None:
    shares = draws(logits_of(0.5, 0.25, 0.15, 0.1), SamplingParams(temperature=1.0, seed=11))
    assert torch.allclose(shares, torch.tensor([0.5, 0.25, 0.15, 0.1]), atol=0.03)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_the_logits(temperature: float) -> None:
    logits = logits_of(0.5, 0.25, 0.15, 0.1)
    shares = draws(logits, SamplingParams(temperature=temperature, seed=12))
    assert torch.allclose(shares, (logits / temperature).softmax(0), atol=0.03)


def test_top_k_keeps_the_k_most_likely() -> None:
    shares = draws(logits_of(0.1, 0.2, 0.3, 0.4), SamplingParams(temperature=1.0, top_k=2, seed=13))
    assert torch.allclose(shares, torch.tensor([0.0, 0.0, 3 / 7, 4 / 7]), atol=0.03)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.05, [3]), (0.4, [3]), (0.41, [2, 3]), (0.7, [2, 3]), (0.71, [1, 2, 3]), (1.0, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: list[int]) -> None:
    # Eighths are exact in binary, so the borders are sharp.
    shares = draws(logits_of(0.1, 0.2, 0.3, 0.4), SamplingParams(temperature=1.0, top_p=top_p - 1e-4, seed=14), 400)
    assert shares.nonzero().flatten().tolist() == kept


def test_top_p_counts_what_temperature_and_top_k_left() -> None:
    params = SamplingParams(temperature=1.0, top_k=2, top_p=0.56, seed=15)
    assert draws(logits_of(0.1, 0.2, 0.3, 0.4), params, 200).tolist() == [0.0, 0.0, 0.0, 1.0]


def test_top_p_of_a_flat_distribution_looks_past_its_head() -> None:
    logits = torch.linspace(0, -1, 3000)
    kept = int((logits.softmax(0).cumsum(0) < 0.5).sum()) + 1
    last = max(draw(logits, SamplingParams(1.0, top_p=0.5), u / 500) for u in range(500))
    assert kept - 10 < last < kept


def test_top_p_zero_and_one_and_top_k_over_the_vocabulary_keep_all() -> None:
    logits = logits_of(0.4, 0.3, 0.2, 0.1)
    plain = [sample(logits[None], [SamplingParams(1.0, seed=3)], [i]) for i in range(50)]
    for params in (SamplingParams(1.0, 0, 0.0, 3), SamplingParams(1.0, 9, 1.0, 3), SamplingParams(1.0, 4, 1.0, 3)):
        assert [sample(logits[None], [params], [i]) for i in range(50)] == plain


def test_an_impossible_token_is_never_drawn() -> None:
    logits = torch.full((1000,), -torch.inf)
    logits[[3, 500]] = 0.0
    assert draws(logits, SamplingParams(1.0, seed=17), 300).nonzero().flatten().tolist() == [3, 500]


def test_the_ends_of_the_distribution_are_its_first_and_last_possible_token() -> None:
    logits = torch.tensor([-torch.inf, 0.0, 1.0, -torch.inf])
    assert draw(logits, SamplingParams(1.0), 0.0) == 1
    assert draw(logits, SamplingParams(1.0), 1 - 2**-53) == 2


def test_tiny_and_huge_temperatures_are_finite() -> None:
    logits = torch.tensor([[30.0, -80.0, 29.0]])
    assert sample(logits, [SamplingParams(1e-30)], [0]) == [0]
    assert {sample(logits, [SamplingParams(1e30, seed=4)], [i])[0] for i in range(60)} == {0, 1, 2}


def test_logits_that_differ_by_rounding_draw_the_same_token() -> None:
    logits = torch.randn(200, 2000, generator=torch.Generator().manual_seed(5))
    noisy = logits + 1e-6 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(6))
    params = [SamplingParams(0.8, top_k=40, top_p=0.9, seed=7)] * 200
    same = zip(sample(logits, params, range(200)), sample(noisy, params, range(200)), strict=True)
    assert sum(a == b for a, b in same) >= 199


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_index() -> None:
    numbers = torch.tensor([uniform(seed, index) for seed in range(50) for index in range(100)])
    assert len(numbers.unique()) == len(numbers)
    assert abs(float(numbers.mean()) - 0.5) < 0.02
    shares = torch.histc(numbers, 10, 0, 1) / len(numbers)
    assert bool(((shares - 0.1).abs() < 0.02).all())


def test_another_process_draws_the_same_tokens() -> None:
    code = """
import torch
from kvmesh.model.sampling import SamplingParams, sample
logits = torch.linspace(-3, 3, 500).sin().repeat(20, 1)
print(sample(logits, [SamplingParams(1.3, 100, 0.9, 2**64 - 1)] * 20, range(20)))
"""
    there = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    logits = torch.linspace(-3, 3, 500).sin().repeat(20, 1)
    here = sample(logits, [SamplingParams(1.3, 100, 0.9, 2**64 - 1)] * 20, range(20))
    assert there.strip() == str(here)
    assert len(set(here)) > 5
