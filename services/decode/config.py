"""Settings of a decoder: `KVMESH_*` variables and the same-named flags, read once, in `__main__`."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvmesh.errors import BadConfig
from kvmesh.kv.layout import DTypeName
from kvmesh.rpc.life import ServeSettings
from kvmesh.settings import setting


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(ServeSettings):
    """One decoder."""

    bootstrap: str = setting(help="address of the registry, host:port")
    model: str = setting(help="smollm2, a GGUF file, or a Hugging Face directory")
    model_name: str = setting("", help="name clients use; default: the model's own")
    cache_dir: Path = setting(Path("~/.cache/kvmesh"), help="where converted models are kept")
    dtype: str = setting("fp32", help="fp32 or bf16: weights, activations and KV")
    device: str = setting("cpu", help="torch device")
    threads: int = setting(2, help="compute threads")
    num_pages: int = setting(2048, help="pages of KV")
    page_size: int = setting(16, help="tokens in a page")
    max_tokens: int = setting(0, help="longest prompt plus output served; 0: the model's positions")
    max_running_rooms: int = setting(64, help="rooms that hold pages at once: the largest decode batch")
    max_waiting_rooms: int = setting(256, help="rooms that may wait for pages")
    window_mib: int = setting(32, help="MiB of KV that each stage may have in flight")
    heartbeat_seconds: float = setting(0.5, help="time between two signs of life to the registry")
    lease_seconds: float = setting(0.0, help="the registry's lease, where it is known here; 0: not known")

    def check(self) -> None:
        """Raises:
        BadConfig: values that contradict each other or are out of range, all named.
        """
        for name in ("threads", "num_pages", "page_size", "max_running_rooms", "window_mib"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} is {getattr(self, name)}; at least 1 is needed")
        if self.dtype not in ("fp32", "bf16"):
            raise BadConfig(f"dtype is {self.dtype!r}; fp32 and bf16 are supported")
        if min(self.max_tokens, self.max_waiting_rooms) < 0:
            raise BadConfig("max_tokens and max_waiting_rooms are 0 or more")
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

    @property
    def dtype_name(self) -> DTypeName:
        """The dtype, checked."""
        return cast(DTypeName, self.dtype)
