from itertools import permutations

import pytest
from registry_peers import descriptor

from kvmesh.errors import Misfit
from kvmesh.protocol.descriptors import (
    MESH_FIELDS,
    OWN_FIELDS,
    PIPELINE_FIELDS,
    Descriptor,
    check_ends,
    check_layers,
    check_same_mesh,
    check_same_pipeline,
    check_version,
)
from kvmesh.protocol.ids import Rank
from kvmesh.protocol.version import PROTOCOL_VERSION

FIELDS = set(Descriptor.__slots__)


def other_value(value: object) -> object:
    return value + 1 if isinstance(value, int) else f"{value}x"


def test_every_field_is_compared_in_a_pipeline_but_the_layers() -> None:
    assert set(PIPELINE_FIELDS) | set(OWN_FIELDS) == FIELDS
    assert set(MESH_FIELDS) < set(PIPELINE_FIELDS)


@pytest.mark.parametrize("name", sorted(FIELDS - set(OWN_FIELDS)))
def test_stages_of_a_pipeline_agree_in_every_field(name: str) -> None:
    """F-M1, F-M2"""
    base = descriptor()
    value = getattr(base, name)
    changed = descriptor(**{name: other_value(value)})
    with pytest.raises(Misfit) as caught:
        check_same_pipeline("rank 0", changed, "rank 1", base)
    assert caught.value.message == f"{name}: rank 0 has {other_value(value)}, rank 1 has {value}"
    assert caught.value.field == f"descriptor.{name}"


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_members_of_a_mesh_agree_in_the_model_and_in_nothing_else(name: str) -> None:
    base = descriptor()
    changed = descriptor(**{name: other_value(getattr(base, name))})
    if name in MESH_FIELDS:
        with pytest.raises(Misfit, match=f"{name}: d has .*, p has "):
            check_same_mesh("d", changed, "p", base)
    else:
        check_same_mesh("d", changed, "p", base)


def test_another_protocol_version_is_refused_with_both() -> None:
    with pytest.raises(Misfit, match=f"protocol_version: rank 0 has 99, the registry has {PROTOCOL_VERSION}"):
        check_version("rank 0", descriptor(protocol_version=99))


def arrive(ranges: list[tuple[int, int]], order: tuple[int, ...]) -> None:
    """Stages arrive in an order, each checked against those that are there."""
    there: dict[Rank, Descriptor] = {}
    for rank in map(Rank, order):
        own = descriptor(layer_begin=ranges[rank][0], layer_end=ranges[rank][1])
        check_ends(rank, own, len(ranges))
        for peer, others in there.items():
            check_layers(rank, own, peer, others)
        there[rank] = own


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_layers_that_tile_the_model_fit_in_any_order(order: tuple[int, ...]) -> None:
    arrive([(0, 1), (1, 9), (9, 12)], order)


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 4), (5, 8), (8, 12)],
        [(0, 4), (3, 8), (8, 12)],
        [(1, 4), (4, 8), (8, 12)],
        [(0, 4), (4, 8), (8, 11)],
        [(0, 6), (6, 12), (0, 12)],
        [(8, 12), (4, 8), (0, 4)],
        [(0, 6), (5, 7), (6, 12)],
    ],
)
def test_a_gap_or_an_overlap_is_found_in_any_order(ranges: list[tuple[int, int]], order: tuple[int, ...]) -> None:
    with pytest.raises(Misfit) as caught:
        arrive(ranges, order)
    assert caught.value.field == "descriptor.layers"
    assert caught.value.message.count("[") >= 1


def test_two_stages_that_leave_no_layer_to_the_one_between_are_refused_before_it_comes() -> None:
    low, high = descriptor(layer_begin=0, layer_end=6), descriptor(layer_begin=6, layer_end=12)
    with pytest.raises(Misfit, match=r"rank 2 has \[6, 12\), rank 0 has \[0, 6\)"):
        check_layers(Rank(2), high, Rank(0), low)
    with pytest.raises(Misfit, match="too few of 12 layers"):
        check_ends(Rank(1), low, 3)


def test_a_replacement_holds_the_layers_of_its_predecessor() -> None:
    check_layers(Rank(1), descriptor(layer_begin=5), Rank(1), descriptor(layer_begin=5))
    with pytest.raises(Misfit, match=r"rank 1 has \[4, 12\), rank 1 has \[5, 12\)"):
        check_layers(Rank(1), descriptor(layer_begin=4), Rank(1), descriptor(layer_begin=5))
