"""`kvmesh size`: how many pipelines and decoders a load needs, or what load a mesh bears. docs/sizing.md explains it.

Without --pipelines and --decoders: the fewest processes for --rate. With both: the highest rate, and what to expect at --rate.
"""

import argparse
import math
from pathlib import Path

from rich.console import Console

from kvmesh.cli import measured, size_given
from kvmesh.cli.size_report import Answer, as_json, drawn
from kvmesh.errors import BadConfig
from kvmesh.kv.layout import DTYPE_BYTES
from kvmesh.sizing.outlook import outlook
from kvmesh.sizing.plan import fewest, full_first, highest_rate, signs

_PLAIN_WIDTH = 120
"""Columns where there is no terminal to ask."""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", cache_dir: Path) -> None:
    """Adds the command and its flags."""
    size = commands.add_parser("size", help="how many of each a load needs", description=__doc__)
    load = size.add_argument_group("the load")
    load.add_argument("--rate", type=_positive, help="requests a second, of the busiest minutes")
    load.add_argument("--prompt-tokens", type=_positive, help="mean of a prompt")
    load.add_argument("--prompt-p95", type=_positive, help="95 %% of prompts are at most so long (default: 2.8 x mean)")
    load.add_argument("--output-tokens", type=_positive, help="mean of an answer")
    load.add_argument(
        "--max-output-tokens", type=_count, default=256, help="what clients ask for at most (default %(default)s)"
    )
    targets = size.add_argument_group("the targets, each for 95 %")
    targets.add_argument("--first-token", type=_positive, default=2.5, help="seconds (TTFT; default %(default)s)")
    targets.add_argument("--token-gap", type=_positive, default=math.inf, help="seconds (ITL; default: none)")
    mesh = size.add_argument_group("what one of each can do: measure it")
    mesh.add_argument("--prefill-rate", type=_positive, help="prompt tokens a second of a pipeline that is never idle")
    mesh.add_argument("--pp", type=_count, help="stages of a pipeline (default 2)")
    mesh.add_argument("--step-tokens", type=_count, default=128, help="of a prefill step (default %(default)s)")
    mesh.add_argument("--prefill-pages", type=_count, help="pages of a stage (default 1024)")
    steps = "of a decode step with so many rooms; twice or more"
    mesh.add_argument("--step", type=_step, action="append", metavar="ROOMS:SECONDS", help=steps)
    mesh.add_argument("--num-pages", type=_count, help="pages of a decoder (default 2048)")
    mesh.add_argument("--kv-gib", type=_positive, help="instead: GiB for the KV of a decoder")
    mesh.add_argument("--page-size", type=_count, default=16, help="tokens in a page (default %(default)s)")
    mesh.add_argument("--max-running-rooms", type=_count, default=64, help="of a decoder (default %(default)s)")
    mesh.add_argument("--link-gb", type=_positive, help="GB/s of KV that one member can send or receive")
    mesh.add_argument("--overhead", type=_not_negative, help="seconds of a first token besides (default 0)")
    model = size.add_argument_group("the model, for --kv-gib and --link-gb")
    model.add_argument("--model", help="smollm2, a GGUF file, or a Hugging Face directory")
    model.add_argument("--dtype", choices=tuple(DTYPE_BYTES), default="fp32", help="of KV (default %(default)s)")
    model.add_argument("--kv-bytes-per-token", type=_positive, help="instead of --model: bytes over all layers")
    model.add_argument("--cache-dir", type=Path, default=cache_dir, help="keeps converted models (default %(default)s)")
    running = size.add_argument_group("a mesh that runs: what is not given is read from its Prometheus")
    running.add_argument("--prometheus", metavar="URL", help="e.g. http://127.0.0.1:9090")
    running.add_argument("--job", default="kvmesh", help="label of the mesh's targets (default %(default)s)")
    running.add_argument("--window", type=_window, default="1h", help="how far to look back (default %(default)s)")
    size.add_argument("--pipelines", type=_count, help="so many are there")
    size.add_argument("--decoders", type=_count, help="so many are there")
    size.add_argument("--json", action="store_true", help="the answer as JSON, one line")
    size.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """The command; returns its exit code.

    Raises:
        BadConfig: something is missing, contradictory or out of reach; names the flag.
        KvmeshError: Prometheus does not answer.
    """
    taken = size_given.fill(flags, _measured(flags))
    answer = _answer(flags, taken)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_PLAIN_WIDTH)
    if flags.json:
        console.print_json(data=as_json(answer), indent=None)
    else:
        console.print(drawn(answer))
    return 0


def _measured(flags: argparse.Namespace) -> measured.Measured:
    if flags.prometheus is None:
        return measured.Measured()
    return measured.measure(flags.prometheus, flags.job, flags.window, with_transfer=flags.link_gb is None)


def _answer(flags: argparse.Namespace, taken: list[str]) -> Answer:
    if (flags.pipelines is None) != (flags.decoders is None):
        raise BadConfig("--pipelines and --decoders go together: give both, or none to be told how many")
    size_given.require(flags, with_rate=flags.pipelines is None)
    given = size_given.given(flags)
    size_given.check(flags, given)
    if flags.pipelines is None:
        found = fewest(given, flags.rate)
        pipelines, decoders = found.pipelines or 0, found.decoders or 0
        highest = highest_rate(given, pipelines, decoders)
    else:
        pipelines, decoders = flags.pipelines, flags.decoders
        highest = highest_rate(given, pipelines, decoders)
        found = outlook(given, flags.rate or highest, pipelines, decoders)
    return Answer(
        given=given,
        pipelines=pipelines,
        decoders=decoders,
        outlook=found,
        highest_rate=highest,
        full_first=full_first(given, highest, pipelines, decoders).over,
        signs=signs(given, pipelines, decoders),
        taken=tuple(taken),
    )


def _number(text: str, wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or (value == 0 and wanted.endswith("above 0")):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value


def _positive(text: str) -> float:
    return _number(text, "a number above 0")


def _not_negative(text: str) -> float:
    return _number(text, "a number, 0 or more")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _step(text: str) -> tuple[float, float]:
    rooms, _, seconds = text.partition(":")
    try:
        return _positive(rooms), _positive(seconds)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROOMS:SECONDS, such as 16:0.05") from None


def _window(text: str) -> float:
    try:
        return measured.window_seconds(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes, hours or days, such as 90m") from None
