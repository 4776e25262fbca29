"""Copies of a world, and fingerprints: what the search needs of states, and nothing about what they mean.

Frozen records, enums and numbers are shared between copies; everything else is copied. Two states with one fingerprint count as
one: it has 64 bits, so among a million states the chance that any two of them differ in truth is below one in a million.
"""

from collections import Counter, deque
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

_ATOMS = (int, float, str, bytes, bool, type(None), frozenset)
_HASHED = frozenset((int, float, str, bytes, bool, type(None)))
_SHARED: dict[type, bool] = {}
_SLOTS: dict[type, tuple[str, ...]] = {}
_SEEN_NAMES: dict[tuple[type, "Blind"], tuple[tuple[str, bool], ...]] = {}
"""Of each class: the attributes that a fingerprint sees, and whether their order counts."""
_HASHES: dict[int, tuple[object, int]] = {}
"""By id; the record is kept, so that the id stays its own."""


def is_shared(kind: type) -> bool:
    """Whether values of a type never change."""
    known = _SHARED.get(kind)
    if known is None:
        frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        known = _SHARED[kind] = issubclass(kind, (*_ATOMS, Enum, BaseException)) or frozen
    return known


def names_of(value: object) -> tuple[str, ...]:
    """The attributes that make up an object."""
    kind = type(value)
    slots = _SLOTS.get(kind)
    if slots is None:
        found = [name for base in reversed(kind.__mro__) for name in getattr(base, "__slots__", ())]
        slots = _SLOTS[kind] = tuple(found)
    return slots or tuple(vars(value))


def copy(value: Any, made: dict[int, Any]) -> Any:
    """A copy that shares nothing that changes.

    Args:
        made: copies by the id of the original; what is referred to twice is copied once.
    """
    kind = type(value)
    shared = _SHARED.get(kind)
    if shared or (shared is None and is_shared(kind)):
        return value
    done = made.get(id(value))
    if done is not None:
        return done
    if kind is dict or kind is Counter:
        table = made[id(value)] = kind()
        for key, item in value.items():
            table[key] = item if type(item) in _HASHED else copy(item, made)
        return table
    if kind is tuple:
        items = [copy(item, made) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else tuple(items)
    if kind is list or kind is deque:
        row = made[id(value)] = kind()
        row.extend([copy(item, made) for item in value])
        return row
    if kind is set:
        made[id(value)] = set(value)
        return made[id(value)]
    new = made[id(value)] = object.__new__(kind)
    for name in names_of(value):
        item = getattr(value, name)
        setattr(new, name, item if type(item) in _HASHED else copy(item, made))
    return new


@dataclass(frozen=True, slots=True)
class Blind:
    """What a fingerprint does not see."""

    left_out: frozenset[str]
    """Attributes that no behaviour depends on."""
    unordered: frozenset[str]
    """Attributes whose dicts are only looked up in: their order tells nothing."""


def fingerprint(value: Any, seen: dict[int, int], blind: Blind, *, ordered: bool = True) -> int:
    """A hash of everything reachable. An object met again counts by the place where it was met first.

    Args:
        seen: empty at first.
        ordered: whether the order of a dict counts.
    """
    kind = type(value)
    if kind in _HASHED:
        return hash(value)
    shared = _SHARED.get(kind)
    if shared or (shared is None and is_shared(kind)):
        return _shared_hash(value)
    at = seen.get(id(value))
    if at is not None:
        return at
    seen[id(value)] = len(seen)
    if kind is dict or kind is Counter:
        items = value.items() if ordered else sorted(value.items(), key=_key)
        parts = [(k if type(k) in _HASHED else _key_hash(k, seen, blind), _part(v, seen, blind)) for k, v in items]
        return hash(("d", *parts))
    if kind is tuple or kind is list or kind is deque:
        return hash(("s", *[i if type(i) in _HASHED else fingerprint(i, seen, blind) for i in value]))
    if kind is set:
        return hash(frozenset(value))
    seen_names = _SEEN_NAMES.get((kind, blind))
    if seen_names is None:
        names = [n for n in names_of(value) if n not in blind.left_out]
        seen_names = _SEEN_NAMES[kind, blind] = tuple((n, n not in blind.unordered) for n in names)
    return hash((kind.__name__, *[_part(getattr(value, n), seen, blind, ordered) for n, ordered in seen_names]))


def _part(value: Any, seen: dict[int, int], blind: Blind, ordered: bool = True) -> Any:
    return value if type(value) in _HASHED else fingerprint(value, seen, blind, ordered=ordered)


def _key(item: tuple[Any, Any]) -> Any:
    return item[0]


def _key_hash(key: Any, seen: dict[int, int], blind: Blind) -> int:
    return fingerprint(key, seen, blind) if isinstance(key, tuple) else _shared_hash(key)


def _shared_hash(value: Any) -> int:
    if isinstance(value, _ATOMS):
        return hash(value)
    known = _HASHES.get(id(value))
    if known is None:
        known = _HASHES[id(value)] = (value, _hash_of(value))
    return known[1]


def _hash_of(value: Any) -> int:
    """Of a frozen record, which may hold what has no hash of its own."""
    if isinstance(value, Enum):
        return hash((type(value).__name__, value.name))
    if isinstance(value, BaseException):
        return hash((type(value).__name__, str(value)))
    if is_dataclass(value):
        return hash((type(value).__name__, *[_plain_hash(getattr(value, f.name)) for f in fields(value)]))
    return hash(value)


def _plain_hash(value: Any) -> int:
    if isinstance(value, tuple | list):
        return hash(tuple(_plain_hash(v) for v in value))
    if isinstance(value, dict):
        return hash(tuple((_plain_hash(k), _plain_hash(v)) for k, v in value.items()))
    return _shared_hash(value)
