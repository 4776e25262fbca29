import logging

from kvmesh.telemetry.collector import _Once

FAILED = "Failed to export %s to %s, error code: %s, error details: %s"


def record(text: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("x", logging.ERROR, "", 0, text, args, None)


def test_a_complaint_passes_once_whatever_its_details_until_all_was_well() -> None:
    once = _Once()
    assert once.filter(record(FAILED, "traces", "host:1", "UNAVAILABLE", "Connection refused"))
    assert not once.filter(record(FAILED, "traces", "host:1", "UNAVAILABLE", "Socket closed"))
    assert once.filter(record(FAILED, "traces", "host:1", "PERMISSION_DENIED", "no"))
    assert not once.filter(record(FAILED, "traces", "host:1", "UNAVAILABLE", "Connection refused"))
    once.said.clear()
    assert once.filter(record(FAILED, "traces", "host:1", "UNAVAILABLE", "Connection refused"))


def test_what_has_no_details_passes_once_too() -> None:
    once = _Once()
    assert [once.filter(record("Queue full")) for _ in range(3)] == [True, False, False]
