"""What members of one mesh must have in common, and how a misfit is told: with both values. Called by the roster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from kvmesh.errors import Misfit
from kvmesh.protocol.ids import Rank


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a member serves, as it says when it registers. Field names are those of the contract."""

    protocol_version: int
    model_name: str
    model_fingerprint: str
    dtype: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    max_tokens: int
    layer_begin: int
    layer_end: int
    vocab_size: int


OWN = frozenset({"layer_begin", "layer_end"})
"""Fields in which the stages of one pipeline differ."""
OF_THE_MESH = (
    "protocol_version",
    "model_name",
    "model_fingerprint",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
)
"""Fields that every member of a mesh shares; dtype and pages may differ where KV converts exactly."""


def check_same_mesh(who: str, new: Descriptor, other_who: str, other: Descriptor) -> None:
    """Raises:
    Misfit: two members can't serve one model together; the field and both values.
    """
    _compare(OF_THE_MESH, who, new, other_who, other)


def check_same_pipeline(who: str, new: Descriptor, other_who: str, other: Descriptor) -> None:
    """Raises:
    Misfit: two stages can't share a pipeline; the field and both values.
    """
    _compare([f.name for f in fields(Descriptor) if f.name not in OWN], who, new, other_who, other)


def check_layers(stages: Mapping[Rank, Descriptor], rank: Rank, pp_size: int) -> None:
    """Checks the layers of `rank` against its registered neighbours and the ends of the model.

    Raises:
        Misfit: a gap, an overlap, or an end that is not the model's; with both ranges.
    """
    own = stages[rank]
    mine = f"rank {rank} holds layers [{own.layer_begin}, {own.layer_end})"
    if rank == 0 and own.layer_begin != 0:
        raise Misfit(f"{mine}, and the model begins at layer 0")
    if rank == pp_size - 1 and own.layer_end != own.num_layers:
        raise Misfit(f"{mine}, and the model ends at layer {own.num_layers}")
    before, behind = stages.get(Rank(rank - 1)), stages.get(Rank(rank + 1))
    if before is not None and before.layer_end != own.layer_begin:
        raise Misfit(f"{mine}, and rank {rank - 1} holds [{before.layer_begin}, {before.layer_end}): they must meet")
    if behind is not None and behind.layer_begin != own.layer_end:
        raise Misfit(f"{mine}, and rank {rank + 1} holds [{behind.layer_begin}, {behind.layer_end}): they must meet")


def _compare(names: Sequence[str], who: str, new: Descriptor, other_who: str, other: Descriptor) -> None:
    for name in names:
        ours, theirs = getattr(new, name), getattr(other, name)
        if ours != theirs:
            raise Misfit(f"{name}: {who} has {ours}, {other_who} has {theirs}", field=name)
