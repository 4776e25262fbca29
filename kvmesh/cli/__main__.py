"""`kvmesh up | chat | status | trace | size`: reads the command line and runs one command."""

import argparse
import os
import sys
from pathlib import Path

from kvmesh.cli import chat, size, status, trace, up
from kvmesh.errors import BadConfig, KvmeshError
from kvmesh.settings import BAD_CONFIG_EXIT

_DEFAULT_CACHE = "~/.cache/kvmesh"


def main() -> None:
    """Runs the command and exits: 0 well, 1 failed, 2 used wrongly."""
    flags = _parser().parse_args()
    try:
        code = flags.run(flags)
    except BadConfig as error:
        print(error, file=sys.stderr)
        code = BAD_CONFIG_EXIT
    except KvmeshError as error:
        print(error.message, file=sys.stderr)
        code = 1
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvmesh", description="A mesh of services that serves a language model.")
    commands = parser.add_subparsers(required=True, metavar="up | chat | status | trace | size")
    cache_dir = Path(os.environ.get("KVMESH_CACHE_DIR", _DEFAULT_CACHE)).expanduser()
    up.add_to(commands, cache_dir)
    chat.add_to(commands)
    status.add_to(commands)
    trace.add_to(commands)
    size.add_to(commands, cache_dir)
    return parser


if __name__ == "__main__":
    main()
