"""y = x W^T + b, as fast as this machine can.

Called by `transformer`, built by `weights`. On a CPU the weight is packed once into oneDNN's own order, which is two to
three times as fast as `torch.nn.functional.linear` (docs/decisions/0001-own-modules.md has the figures); elsewhere, or
where oneDNN lacks the format, it is that function. Knows no model.
"""

import os

import torch
from torch import Tensor
from torch.nn import functional

KERNELS_KEPT = 128
"""Compiled kernels that a process keeps: one for each number of rows and shape of weight, of up to 0.8 MB. A new one takes half
a millisecond and serves all layers. The default is 1,024, twice: a gigabyte, once prompts of every length have come."""
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # oneDNN's, and torch's own over it
    os.environ.setdefault(_cache, str(KERNELS_KEPT))  # both are read with the first product


class Linear:
    """One linear layer, weights only, for inference."""

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Args:
        weight: [out, in]; kept as it is, or copied into another order.
        bias: [out].
        """
        self._bias = bias
        self._packed = _can_pack(weight)
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out]."""
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return functional.linear(x, self._weight, self._bias)


def _can_pack(weight: Tensor) -> bool:
    """Whether oneDNN takes this weight on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32
