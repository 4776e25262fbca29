"""Settings of a gateway: `KVMESH_*` variables and the same-named flags, read once, in `__main__`.

An OpenAI-compatible HTTP door comes later, with an address of its own beside `listen`.
"""

from dataclasses import dataclass
from pathlib import Path

from kvmesh.errors import BadConfig
from kvmesh.rpc.address import parse
from kvmesh.rpc.life import ServeSettings
from kvmesh.settings import setting


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(ServeSettings):
    """One gateway."""

    bootstrap: str = setting(help="address of the registry, host:port")
    model: str = setting(help="smollm2, a GGUF file, or a Hugging Face directory")
    model_name: str = setting("", help="name clients use; default: the model's own")
    cache_dir: Path = setting(Path("~/.cache/kvmesh"), help="where converted models are kept")
    request_seconds: float = setting(600.0, help="longest time of a request whose client set no deadline")
    max_attempts: int = setting(3, help="rooms tried for one request")
    connection_seconds: float = setting(
        300.0, help="age at which a client's connection takes no new request, so that it finds new gateways; 0: never"
    )

    def check(self) -> None:
        """Raises:
        BadConfig: a value is malformed or out of range.
        """
        parse(self.bootstrap, field="bootstrap")
        if self.request_seconds <= 0:
            raise BadConfig(f"request_seconds is {self.request_seconds:g}; more than 0 is needed")
        if self.max_attempts < 1:
            raise BadConfig(f"max_attempts is {self.max_attempts}; at least 1 is needed")
        if self.connection_seconds < 0:
            raise BadConfig(f"connection_seconds is {self.connection_seconds:g}; 0 or more is needed")
