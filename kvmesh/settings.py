"""Settings: a frozen dataclass, filled from flags and `KVMESH_*` variables. Called in `__main__` and nowhere else.

Field `num_pages` is flag `--num-pages` and variable `KVMESH_NUM_PAGES`; a flag wins. Loud on what is unknown, malformed or
contradicting: one line that names the setting. Knows no service's fields, only their names.
"""

import argparse
import dataclasses
import difflib
import math
import os
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Union

from kvmesh.errors import BadConfig

PREFIX = "KVMESH_"
BAD_CONFIG_EXIT = 2

T = TypeVar("T")

KNOWN_FIELDS = frozenset(
    """
    advertise assign_wait_seconds bootstrap cache_dir connection_seconds device drain_seconds dtype grace_seconds
    health_listen heartbeat_seconds in_flight_mib kv_wire layers lease_seconds listen log_level max_attempts
    max_running_rooms max_tokens max_waiting_rooms metrics_listen model model_name num_pages page_size pipeline pp_size
    rank replicas request_seconds shared_mib state_dir step_tokens threads tls_ca tls_cert tls_key tls_name
    watchdog_seconds window_mib
    """.split()  # noqa: SIM905  # one name a line would be a page
)
"""Fields of any service: one environment may configure several, each takes its own. A test keeps the list true."""

COMMAND_FIELDS = frozenset({"gateway"})
"""What only the command line reads."""

# Kubernetes and container links put an address of each neighbouring Service into the environment, under its name.
_LINK_VARIABLE = re.compile(r".+_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def setting(default: Any = dataclasses.MISSING, *, help: str) -> Any:  # noqa: A002  # as argparse has it
    """A field of a settings class.

    Args:
        default: its value when nothing is given; without one, it must be given.
        help: one line for `--help`.
    """
    return dataclasses.field(default=default, metadata={"help": help})


def load(cls: type[T], argv: Sequence[str], environ: Mapping[str, str], *, program: str | None = None) -> T:
    """Reads the settings of one service.

    Args:
        cls: a dataclass of str, int, float, bool, Path, or one of these or None; its `check()`, where it has one, raises
            BadConfig for values that contradict each other.
        argv: the flags, without the program's name. `--help` prints all of them and exits.
        environ: the environment.
        program: the program's name, for `--help`.

    Raises:
        BadConfig: one line that names what is wrong.
    """
    kinds = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]  # a dataclass, as stated
    given = _from_environment(fields.keys(), environ) | _from_flags(fields, argv, program)
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in given:
            source, text = given[name]
            values[name] = _read(source, text, kinds[name])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise BadConfig(f"{name} is needed: give {_flag(name)} or {_variable(name)}")
    loaded = cls(**values)
    check = getattr(loaded, "check", None)
    if check is not None:
        check()
    return loaded


def load_or_exit(cls: type[T], program: str | None = None) -> T:
    """Reads this process's flags and environment; what is wrong with them is one line on stderr, and exit 2."""
    try:
        return load(cls, sys.argv[1:], os.environ, program=program)
    except BadConfig as error:
        print(error, file=sys.stderr)
        sys.exit(BAD_CONFIG_EXIT)


class _Parser(argparse.ArgumentParser):
    """argparse, with its complaints as BadConfig."""

    def error(self, message: str) -> NoReturn:
        raise BadConfig(message)


def _from_flags(
    fields: Mapping[str, dataclasses.Field[Any]], argv: Sequence[str], program: str | None
) -> dict[str, tuple[str, str]]:
    parser = _Parser(prog=program, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, field in fields.items():
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        words = f"{field.metadata.get('help', '')} [{_variable(name)}{'; needed' if needed else f'; default {field.default}'}]"
        flag: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "metavar": "VALUE", "help": _escape(words)}
        if field.type in (bool, "bool"):
            flag |= {"nargs": "?", "const": "true"}
        parser.add_argument(_flag(name), **flag)
    found, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise BadConfig(f"unknown flag {unknown[0]}{_nearest(unknown[0], [_flag(n) for n in fields])}")
    return {name: (_flag(name), text) for name, text in vars(found).items()}


def _from_environment(names: typing.Iterable[str], environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    own = {_variable(name): name for name in names}
    known = own.keys() | {_variable(name) for name in KNOWN_FIELDS | COMMAND_FIELDS}
    given = {}
    for variable, text in environ.items():
        if variable in own:
            given[own[variable]] = (variable, text)
        elif variable.startswith(PREFIX) and variable not in known and not _LINK_VARIABLE.fullmatch(variable):
            raise BadConfig(f"unknown variable {variable}{_nearest(variable, sorted(known))}")
    return given


def _read(source: str, text: str, kind: Any) -> Any:
    """The value a text stands for."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is Union:
        return _read(source, text, next(k for k in typing.get_args(kind) if k is not type(None)))
    try:
        return _READERS[kind](text)
    except KeyError:
        raise TypeError(f"a setting can't be a {kind}") from None
    except ValueError:
        raise BadConfig(f"{source} is {text!r}; {_WANTED[kind]} is needed") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _truth(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(text)


def _path(text: str) -> Path:
    if not text:
        raise ValueError(text)
    return Path(text).expanduser()


_READERS: dict[Any, typing.Callable[[str], Any]] = {str: str, int: int, float: _finite, bool: _truth, Path: _path}
_WANTED = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _escape(text: str) -> str:
    return text.replace("%", "%%")


def _nearest(wrong: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(wrong.partition("=")[0], known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
