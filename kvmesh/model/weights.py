"""The tensors of a range of layers, mapped from their files, fused and packed. Called by `Runner.load`.

Only the tensors of the layers asked for are touched: a file is mapped, not read, so a stage of a large model never sees
the rest. Q, K and V become one linear layer, gate and up another.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from kvmesh.model.config import EMBEDDING, FINAL_NORM, LM_HEAD
from kvmesh.model.files import ModelFiles
from kvmesh.model.linear import Linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer layer."""

    input_norm: Tensor
    qkv: Linear
    """hidden → (Hq + 2 H) * D: queries, keys, values."""
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    """hidden → 2 * inner: gate, up."""
    down: Linear


@dataclass(frozen=True, slots=True)
class StageWeights:
    """All tensors of one range of layers."""

    embedding: Tensor | None
    """[V, hidden], when the range begins with layer 0."""
    layers: list[LayerWeights]
    final_norm: Tensor | None
    """When the range ends with the last layer."""
    head: Linear | None
    """hidden → V, when the range ends with the last layer."""


def load_weights(
    files: ModelFiles, layer_begin: int, layer_end: int, *, dtype: torch.dtype, device: str
) -> StageWeights:
    """Load layers [layer_begin, layer_end), with the embedding if they are the first and norm and head if the last."""
    config = files.config
    is_last = layer_end == config.num_layers
    with _one_thread(), torch.inference_mode(), _Reader(files, dtype, device) as read:
        layers = [_load_layer(read, f"model.layers.{layer}.") for layer in range(layer_begin, layer_end)]
        head_name = EMBEDDING if config.tie_embeddings else LM_HEAD
        return StageWeights(
            embedding=read.shared(EMBEDDING) if layer_begin == 0 else None,
            layers=layers,
            final_norm=read.own(FINAL_NORM) if is_last else None,
            head=read.linear(head_name) if is_last else None,
        )


def _load_layer(read: "_Reader", prefix: str) -> LayerWeights:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return LayerWeights(
        input_norm=read.own(prefix + "input_layernorm.weight"),
        qkv=read.linear(attention + "q_proj.weight", attention + "k_proj.weight", attention + "v_proj.weight"),
        q_norm=read.optional(attention + "q_norm.weight"),
        k_norm=read.optional(attention + "k_norm.weight"),
        o=read.linear(attention + "o_proj.weight"),
        mlp_norm=read.own(prefix + "post_attention_layernorm.weight"),
        gate_up=read.linear(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
        down=read.linear(mlp + "down_proj.weight"),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Loading waits for memory, not for arithmetic, and every process of a mesh loads at once: threads only spin here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Reader:
    """Maps the safetensors files of a model as they are needed; what it returns outlives it."""

    def __init__(self, files: ModelFiles, dtype: torch.dtype, device: str) -> None:
        self._files, self._dtype, self._device = files, dtype, device
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def shared(self, name: str) -> Tensor:
        """A tensor in the dtype asked for; it stays a map of the file where that fits, so unread rows cost no memory."""
        return self._mapped(name).to(device=self._device, dtype=self._dtype)

    def own(self, name: str) -> Tensor:
        """A tensor in memory of its own, in the dtype asked for."""
        return self._mapped(name).to(device=self._device, dtype=self._dtype, copy=True)

    def optional(self, name: str) -> Tensor | None:
        """The tensor, or None where this architecture has none."""
        return self.own(name) if name in self._files.weights else None

    def linear(self, *names: str) -> Linear:
        """The weights of these names (each ending in .weight) below one another as one linear layer, with biases."""
        biases = [name.removesuffix("weight") + "bias" for name in names]
        has_bias = biases[0] in self._files.weights
        return Linear(self._joined(names), self._joined(biases) if has_bias else None)

    def _joined(self, names: Sequence[str]) -> Tensor:
        parts = [self.shared(name) for name in names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _mapped(self, name: str) -> Tensor:
        path = self._files.weights[name]
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        tensor: Tensor = self._open[path].get_tensor(name)
        return tensor
