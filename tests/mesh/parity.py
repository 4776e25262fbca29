"""The one rule for tokens: the reference is fed the mesh's own tokens, and each lies near the reference's top logit."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvmesh.client import Client

NEAR_TIE = 1e-3
"""fp32: kernels round differently for another batch or chunking; see docs/protocol.md §4."""


NEAR_TIE_ROUNDED = 0.5
"""Where a part of the mesh computes in bf16, or KV travelled rounded, with SmolLM2: bf16 moved its logits by up to 0.28 (one
prompt of 128 tokens), and two may move towards each other. Seen so far: 0.10."""
NEAR_TIE_ROUNDED_TINY = 0.01
"""The same with the tiny model, whose logits are below 1: bf16 rounds such a number by up to 2^-9, which a few roundings on the
way to either of two logits add to. Tokens at random lie 0.8 to 1.1 below the top one; seen so far: 0.0013."""


class Reference:
    """transformers on the same weights, fp32."""

    def __init__(self, directory: Path) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model.train(False)
        self.vocab_size = int(self._model.config.vocab_size)

    def gap(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        """How far the worst token of an output lies below the reference's top logit; 0 where all are its choice."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].float()
        drawn = logits.gather(1, torch.tensor(list(output))[:, None])[:, 0]
        return float((logits.max(dim=1).values - drawn).max())

    def check(self, prompt: Sequence[int], output: Sequence[int], length: int, near_tie: float = NEAR_TIE) -> None:
        """Asserts that an output is whole and what the reference would say."""
        assert len(output) == length
        gap = self.gap(prompt, output)
        assert gap <= near_tie, f"a token of a prompt of {len(prompt)} lies {gap} below the reference's top logit"


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


async def answer(client: Client, prompt: Sequence[int], length: int) -> list[int]:
    """A greedy completion of exactly `length` tokens, with every index checked."""
    output: list[int] = []
    async for piece in client.generate(tokens=prompt, max_output_tokens=length, ignore_eos=True, timeout_seconds=240):
        assert piece.index == len(output), "no token twice, none missing"
        output += piece.tokens
    return output


async def answers(gateway: str, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """All at once."""
    async with Client(gateway) as client:
        return await asyncio.gather(*(answer(client, prompt, length) for prompt in prompts))
