"""A range of a model's layers with their pages, run forward. Called by the workers of prefill stages and of decoders.

One forward serves prefill chunks, decode rows and mixtures of them. The thread that calls it owns the runner; pages that no
span names may be written by another thread meanwhile. It knows spans of sequences in pages; rooms, steps and who allocates
pages are its callers' concern.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.kv.layout import DTypeName
from kvmesh.kv.pool import PagePool
from kvmesh.kv.wire import TORCH_DTYPES
from kvmesh.model.attention import Rotary, Span, plan_batch
from kvmesh.model.config import ModelConfig
from kvmesh.model.files import ModelFiles
from kvmesh.model.transformer import rms_norm, run_layer
from kvmesh.model.weights import StageWeights, load_weights

__all__ = ["Runner", "Span"]


class Runner:
    """Layers [layer_begin, layer_end) of one model."""

    def __init__(self, config: ModelConfig, weights: StageWeights, pool: PagePool) -> None:
        """Args:
        weights: of the layers that `pool` has pages for, in its dtype and on its device.
        """
        self._config = config
        self._weights = weights
        self._rotary = Rotary(config, str(pool.slots.device))
        self.pool = pool

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        layer_begin: int,
        layer_end: int,
        *,
        dtype: DTypeName,
        device: str,
        num_pages: int,
        page_size: int,
    ) -> "Runner":
        """Map and pack the layers' tensors (with the embedding or head where they belong) and make their pages."""
        config = files.config
        weights = load_weights(files, layer_begin, layer_end, dtype=TORCH_DTYPES[dtype], device=device)
        layers = (layer_begin, layer_end)
        pool = PagePool(layers, config.num_kv_heads, config.head_dim, page_size, num_pages, dtype, device)
        return cls(config, weights, pool)

    @property
    def is_first(self) -> bool:
        """Takes token ids, not activations."""
        return self.pool.shard.layer_begin == 0

    @property
    def is_last(self) -> bool:
        """Returns logits, not activations."""
        return self.pool.shard.layer_end == self._config.num_layers

    @property
    def hidden_size(self) -> int:
        """Width of the activations."""
        return self._config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._config.vocab_size

    @torch.inference_mode()
    def forward(
        self, spans: Sequence[Span], inputs: Tensor, between_layers: Callable[[], None] | None = None
    ) -> Tensor:
        """Compute the spans' tokens; their KV is written into their pages.

        Args:
            spans: at least one, none empty; the KV of tokens [0, begin) of each already stands in its pages.
            inputs: token ids [T] int64 at the first stage, else activations [T, hidden]; rows in the spans' order.
            between_layers: called after every layer.

        Returns:
            Activations [T, hidden]; at the last stage logits [spans with `sample`, V], fp32.

        Raises:
            IndexError: the pages of a span do not reach its end, or a token id lies outside the vocabulary.
        """
        pool, dtype = self.pool, self.pool.slots.dtype
        device = str(pool.slots.device)
        batch = plan_batch(spans, self._rotary, page_size=pool.page_size, dtype=dtype, device=device)
        hidden = self._embed(inputs.to(device))
        for layer, weights in enumerate(self._weights.layers, pool.shard.layer_begin):
            hidden = run_layer(weights, self._config, hidden, pool.kv(layer), batch)
            if between_layers is not None:
                between_layers()
        if not self.is_last:
            return hidden
        sampled = [rows.end - 1 for span, rows in zip(spans, batch.spans, strict=True) if span.sample]
        return self._logits(hidden, sampled)

    def _embed(self, inputs: Tensor) -> Tensor:
        table = self._weights.embedding
        return inputs if table is None else functional.embedding(inputs, table)

    def _logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        norm, head = self._weights.final_norm, self._weights.head
        if norm is None or head is None:
            raise RuntimeError("a stage without the last layer has no logits")
        if not rows:
            return torch.empty(0, self.vocab_size)
        return head(rms_norm(hidden[rows], norm, self._config)).float()
