"""Memory of this process, from /proc. Called by sides."""

from pathlib import Path

_SELF = Path("/proc/self")


def forget_peak() -> None:
    """The peak begins anew at what is resident now."""
    (_SELF / "clear_refs").write_text("5")


def resident_bytes() -> int:
    """Resident now."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most that was resident since the peak was forgotten."""
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in (_SELF / "status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) << 10
    raise LookupError(name)
