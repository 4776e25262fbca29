"""Settings of the registry: `KVMESH_*` variables and the same-named flags, read once, in `__main__`."""

from dataclasses import dataclass
from pathlib import Path

from kvmesh.errors import BadConfig
from kvmesh.rpc.life import ServeSettings
from kvmesh.settings import setting


@dataclass(frozen=True, kw_only=True)
class BootstrapSettings(ServeSettings):
    """The registry."""

    state_dir: Path = setting(help="directory that keeps the term; of this registry alone")
    lease_seconds: float = setting(2.0, help="a member silent for that long loses its lease")
    heartbeat_seconds: float = setting(0.5, help="time between two heartbeats of a member")
    assign_wait_seconds: float = setting(5.0, help="longest time a request for a room is held while there is no pair")
    max_waiting_rooms: int = setting(256, help="rooms that may wait at a pipeline or decoder before it is passed by")

    def check(self) -> None:
        """Raises:
        BadConfig: values that contradict each other or are out of range, all named.
        """
        if not 0 < self.heartbeat_seconds < self.lease_seconds:
            raise BadConfig(
                f"heartbeat_seconds is {self.heartbeat_seconds:g} and lease_seconds is {self.lease_seconds:g}; "
                "a heartbeat must be positive and shorter than the lease"
            )
        if self.assign_wait_seconds < 0:
            raise BadConfig(f"assign_wait_seconds is {self.assign_wait_seconds:g}; 0 or more is needed")
        if self.max_waiting_rooms < 1:
            raise BadConfig(f"max_waiting_rooms is {self.max_waiting_rooms}; at least 1 is needed")
