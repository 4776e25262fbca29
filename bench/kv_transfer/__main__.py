"""Measures: `python -m bench.kv_transfer --json`; the last line is JSON. Exits 1 where a target's pages aren't the source's."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path as Directory

from bench.kv_transfer import certificates
from bench.kv_transfer.outcome import outcome
from bench.kv_transfer.pair import Damaged
from bench.kv_transfer.paths import all_paths
from bench.kv_transfer.rooms import ROOM_PAGES
from bench.kv_transfer.turns import Turns

ROUNDS, FEWEST_ROUNDS = 15, 5


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.kv_transfer", description=__doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print nothing but the JSON line")
    add("--quick", action="store_true", help=f"under a minute: {FEWEST_ROUNDS} rounds")
    add("--rounds", type=int, default=ROUNDS, help=f"of each path, {FEWEST_ROUNDS} or more; default %(default)s")
    options = parser.parse_args(arguments)
    if options.rounds < FEWEST_ROUNDS:
        parser.error(f"--rounds is {options.rounds}; at least {FEWEST_ROUNDS} are needed")
    return options


def main(arguments: Sequence[str] | None = None, room_pages: Sequence[int] = ROOM_PAGES) -> int:
    """Measures and prints; tells whether all that was moved arrived as it was.

    Args:
        room_pages: of each room.
    """
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as directory:
        turns = Turns(all_paths(certificates.make(Directory(directory))), room_pages)
        try:
            turns.measure(FEWEST_ROUNDS if options.quick else options.rounds)
        except Damaged as error:
            print(error, file=sys.stderr)
            return 1
    result = outcome(turns.runs, turns.reasons)
    if not options.json:
        for name, value in result.items():
            print(f"{name:20} {value}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
