"""y = x W^T + b, as fast as this machine can.

Called by `transformer`, built by `weights`. On a CPU the weight is packed once into oneDNN's own order, which is two to
three times as fast as `torch.nn.functional.linear` (docs/decisions/0001-own-modules.md has the figures); elsewhere, or
where oneDNN lacks the format, it is that function. Knows no model.
"""

import torch
from torch import Tensor
from torch.nn import functional


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
