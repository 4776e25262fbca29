"""The config.json that a GGUF's header amounts to. Called by `kvmesh.model.gguf`.

Says what the file says, also where that is not supported: `ModelConfig` reads the result and refuses by name. Only what
config.json has no word for is refused here.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvmesh.errors import BadConfig

ROPE_FREQS = "rope_freqs.weight"
"""The tensor that stands for Llama 3's rope scaling: the divisor of each rotary frequency."""

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192
"""The constants that all Llama 3.1 … 3.3 share; a GGUF keeps only the factors they lead to."""


class Header(Protocol):
    """What is read here of an opened GGUF."""

    path: Path
    architecture: str

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Tensors by name; each has a `shape`, fastest dimension first."""

    def fact(self, key: str, kind: type, default: object = ...) -> Any:
        """One value; BadConfig when it is absent without a default, or of another kind."""

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor, dequantised."""


def read_config(file: Header) -> dict[str, Any]:
    """Read the shape of the model.

    Raises:
        BadConfig: a fact is missing, contradicts another, or has no word in a config.json.
    """

    def fact(key: str, kind: type, default: object = ...) -> Any:
        return file.fact(f"{file.architecture}.{key}", kind, default)

    if fact("expert_count", int, 0):
        raise BadConfig(f"{file.path}: mixtures of experts are not supported")
    if "token_embd.weight" not in file.tensors:
        raise BadConfig(f"{file.path} has no tensor token_embd.weight")
    hidden, heads = fact("embedding_length", int), fact("attention.head_count", int)
    if heads < 1 or hidden < heads:
        raise BadConfig(f"{file.path}: {heads} heads can't share embedding_length {hidden}")
    head_dim = fact("attention.key_length", int, hidden // heads)
    return {
        "architectures": [f"{file.architecture.capitalize()}ForCausalLM"],
        "model_type": file.architecture,
        "vocab_size": int(file.tensors["token_embd.weight"].shape[-1]),
        "hidden_size": hidden,
        "intermediate_size": fact("feed_forward_length", int),
        "num_hidden_layers": fact("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": fact("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fact("context_length", int),
        "rms_norm_eps": fact("attention.layer_norm_rms_epsilon", float),
        "rope_parameters": _rope(file, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": file.architecture != "qwen2" and "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "dtype": "float32",
    }


def _rope(file: Header, head_dim: int) -> dict[str, Any]:
    """Base and scaling of the rotary embedding, in config.json's words."""
    name = f"{file.architecture}.rope"
    rope = {"rope_theta": file.fact(f"{name}.freq_base", float, 10000.0), "rope_type": "default"}
    rotary_dim = file.fact(f"{name}.dimension_count", int, head_dim)
    if rotary_dim != head_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    if ROPE_FREQS in file.tensors:
        return rope | _llama3(file, rope["rope_theta"], head_dim)
    kind = file.fact(f"{name}.scaling.type", str, "none")
    factor = file.fact(f"{name}.scaling.factor", float, file.fact(f"{name}.scale_linear", float, 1.0))
    if kind not in ("none", "linear") or factor != 1.0:
        rope |= {"rope_type": "linear" if kind == "none" else kind, "factor": factor}
    return rope


def _llama3(file: Header, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters that lead to the factors in the file.

    Raises:
        BadConfig: none does.
    """
    factors = file.values(ROPE_FREQS)
    factor = float(factors.max(initial=1.0))
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((_LLAMA3_ORIGINAL / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0, 1)
    meant = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != meant.shape or not np.allclose(factors, meant, rtol=1e-4):
        raise BadConfig(f"{file.path}: {ROPE_FREQS} does not follow Llama 3's rule, the only one supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }
