"""What members of one mesh must have in common, and how a misfit is told: with both values.

Called when a member registers, by the roster (among the stages of a pipeline) and the registry (across the mesh). Between a
pipeline and a decoder dtype and pages may differ as they like: the stages convert what they send.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from kvmesh.errors import Misfit
from kvmesh.protocol.ids import Rank
from kvmesh.protocol.version import PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a member serves, as it says when it registers. Field names are those of the contract."""

    protocol_version: int
    model_name: str
    model_fingerprint: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    max_tokens: int
    layer_begin: int
    layer_end: int
    vocab_size: int

    @property
    def pool_tokens(self) -> int:
        """Tokens that the empty pool holds."""
        return self.num_pages * self.page_size


OWN_FIELDS = ("layer_begin", "layer_end")
"""In which the stages of one pipeline differ."""
MESH_FIELDS = (
    "protocol_version",
    "model_fingerprint",
    "model_name",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
)
"""Which every member of a mesh shares: it serves one model, under one name."""
PIPELINE_FIELDS = (*MESH_FIELDS, *(f.name for f in fields(Descriptor) if f.name not in (*MESH_FIELDS, *OWN_FIELDS)))
"""Which the stages of one pipeline share, too: rank 0 gives out pages for all of them."""


def check_version(who: str, descriptor: Descriptor) -> None:
    """Raises:
    Misfit: the member speaks another protocol than this registry.
    """
    if descriptor.protocol_version != PROTOCOL_VERSION:
        raise Misfit(
            f"protocol_version: {who} has {descriptor.protocol_version}, the registry has {PROTOCOL_VERSION}",
            field="descriptor.protocol_version",
        )


def check_same_mesh(who: str, own: Descriptor, peer: str, others: Descriptor) -> None:
    """Raises:
    Misfit: the two can't serve one model together; the field and both values.
    """
    _compare(MESH_FIELDS, who, own, peer, others)


def check_same_pipeline(who: str, own: Descriptor, peer: str, others: Descriptor) -> None:
    """Raises:
    Misfit: the two can't be stages of one pipeline; the field and both values.
    """
    _compare(PIPELINE_FIELDS, who, own, peer, others)


def check_ends(rank: Rank, own: Descriptor, pp_size: int) -> None:
    """Checks the layers of a stage against the model.

    Raises:
        Misfit: an end that is not the model's, or too few layers left to the other stages.
    """
    mine = f"layers: rank {rank} has {_layers(own)}"
    if rank == 0 and own.layer_begin != 0:
        raise _layer_misfit(f"{mine}, the model begins at 0")
    if rank == pp_size - 1 and own.layer_end != own.num_layers:
        raise _layer_misfit(f"{mine}, the model ends at {own.num_layers}")
    if own.layer_begin < rank or own.num_layers - own.layer_end < pp_size - 1 - rank:
        raise _layer_misfit(f"{mine}, which leaves too few of {own.num_layers} layers to the other {pp_size - 1} ranks")


def check_layers(rank: Rank, own: Descriptor, peer: Rank, others: Descriptor) -> None:
    """Checks the layers of two stages of a pipeline, so that a gap or an overlap is found with the second of them to come.

    Raises:
        Misfit: neighbours that don't meet, others that leave no layer to each rank between, two of one rank that differ; both
            ranges.
    """
    if rank == peer:
        fits = _layers(own) == _layers(others)
    elif rank < peer:
        fits = _may_tile(own.layer_end, others.layer_begin, ranks_between=peer - rank - 1)
    else:
        fits = _may_tile(others.layer_end, own.layer_begin, ranks_between=rank - peer - 1)
    if not fits:
        both = f"layers: rank {rank} has {_layers(own)}, rank {peer} has {_layers(others)}"
        raise _layer_misfit(f"{both}: the stages must tile the model without gap or overlap")


def _may_tile(end: int, begin: int, *, ranks_between: int) -> bool:
    return begin == end if ranks_between == 0 else begin - end >= ranks_between


def _layers(descriptor: Descriptor) -> str:
    return f"[{descriptor.layer_begin}, {descriptor.layer_end})"


def _layer_misfit(message: str) -> Misfit:
    return Misfit(message, field="descriptor.layers")


def _compare(names: Iterable[str], who: str, own: Descriptor, peer: str, others: Descriptor) -> None:
    for name in names:
        mine, theirs = getattr(own, name), getattr(others, name)
        if mine != theirs:
            raise Misfit(f"{name}: {who} has {mine}, {peer} has {theirs}", field=f"descriptor.{name}")
