import subprocess
import sys

import pytest

from kvmesh.rpc.allocator import MMAP_THRESHOLD_BYTES, TRIM_THRESHOLD_BYTES

PROBE = """
import platform, resource
from kvmesh.rpc.allocator import keep_freed_megabytes
kept = {tuned} and keep_freed_megabytes()
for _ in range(8):
    bytearray(8 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    bytearray(8 << 20)[:] = bytes(8 << 20)
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(tuned: bool) -> tuple[bool, int]:
    """Whether the allocator was tuned in a new process, and the pages it faulted in for 50 frames of 8 MiB."""
    ran = subprocess.run(
        [sys.executable, "-c", PROBE.format(tuned=tuned)], capture_output=True, text=True, check=True, timeout=30
    )
    kept, count = ran.stdout.split()
    return kept == "1", int(count)


def test_freed_megabytes_are_kept_and_not_faulted_in_again() -> None:
    kept, count = faults(tuned=True)
    if not kept:
        pytest.skip("this C library is not glibc")
    assert count < faults(tuned=False)[1] / 4


def test_the_thresholds_fit_mallopts_int() -> None:
    assert max(MMAP_THRESHOLD_BYTES, TRIM_THRESHOLD_BYTES) < 1 << 31
