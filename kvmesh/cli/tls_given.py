"""The certificate files that a command was given, as flags or variables. Called by `kvmesh up` and `kvmesh trace`.

The flags are those of the services themselves, with the same names.
"""

import argparse
import os
from pathlib import Path

from kvmesh.rpc.tls import Tls, load_tls

_FILES = {
    "tls_cert": "PEM file: the certificate to show",
    "tls_key": "PEM file: its private key",
    "tls_ca": "PEM file: the CAs that sign all members' certificates",
}
_NAME_HELP = "name in the certificates of stages, where their addresses are not in them"


def add_tls_flags(command: argparse.ArgumentParser, effect: str) -> None:
    """Adds the four flags; `effect`: what the files bring about."""
    group = command.add_argument_group("TLS", f"with these three files {effect}")
    for field, meaning in _FILES.items():
        default = os.environ.get(_variable(field)) or None
        group.add_argument(_flag(field), type=_path, default=default, help=f"{meaning} [{_variable(field)}]")
    name = os.environ.get(_variable("tls_name"), "")
    group.add_argument("--tls-name", default=name, help=f"{_NAME_HELP} [{_variable('tls_name')}]")


def tls_given(flags: argparse.Namespace) -> Tls | None:
    """The files, read and checked; None without any.

    Raises:
        BadConfig: only a part is given, or a file is unusable.
    """
    return load_tls(flags.tls_cert, flags.tls_key, flags.tls_ca, flags.tls_name)


def tls_words(flags: argparse.Namespace) -> tuple[str, ...]:
    """The same as words of a command line, for services that are started and commands that are shown."""
    given = [(_flag(field), str(path.absolute())) for field in _FILES if (path := getattr(flags, field)) is not None]
    named = [("--tls-name", flags.tls_name)] if flags.tls_name else []
    return tuple(word for pair in [*given, *named] for word in pair)


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _variable(field: str) -> str:
    return "KVMESH_" + field.upper()
