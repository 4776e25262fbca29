"""Certificates for tests: CAs that know nothing of each other, and the files that they give members."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from kvmesh.rpc.tls import Tls, load_tls

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Files:
    """What a member is given."""

    cert: Path
    key: Path
    ca: Path

    @property
    def flags(self) -> tuple[str, ...]:
        """The same for a service or a command."""
        return ("--tls-cert", str(self.cert), "--tls-key", str(self.key), "--tls-ca", str(self.ca))

    def load(self, name: str = "") -> Tls:
        """The same for a channel or a server of this process."""
        tls = load_tls(self.cert, self.key, self.ca, name)
        assert tls is not None
        return tls


class Authority:
    """A CA."""

    def __init__(self) -> None:
        self._ca = trustme.CA()

    @property
    def pem(self) -> bytes:
        return self._ca.cert_pem.bytes()

    def files(
        self, directory: Path, *names: str, trusted: bytes | None = None, valid: tuple[int, int] = (-1, 30)
    ) -> Files:
        """A certificate of this CA, in files.

        Args:
            directory: made; holds the three.
            names: hosts and addresses in it; by default the one of tests.
            trusted: what is in tls_ca; by default this CA.
            valid: days from now, from and until.
        """
        begin, end = (datetime.now(UTC) + timedelta(days=days) for days in valid)
        made = self._ca.issue_cert(*(names or (HOST,)), not_before=begin, not_after=end)
        directory.mkdir(parents=True)
        files = Files(directory / "tls.crt", directory / "tls.key", directory / "ca.crt")
        files.cert.write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
        files.key.write_bytes(made.private_key_pem.bytes())
        files.ca.write_bytes(self.pem if trusted is None else trusted)
        return files
