"""Counts: `python -m bench.bootstrap_order --json`; the last line is JSON, protocol → pipeline size → figures.

Exits 1 where kvmesh or the ring diverged.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from bench.bootstrap_order.agreements import LookUp, Ring
from bench.bootstrap_order.loop import Loop
from bench.bootstrap_order.mesh import Mesh
from bench.bootstrap_order.outcome import Outcome, Summary
from bench.bootstrap_order.stages import stages_of
from bench.bootstrap_order.traffic import Conditions, Network, Request, requests_of
from simulator.latency import Latency

PP_SIZES = (2, 4, 8, 16)
PROTOCOLS = ("independent", "last_first", "ring", "kvmesh")
SECOND_LOOK = "ring_second_look"
"""The ring as first released: it looks at local state again after the agreement. Only on demand."""
QUICK_SEEDS, QUICK_REQUESTS = 2, 600

Results = dict[str, dict[str, dict[str, float]]]


def run(protocol: str, network: Network, requests: Sequence[Request], pp: int) -> Outcome:
    """One protocol over one run's traffic on `pp` stages."""
    if protocol == "kvmesh":
        return Mesh(network, requests, pp).run()
    stages = stages_of(network, requests, pp, highest_first=protocol != "independent")
    is_ring = protocol in ("ring", SECOND_LOOK)
    agreement = Ring(stages, second_look=protocol == SECOND_LOOK) if is_ring else LookUp(stages)
    return Loop(network, requests, stages, agreement).run()


def compare(conditions: Conditions, seeds: Sequence[int], sizes: Sequence[int], protocols: Sequence[str]) -> Results:
    """All protocols at all pipeline sizes, every one on the same traffic."""
    summaries = {(protocol, pp): Summary() for protocol in protocols for pp in sizes}
    for seed in seeds:
        seeded = replace(conditions, seed=seed)
        network, requests = Network(seeded), requests_of(seeded)
        for (protocol, pp), summary in summaries.items():
            summary.add(run(protocol, network, requests, pp), requests, seeded)
    return {protocol: {str(pp): summaries[protocol, pp].report() for pp in sizes} for protocol in protocols}


def _slow_stage(text: str) -> tuple[int, Latency]:
    rank, _, latency = text.partition("=")
    return int(rank), Latency.parse(latency)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    default = Conditions()
    parser = argparse.ArgumentParser(prog="python -m bench.bootstrap_order", description=__doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print nothing but the JSON line")
    add("--quick", action="store_true", help=f"{QUICK_SEEDS} seeds of {QUICK_REQUESTS} requests: under a minute")
    add("--seed", type=int, default=default.seed, help="the first seed; default %(default)s")
    add("--seeds", type=int, default=5, help="so many from there on; default %(default)s")
    add("--requests", type=int, default=2000, help="of each seed; default %(default)s")
    add("--pp", type=int, nargs="+", default=PP_SIZES, help="pipeline sizes; default 2 4 8 16")
    add("--abort-rate", type=float, default=default.abort_rate, help="share of requests; default %(default)s")
    add("--abort-window", type=float, default=default.abort_window_seconds, help="seconds; default %(default)s")
    add("--late-rate", type=float, default=default.late_rate, help="share of late reservations; default %(default)s")
    add("--timeout", type=float, default=default.timeout_seconds, help="of the bootstrap, seconds; default %(default)s")
    add("--latency", type=Latency.parse, default=default.latency, help="decoder to stage; default %(default)s")
    add("--slow-stage", type=_slow_stage, metavar="RANK=LATENCY", help="one stage that decoders reach otherwise")
    add("--hop", type=Latency.parse, default=default.hop, help="stage to stage; default %(default)s")
    add("--tell-gap", type=float, default=default.tell_gap_seconds, help="seconds; default %(default)s")
    add("--step-seconds", type=float, default=default.step_seconds, help="one full step; default %(default)s")
    add("--rate", type=float, default=default.rate, help="requests a second; default %(default)s")
    add("--second-look", action="store_true", help="a fifth protocol: the ring as first released")
    return parser.parse_args(arguments)


def _conditions(options: argparse.Namespace) -> Conditions:
    return Conditions(
        seed=options.seed,
        requests=QUICK_REQUESTS if options.quick else options.requests,
        rate=options.rate,
        abort_rate=options.abort_rate,
        abort_window_seconds=options.abort_window,
        late_rate=options.late_rate,
        timeout_seconds=options.timeout,
        latency=options.latency,
        slow_stage=options.slow_stage,
        hop=options.hop,
        tell_gap_seconds=options.tell_gap,
        step_seconds=options.step_seconds,
    )


def _table(results: Results) -> str:
    lines = ["protocol          PP  divergent  stopped  RTT p50     p99  steps p50   p99"]
    for protocol, sizes in results.items():
        for pp, row in sizes.items():
            counts = f"{row['divergent']:10} {row['crashed_or_hung']:8}"
            rtts = f"{row['admission_rtts_p50']:8.2f} {row['admission_rtts_p99']:7.2f}"
            steps = f"{row['admission_steps_p50']:10} {row['admission_steps_p99']:5}"
            lines.append(f"{protocol:16} {pp:>3} {counts} {rtts} {steps}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Counts, prints, and tells whether the two that must not diverge did not."""
    options = _options(arguments)
    conditions = _conditions(options)
    seeds = range(options.seed, options.seed + (QUICK_SEEDS if options.quick else options.seeds))
    protocols = (*PROTOCOLS, SECOND_LOOK) if options.second_look else PROTOCOLS
    results = compare(conditions, seeds, options.pp, protocols)
    slow = conditions.slow_stage
    if not options.json:
        print(_table(results))
    settings = {
        "seed": options.seed,
        "num_seeds": len(seeds),
        "abort_rate": conditions.abort_rate,
        "latency": str(conditions.latency),
        "slow_stage": f"{slow[0]}={slow[1]}" if slow else None,
        "hop": str(conditions.hop),
        "rtt_seconds": round(conditions.rtt_seconds, 6),
        "step_seconds": conditions.step_seconds,
        "rate": conditions.rate,
        "tell_gap_seconds": conditions.tell_gap_seconds,
    }
    print(json.dumps({**results, **settings}))
    return int(any(row["divergent"] for name in ("ring", "kvmesh") for row in results[name].values()))


if __name__ == "__main__":
    sys.exit(main())
