import argparse
from pathlib import Path

import pytest

from kvmesh.cli.tls_given import add_tls_flags, tls_given, tls_words
from kvmesh.errors import BadConfig
from tests.certificates import Authority


def parsed(*words: str) -> argparse.Namespace:
    command = argparse.ArgumentParser()
    add_tls_flags(command, "it is encrypted")
    return command.parse_args(words)


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CERT", "KEY", "CA", "NAME"):
        monkeypatch.delenv(f"KVMESH_TLS_{name}", raising=False)


def test_without_flags_there_is_no_tls_and_nothing_is_passed_on() -> None:
    flags = parsed()
    assert tls_given(flags) is None
    assert tls_words(flags) == ()


def test_files_of_the_environment_count_and_a_flag_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = Authority().files(tmp_path / "files")
    for name in ("cert", "key", "ca"):
        monkeypatch.setenv(f"KVMESH_TLS_{name.upper()}", str(getattr(files, name)))
    monkeypatch.setenv("KVMESH_TLS_NAME", "of the environment")
    tls = tls_given(parsed("--tls-name", "stages.kvmesh"))
    assert tls is not None
    assert tls.name == "stages.kvmesh"


def test_services_get_the_same_files_wherever_they_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    words = tls_words(parsed("--tls-cert", "a.crt", "--tls-key", "/b.key", "--tls-ca", "c.crt", "--tls-name", "n"))
    cert, ca = tmp_path / "a.crt", tmp_path / "c.crt"
    assert words == ("--tls-cert", str(cert), "--tls-key", "/b.key", "--tls-ca", str(ca), "--tls-name", "n")


def test_a_part_of_the_files_is_refused() -> None:
    with pytest.raises(BadConfig, match="tls_key without tls_cert and tls_ca"):
        tls_given(parsed("--tls-key", "b.key"))
