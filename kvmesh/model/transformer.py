"""One decoder-only transformer layer of the Llama family, over paged KV. Called by `Runner` for each of its layers.

Pure computation: weights, rows and one layer of the pool in, rows out; the rows' KV is written into the pool.
"""

from torch import Tensor
from torch.nn import functional

from kvmesh.model.attention import Batch, attend, rotate
from kvmesh.model.config import ModelConfig
from kvmesh.model.weights import LayerWeights


def run_layer(weights: LayerWeights, config: ModelConfig, hidden: Tensor, kv: Tensor, batch: Batch) -> Tensor:
    """Rows through one layer.

    Args:
        hidden: [T, hidden].
        kv: this layer of the pool, [2, H, P * S, D]; the slots of `batch` are written.

    Returns:
        [T, hidden].
    """
    attended = _attention(weights, config, rms_norm(hidden, weights.input_norm, config), kv, batch)
    hidden = weights.o(attended).add_(hidden)
    gate_up = weights.gate_up(rms_norm(hidden, weights.mlp_norm, config))
    gate, up = gate_up.chunk(2, dim=-1)
    return weights.down(functional.silu(gate).mul_(up)).add_(hidden)


def rms_norm(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    """Root mean square norm over the last dimension."""
    return functional.rms_norm(x, (x.shape[-1],), weight, config.rms_norm_eps)


def _attention(weights: LayerWeights, config: ModelConfig, x: Tensor, kv: Tensor, batch: Batch) -> Tensor:
    """[T, hidden] → [T, Hq * D], before the output projection."""
    num_q, num_kv = config.num_heads, config.num_kv_heads
    heads = weights.qkv(x).view(-1, num_q + 2 * num_kv, config.head_dim)
    turned, values = heads[:, : num_q + num_kv], heads[:, num_q + num_kv :]
    if weights.q_norm is not None and weights.k_norm is not None:
        turned[:, :num_q] = rms_norm(turned[:, :num_q], weights.q_norm, config)
        turned[:, num_q:] = rms_norm(turned[:, num_q:], weights.k_norm, config)
    turned = rotate(turned, batch)
    kv[0].index_copy_(1, batch.slots, turned[:, num_q:].transpose(0, 1))
    kv[1].index_copy_(1, batch.slots, values.transpose(0, 1))
    return attend(turned[:, :num_q], kv, batch)
