"""Attention over pages: rotary positions, the layout of one forward's rows in the pool, and the attention itself.

Called by `transformer` once for each layer; the plan (`Batch`) is made once for a forward. A row is one new token; rows
of one room lie together. It knows the pool's slots, no room and no step.

    pool of one layer  [2 (K, V), H, P * S, D]         a room in a contiguous run of pages is a view, else it is gathered
    queries            [H (KV heads), G (queries of each), rows, D]
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.kv.layout import runs
from kvmesh.model.config import Llama3Rope, ModelConfig

BLOCK_ROWS = 64
"""Rows of a chunk that attend together. A block looks no further than its own last token: at 512 tokens that saves a third
of the time, which torch's own causal kernel does not."""


@dataclass(slots=True)
class Span:
    """Tokens [begin, end) of one sequence whose KV lies in `pages`: token t in page pages[t // page_size]."""

    pages: Sequence[int]
    begin: int
    end: int
    sample: bool
    """The last stage returns logits for the span's last token."""


@dataclass(slots=True)
class RowsOfSpan:
    """Rows [begin, end) of the batch, and what they attend to."""

    begin: int
    end: int
    context: slice | Tensor
    """Slots of the sequence's tokens [0, its end): a run, or all of them one by one."""


@dataclass(slots=True)
class Batch:
    """One forward's rows: where each stands and what it sees."""

    spans: list[RowsOfSpan]
    slots: Tensor
    """[T], where the KV of each row goes."""
    mask: Tensor
    """[BLOCK_ROWS, longest context + BLOCK_ROWS], added to scores: 0, and in the last BLOCK_ROWS columns -inf above the
    diagonal. The mask of any block is a window of it that ends at that diagonal."""
    cos: Tensor
    """[T, 1, D]"""
    sin: Tensor
    """[T, 1, D], the first half negated: rotated x = x * cos + roll(x, D / 2) * sin."""


class Rotary:
    """Rotary position embedding of one model."""

    def __init__(self, config: ModelConfig, device: str) -> None:
        self._frequencies = _frequencies(config).to(device)

    def table(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines, [T, 1, D] each, for positions [T]."""
        angles = torch.outer(positions.float(), self._frequencies)
        cos, sin = angles.cos(), angles.sin()
        return (
            torch.cat((cos, cos), dim=-1).unsqueeze(1).to(dtype),
            torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(dtype),
        )


def rotate(heads: Tensor, batch: Batch) -> Tensor:
    """Heads [T, H, D] turned by their positions."""
    return torch.addcmul(heads * batch.cos, heads.roll(heads.shape[-1] // 2, -1), batch.sin)


def plan_batch(spans: Sequence[Span], rotary: Rotary, *, page_size: int, dtype: torch.dtype, device: str) -> Batch:
    """The layout of one forward.

    Raises:
        IndexError: the pages of a span do not reach its end.
    """
    planned: list[RowsOfSpan] = []
    slots: list[int] = []
    positions: list[int] = []
    row = 0
    for span in spans:
        for run in runs(span.pages, page_size, span.begin, span.end):
            slots.extend(range(run.slot_begin, run.slot_begin + run.num_tokens))
        positions.extend(range(span.begin, span.end))
        num_rows = span.end - span.begin
        planned.append(RowsOfSpan(row, row + num_rows, _context(span, page_size, device)))
        row += num_rows
    longest = max((span.end for span in spans if span.end - span.begin > 1), default=0)
    cos, sin = rotary.table(torch.tensor(positions, device=device), dtype)
    return Batch(planned, torch.tensor(slots, device=device), _mask(longest, dtype, device), cos, sin)


def attend(queries: Tensor, kv: Tensor, batch: Batch) -> Tensor:
    """Attention of all rows over their own sequences.

    Args:
        queries: [T, Hq, D].
        kv: one layer of the pool, [2, H, P * S, D], with the rows' own KV already in it.

    Returns:
        [T, Hq * D].
    """
    num_kv_heads, head_dim = kv.shape[1], kv.shape[3]
    grouped = queries.view(queries.shape[0], num_kv_heads, -1, head_dim)
    parts = [_attend_span(grouped[span.begin : span.end], kv, span.context, batch.mask) for span in batch.spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_span(queries: Tensor, kv: Tensor, slots: slice | Tensor, mask: Tensor) -> Tensor:
    """Queries [rows, H, G, D] over one sequence → [rows, Hq * D]."""
    context = kv[:, :, slots] if isinstance(slots, slice) else kv.index_select(2, slots)
    k, v = context.unsqueeze(2)  # each [H, 1, context, D]
    num_rows, num_kv_heads, group, head_dim = queries.shape
    if num_rows == 1:
        # One row sees all of its context, so the queries of a group stand as rows of one attention: K and V are read once.
        out = functional.scaled_dot_product_attention(queries.view(num_kv_heads, 1, group, head_dim), k, v)
        return out.view(1, -1)
    out = torch.empty_like(queries)
    past = k.shape[2] - num_rows
    for begin in range(0, num_rows, BLOCK_ROWS):
        end = min(begin + BLOCK_ROWS, num_rows)
        seen, diagonal = past + end, mask.shape[1] - BLOCK_ROWS
        block = functional.scaled_dot_product_attention(
            queries[begin:end].permute(1, 2, 0, 3),
            k[:, :, :seen].expand(-1, group, -1, -1),
            v[:, :, :seen].expand(-1, group, -1, -1),
            attn_mask=mask[: end - begin, diagonal - (past + begin) : diagonal + end - begin],
        )
        out[begin:end] = block.permute(2, 0, 1, 3)
    return out.view(num_rows, -1)


def _context(span: Span, page_size: int, device: str) -> slice | Tensor:
    """The slots of the tokens [0, span.end)."""
    found = list(runs(span.pages, page_size, 0, span.end))
    if len(found) == 1:
        return slice(found[0].slot_begin, found[0].slot_begin + span.end)
    return torch.cat([torch.arange(r.slot_begin, r.slot_begin + r.num_tokens, device=device) for r in found])


def _mask(longest: int, dtype: torch.dtype, device: str) -> Tensor:
    """The mask of `Batch`: [BLOCK_ROWS, longest + BLOCK_ROWS]."""
    shape = (BLOCK_ROWS, longest + BLOCK_ROWS)
    return torch.full(shape, -math.inf, dtype=dtype, device=device).triu_(longest + 1)


def _frequencies(config: ModelConfig) -> Tensor:
    """[D / 2], radians for each position, fp32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if not isinstance(scaling, Llama3Rope):
        return plain / scaling.factor
    # Long waves are stretched by the factor, short ones kept, those between blended (Llama 3.1).
    turns = scaling.original_max_positions * plain / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return plain * kept + plain / scaling.factor * (1.0 - kept)
