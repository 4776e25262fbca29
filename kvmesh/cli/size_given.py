"""From the flags of `kvmesh size` to what a sizing starts from: fills, requires, checks. Called by `size.py`."""

import argparse

from kvmesh.cli.measured import Measured
from kvmesh.errors import BadConfig
from kvmesh.kv.layout import Shard
from kvmesh.model.source import resolve
from kvmesh.sizing.given import Given, StepTimes
from kvmesh.sizing.lengths import Lengths
from kvmesh.sizing.outlook import outlook

_DEFAULTS = {"pp": 2, "prefill_pages": 1024, "num_pages": 2048, "overhead": 0.0}
"""Of flags that --prometheus may answer."""
_NEEDED = {
    "rate": "requests a second",
    "prompt_tokens": "mean tokens of a prompt",
    "output_tokens": "mean tokens of an answer",
    "prefill_rate": "prompt tokens a second of a pipeline",
    "step": "seconds of a decode step, as ROOMS:SECONDS",
}


def fill(flags: argparse.Namespace, found: Measured) -> list[str]:
    """Takes what was measured and not given, then defaults; returns the flags that would have said the same."""
    flags.missing = found.missing
    taken = []
    for name, value in found.values.items():
        if getattr(flags, name) is not None or (name == "num_pages" and flags.kv_gib is not None):
            continue
        setattr(flags, name, value)
        shown = [f"{rooms:.3g}:{seconds:.3g}" for rooms, seconds in value] if name == "step" else [f"{value:.4g}"]
        taken += [f"{_flag(name)} {text}" for text in shown]
    flags.num_pages_given = flags.num_pages is not None
    for name, value in _DEFAULTS.items():
        if getattr(flags, name) is None:
            setattr(flags, name, value)
    return taken


def require(flags: argparse.Namespace, *, with_rate: bool) -> None:
    """Raises:
    BadConfig: what is needed is neither given nor measured; names all of it.
    """
    lacking = [
        f"{_flag(name)} ({flags.missing.get(name, what)})"
        for name, what in _NEEDED.items()
        if getattr(flags, name) is None and (with_rate or name != "rate")
    ]
    if lacking:
        hint = "" if flags.missing else "; --prometheus reads it from a mesh that runs"
        raise BadConfig(f"needed: {', '.join(lacking)}{hint}")


def given(flags: argparse.Namespace) -> Given:
    """What a sizing starts from.

    Raises:
        BadConfig: flags contradict each other.
    """
    kv_bytes = _kv_bytes_per_token(flags)
    return Given(
        prompt=_lengths(flags.prompt_tokens, flags.prompt_p95),
        output_tokens=_output_tokens(flags),
        max_output_tokens=flags.max_output_tokens,
        first_token_seconds=flags.first_token,
        token_gap_seconds=flags.token_gap,
        prefill_rate=flags.prefill_rate,
        num_stages=flags.pp,
        step_tokens=flags.step_tokens,
        pipeline_pages=flags.prefill_pages,
        step_seconds=_step_times(flags.step),
        decoder_pages=_decoder_pages(flags, kv_bytes),
        max_running_rooms=flags.max_running_rooms,
        page_size=flags.page_size,
        kv_bytes_per_token=kv_bytes,
        link_bytes_per_second=flags.link_gb * 1e9 if flags.link_gb else float("inf"),
        overhead_seconds=flags.overhead,
    )


def check(flags: argparse.Namespace, made: Given) -> None:
    """Raises:
    BadConfig: what is asked for is out of reach of any number of pipelines and decoders.
    """
    longest = made.prompt.p95
    for pages, has, flag in (
        (made.prompt_pages(longest), made.pipeline_pages, "--prefill-pages"),
        (made.room_pages(longest), made.decoder_pages, "--kv-gib" if flags.kv_gib else "--num-pages"),
    ):
        if pages > has:
            raise BadConfig(
                f"{flag}: {has} pages, and one room of {longest:.0f} prompt tokens needs {pages}: give it more"
            )
    idle = outlook(made, 0.0, None, None)
    for flag, least, target in (
        ("--first-token", idle.first_token_p95, made.first_token_seconds),
        ("--token-gap", made.step_seconds(1), made.token_gap_seconds),
    ):
        if least >= target:
            raise BadConfig(f"{flag} is {target:g}: a mesh that is idle needs {least:.3g} s; more of it does not help")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _lengths(mean: float, p95: float | None) -> Lengths:
    if p95 is None:
        return Lengths(mean)
    try:
        return Lengths.of(mean, p95)
    except ValueError as error:
        raise BadConfig(f"--prompt-p95 {error} of --prompt-tokens {mean:g}: split what is so mixed, and add") from None


def _output_tokens(flags: argparse.Namespace) -> float:
    if not 1 <= flags.output_tokens <= flags.max_output_tokens:
        raise BadConfig(
            f"--output-tokens is {flags.output_tokens:g}; 1 to --max-output-tokens ({flags.max_output_tokens}) is possible"
        )
    return float(flags.output_tokens)


def _step_times(points: list[tuple[float, float]]) -> StepTimes:
    ordered = sorted(points)
    if len({rooms for rooms, _ in ordered}) != len(ordered) or len(ordered) == 1:
        raise BadConfig("--step is needed for two or more batches, each once: --step 1:0.02 --step 16:0.05")
    if [seconds for _, seconds in ordered] != sorted(seconds for _, seconds in ordered):
        raise BadConfig("--step: seconds must not fall while rooms rise")
    return StepTimes(tuple(ordered))


def _kv_bytes_per_token(flags: argparse.Namespace) -> float:
    if flags.model is None:
        if flags.kv_bytes_per_token is None and (flags.kv_gib or flags.link_gb):
            raise BadConfig("--kv-gib and --link-gb need --model or --kv-bytes-per-token")
        return flags.kv_bytes_per_token or 0.0
    if flags.kv_bytes_per_token is not None:
        raise BadConfig("--model and --kv-bytes-per-token say the same: give one")
    config = resolve(flags.model, flags.cache_dir).config
    longest = _lengths(flags.prompt_tokens, flags.prompt_p95).p95 + flags.max_output_tokens
    if longest > config.max_positions:
        raise BadConfig(
            f"--prompt-p95 and --max-output-tokens are {longest:.0f} tokens; the model has {config.max_positions} positions"
        )
    shard = Shard(0, config.num_layers, 0, config.num_kv_heads, config.head_dim, flags.dtype)
    return float(shard.bytes_per_token)


def _decoder_pages(flags: argparse.Namespace, kv_bytes: float) -> int:
    if flags.kv_gib is None:
        return int(flags.num_pages)
    if flags.num_pages_given:
        raise BadConfig("--num-pages and --kv-gib say the same: give one")
    return int(flags.kv_gib * 2**30 / (kv_bytes * flags.page_size))
