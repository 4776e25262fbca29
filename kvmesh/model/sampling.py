"""How the next token is drawn from logits. Called by the worker of the last stage and of the decoder.

The random state is (seed, index of the output token) and nothing else: a counter-based uniform number and the inverse
of the cumulative distribution in the order of token ids. So a replay elsewhere draws the same token from the same
logits, and logits that differ by rounding move the borders between tokens by as little.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment
_HEAD_TOKENS = 256
"""Most likely tokens looked at first for top_p: they nearly always reach it, and sorting a whole vocabulary is slow."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request samples: temperature 0 is greedy; top_k 0 and top_p 0 or 1 keep all tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@torch.inference_mode()
def sample(logits: Tensor, params: Sequence[SamplingParams], indices: Sequence[int]) -> list[int]:
    """One token for each row.

    Args:
        logits: [B, V], fp32.
        params: how each row samples.
        indices: index in its request of the token each row draws.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()  # the lowest id on ties
    for row, (how, index) in enumerate(zip(params, indices, strict=True)):
        if how.temperature > 0:
            tokens[row] = draw(logits[row], how, uniform(how.seed, index))
    return tokens


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) of output token `index` of a request: two rounds of splitmix64."""
    return (_splitmix64(_splitmix64(seed & _MASK) ^ (index & _MASK)) >> 11) / (1 << 53)


def _splitmix64(state: int) -> int:
    z = (state + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def draw(logits: Tensor, how: SamplingParams, u: float) -> int:
    """The token at `u`, in [0, 1), of the distribution that temperature, top_k and top_p leave, in the order of ids."""
    scaled = (logits - logits.max()).double() / how.temperature
    if 0 < how.top_k < scaled.shape[0]:
        # Ties with the k-th stay, so the kept set does not depend on the order of equals.
        scaled = scaled.masked_fill(scaled < scaled.topk(how.top_k).values[-1], -torch.inf)
    weights = scaled.exp()
    if 0 < how.top_p < 1:
        weights = weights.masked_fill(weights < _nucleus_floor(weights, how.top_p), 0.0)
    cumulative = weights.cumsum(0)
    # Right of the border: a token of weight 0 is never drawn.
    token = torch.searchsorted(cumulative, u * cumulative[-1], right=True)
    return min(int(token), int(weights.nonzero()[-1]))


def _nucleus_floor(weights: Tensor, top_p: float) -> Tensor:
    """Weight of the least likely token of the smallest set of most likely ones whose share reaches `top_p`."""
    target = top_p * weights.sum()
    head = weights.topk(min(_HEAD_TOKENS, weights.shape[0])).values
    if head.sum() < target:
        head = weights.sort(descending=True).values
    reached = torch.searchsorted(head.cumsum(0), target)
    return head[min(int(reached), head.shape[0] - 1)]
