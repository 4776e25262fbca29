"""Settings of those who hold a lease with the registry: stages and decoders. Called by their `config`."""

from dataclasses import dataclass
from pathlib import Path

from kvmesh.errors import BadConfig
from kvmesh.rpc.life import ServeSettings
from kvmesh.rpc.tls import Tls, check_given, load_tls
from kvmesh.settings import setting


@dataclass(frozen=True, kw_only=True)
class MemberSettings(ServeSettings):
    """What every member has. Stages and decoders add their own fields."""

    heartbeat_seconds: float = setting(0.5, help="time between two signs of life to the registry")
    lease_seconds: float = setting(0.0, help="the registry's lease, where it is known here; 0: not known")
    tls_cert: Path | None = setting(None, help="PEM file: the certificate to show on links; with it, links have TLS")
    tls_key: Path | None = setting(None, help="PEM file: its private key")
    tls_ca: Path | None = setting(None, help="PEM file: the CAs that sign all members' certificates")
    tls_name: str = setting("", help="name in the certificates of stages, where the addresses dialled are not in them")

    def check_membership(self) -> None:
        """Raises:
        BadConfig: the heartbeat fits neither watchdog nor lease, both values; or TLS is given in part.
        """
        if not 0 < self.heartbeat_seconds < self.watchdog_seconds * 10:
            raise BadConfig(
                f"heartbeat_seconds is {self.heartbeat_seconds:g} and watchdog_seconds is {self.watchdog_seconds:g}; "
                "a heartbeat must be positive and shorter than ten times the watchdog"
            )
        if 0 < self.lease_seconds <= self.heartbeat_seconds:
            raise BadConfig(
                f"heartbeat_seconds is {self.heartbeat_seconds:g} and lease_seconds is {self.lease_seconds:g}; "
                "a heartbeat must be shorter than the registry's lease"
            )
        check_given(self.tls_cert, self.tls_key, self.tls_ca, self.tls_name)

    def load_tls(self) -> Tls | None:
        """Reads the files of TLS; None: links are plain.

        Raises:
            BadConfig: one is unusable; the setting and what to do.
        """
        return load_tls(self.tls_cert, self.tls_key, self.tls_ca, self.tls_name)
