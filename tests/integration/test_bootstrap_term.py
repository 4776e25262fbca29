"""The term file, without the service round it."""

import fcntl
import os
from pathlib import Path

import pytest

from kvmesh.errors import BadConfig
from kvmesh.protocol.ids import MAX_TERM, Term
from services.bootstrap.term_file import TermFile


def test_terms_rise_with_every_start(tmp_path: Path) -> None:
    for expected in (1, 2, 3):
        with TermFile(tmp_path / "made" / "here") as held:
            assert held.term == Term(expected)


def test_a_higher_term_that_was_heard_is_kept_and_a_lower_is_not(tmp_path: Path) -> None:
    with TermFile(tmp_path) as held:
        held.hear(Term(7))
    with TermFile(tmp_path) as held:
        assert held.term == 8
        held.hear(Term(7))
    with TermFile(tmp_path) as held:
        assert held.term == 9


@pytest.mark.parametrize(
    "text", [b"", b"7", b"0\n", b"-1\n", b"nonsense\n", b"1\n2\n", b"\xff\n", b" 7\n", f"{MAX_TERM + 1}\n".encode()]
)
def test_a_damaged_term_is_refused_and_left_as_it_is(tmp_path: Path, text: bytes) -> None:
    """A term must not begin again: rooms and generations would repeat."""
    path = tmp_path / "term"
    path.write_bytes(text)
    with pytest.raises(BadConfig, match="is damaged"):
        TermFile(tmp_path)
    assert path.read_bytes() == text
    path.write_text("9\n")
    with TermFile(tmp_path) as held:
        assert held.term == 10, "the refused start gave the directory back"


def test_the_last_term_is_the_last(tmp_path: Path) -> None:
    (tmp_path / "term").write_text(f"{MAX_TERM}\n")
    with pytest.raises(BadConfig, match="the last one"):
        TermFile(tmp_path)


def test_a_start_that_was_cut_off_while_writing_costs_nothing(tmp_path: Path) -> None:
    with TermFile(tmp_path):
        (tmp_path / "term.new").write_text("99")
    with TermFile(tmp_path) as held:
        assert held.term == 2


def test_a_directory_is_held_by_one(tmp_path: Path) -> None:
    """F-N9"""
    with TermFile(tmp_path), pytest.raises(BadConfig, match="held by another registry"):
        TermFile(tmp_path)
    assert (tmp_path / "term").read_text() == "1\n", "the refused one did not count"
    with TermFile(tmp_path) as held:
        assert held.term == 2


def test_the_lock_is_not_handed_to_children(tmp_path: Path) -> None:
    with TermFile(tmp_path) as held:
        assert fcntl.fcntl(held._lock, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_a_directory_that_can_not_be_used_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BadConfig, match=r"state_dir .*file/state can't be used: Not a directory"):
        TermFile(blocked / "state")


def test_the_term_is_on_the_disk_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file before the rename, the directory after it."""
    synced: list[bool] = []
    real = os.fsync

    def watched(descriptor: int) -> None:
        synced.append((tmp_path / "term").exists())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    with TermFile(tmp_path):
        assert synced == [False, True]
