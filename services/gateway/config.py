"""Settings of a gateway: `KVMESH_*` variables and the same-named flags, read once, in `__main__`.

An OpenAI-compatible HTTP door comes later, with an address of its own beside `listen`.
"""

from dataclasses import dataclass
from pathlib import Path

from kvmesh.errors import BadConfig
from kvmesh.rpc.address import parse
from kvmesh.rpc.life import ServeSettings
from kvmesh.settings import setting

_LAST_CALLS_SECONDS = 5
"""From the end of the drain to the end of the process, at the latest: docs/operations.md, Drain."""


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(ServeSettings):
    """One gateway."""

    bootstrap: str = setting(help="address of the registry, host:port")
    model: str = setting(help="smollm2, a GGUF file, or a Hugging Face directory")
    model_name: str = setting("", help="name clients use; default: the model's own")
    cache_dir: Path = setting(Path("~/.cache/kvmesh"), help="where converted models are kept")
    request_seconds: float = setting(600.0, help="longest time of a request whose client set no deadline")
    max_attempts: int = setting(3, help="rooms tried for one request")
    grace_seconds: float = setting(0.0, help="time from SIGTERM to SIGKILL, where something grants one; 0: not known")

    def check(self) -> None:
        """Raises:
        BadConfig: a value is malformed or out of range.
        """
        parse(self.bootstrap, field="bootstrap")
        if self.request_seconds <= 0:
            raise BadConfig(f"request_seconds is {self.request_seconds:g}; more than 0 is needed")
        if self.max_attempts < 1:
            raise BadConfig(f"max_attempts is {self.max_attempts}; at least 1 is needed")
        if 0 < self.grace_seconds < self.drain_seconds + _LAST_CALLS_SECONDS:
            raise BadConfig(
                f"grace_seconds is {self.grace_seconds:g} and drain_seconds is {self.drain_seconds:g}; "
                f"a drain needs {_LAST_CALLS_SECONDS} s less than the grace, to end by itself"
            )
