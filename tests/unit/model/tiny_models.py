"""Tiny random models of each architecture, saved by transformers: the reference that our modules must agree with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from kvmesh.kv.layout import DTypeName
from kvmesh.model.files import ModelFiles
from kvmesh.model.runner import Runner

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
COMMON = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 6, "rms_norm_eps": 1e-5}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": (
        "llama",
        {"tie_word_embeddings": True, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
    ),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 24, "num_key_value_heads": 3}),
}
"""Name → transformers model type and what differs from COMMON."""


@dataclass(frozen=True)
class Tiny:
    """One model, ours on disk and theirs in memory."""

    files: ModelFiles
    reference: Any

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """The reference's logits of every position, [T, V]."""
        with torch.inference_mode():
            logits: torch.Tensor = self.reference(torch.tensor([tokens])).logits[0]
            return logits.float()

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The tokens that the reference generates after the prompt."""
        out = self.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            do_sample=False,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens


def make_tiny(architecture: str, directory: Path) -> Tiny:
    model_type, differs = ARCHITECTURES[architecture]
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **differs})
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(sum(architecture.encode()))
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            # Norms around 1 and biases away from 0, so that leaving one out is seen; weights large enough that the
            # logits of different tokens lie far apart.
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if "norm" in name else 0.15 * noise)
    reference.save_pretrained(directory, max_shard_size="40KB")
    (directory / "tokenizer.json").write_text("{}")
    return Tiny(ModelFiles.open(directory), reference)


def load(tiny: Tiny, dtype: DTypeName = "fp32", layers: tuple[int, int] | None = None) -> Runner:
    """A runner over these layers, or all, with 40 pages of 4 tokens."""
    begin, end = layers or (0, tiny.files.config.num_layers)
    return Runner.load(tiny.files, begin, end, dtype=dtype, device="cpu", num_pages=40, page_size=4)


def tokens_of(seed: int, count: int) -> list[int]:
    """A random prompt."""
    drawn: list[int] = torch.randint(0, 101, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn
