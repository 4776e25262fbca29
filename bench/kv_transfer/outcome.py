"""Rounds become figures: medians, ratios within rounds, and which aims were missed. Pure; called by `__main__`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.kv_transfer.pair import Run
from bench.kv_transfer.paths import GRPC, MEMORY, MOONCAKE, NIXL_HOST, NIXL_TCP, RAW, SHARED, TLS
from kvmesh.kv.layout import FRAME_BYTES
from kvmesh.kv.segment import CELL_FRAME_BYTES

RAW_TCP = "raw_tcp"
WITHOUT = " without checksum"
"""Added to the name of a path: its rounds without."""
NAMES = (GRPC, TLS, SHARED, RAW_TCP, MEMORY, MOONCAKE, NIXL_TCP, NIXL_HOST)

Runs = Mapping[str, Sequence[Run]]
"""The rounds of each path; the n-th ones of all stood next to each other."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure from two paths, and what it should be."""

    one: str
    other: str
    of: Callable[[float, float], float]
    """Of both speeds in one round."""
    lowest: float | None = None
    highest: float | None = None

    def is_missed(self, value: float) -> bool:
        """Whether the aim is."""
        return (self.lowest is not None and value < self.lowest) or (self.highest is not None and value > self.highest)


def _over(one: float, other: float) -> float:
    return one / other


def _cost(checked: float, unchecked: float) -> float:
    return 1 - checked / unchecked


RATIOS = {
    "grpc_over_raw": Ratio(GRPC, RAW_TCP, _over, lowest=0.6),
    "shm_over_memcpy": Ratio(SHARED, MEMORY, _over, lowest=0.65),
    "grpc_over_mooncake": Ratio(GRPC, MOONCAKE, _over, lowest=1.3),
    "shm_over_nixl_host": Ratio(SHARED, NIXL_HOST, _over, lowest=2.0),
    "grpc_checksum_cost": Ratio(GRPC, GRPC + WITHOUT, _cost, highest=0.05),
    "shm_checksum_cost": Ratio(SHARED, SHARED + WITHOUT, _cost, highest=0.25),
}


def outcome(measured: Runs, reasons: Mapping[str, str]) -> dict[str, object]:
    """What the bench prints.

    Args:
        measured: at least one round of each path that could be measured.
        reasons: why the others could not be.
    """
    runs = _best_raw(measured)
    ratios = {name: _ratio(runs, ratio) for name, ratio in RATIOS.items()}
    return {
        **{f"{name}_gbps": round(median(r.gbps for r in runs[name]), 3) if name in runs else None for name in NAMES},
        **{name: None if value is None else round(value, 3) for name, value in ratios.items()},
        "cpu_s_per_gb": {
            n: round(median(r.cpu_seconds / r.num_bytes * 1e9 for r in runs[n]), 3) for n in NAMES if n in runs
        },
        "peak_bytes": {name: max(r.peak_bytes for r in runs[name]) for name in NAMES if name in runs},
        "frame_bytes": FRAME_BYTES,
        "shm_frame_bytes": CELL_FRAME_BYTES,
        "reasons": dict(reasons),
        "aims_missed": [n for n, value in ratios.items() if value is not None and RATIOS[n].is_missed(value)],
    }


def _best_raw(measured: Runs) -> dict[str, Sequence[Run]]:
    """Of both sizes of pieces, the one with the higher median stands for raw TCP."""
    runs = dict(measured)
    pieces = [runs.pop(name) for name in RAW.values() if name in runs]
    if pieces:
        runs[RAW_TCP] = max(pieces, key=lambda rounds: median(run.gbps for run in rounds))
    return runs


def _ratio(runs: Runs, ratio: Ratio) -> float | None:
    if ratio.one not in runs or ratio.other not in runs:
        return None
    both = zip(runs[ratio.one], runs[ratio.other], strict=True)
    return median(ratio.of(one.gbps, other.gbps) for one, other in both)
