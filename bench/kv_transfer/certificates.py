"""A certificate for 127.0.0.1, made for one run in a directory that lives as long. Called by `__main__`."""

import subprocess
from pathlib import Path
from typing import NamedTuple


class Certificate(NamedTuple):
    """Where it lies; it is its own root."""

    certificate: Path
    key: Path


def make(directory: Path) -> Certificate:
    """With the openssl command, an elliptic curve's key: which kind makes no difference to what flows later.

    Raises:
        FileNotFoundError: there is no such command.
    """
    made = Certificate(directory / "certificate.pem", directory / "key.pem")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "1",
    ]
    command += ["-subj", "/CN=bench", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-out", str(made.certificate), "-keyout", str(made.key)]
    subprocess.run(command, check=True, capture_output=True)
    return made
