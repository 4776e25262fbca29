"""Settings of a prefill stage: `KVMESH_*` variables and the same-named flags, read once, in `__main__`."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvmesh.errors import BadConfig
from kvmesh.kv.layout import DTYPE_BYTES, DTypeName
from kvmesh.rpc.membership import MemberSettings
from kvmesh.settings import setting


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(MemberSettings):
    """One stage of one pipeline."""

    bootstrap: str = setting(help="address of the registry, host:port")
    pipeline: str = setting("p0", help="name of the pipeline, [a-z0-9-]{1,63}")
    rank: int = setting(0, help="position in the pipeline, 0 … pp_size - 1")
    pp_size: int = setting(1, help="stages of the pipeline")
    replicas: int = setting(0, help="stages that were started together, where it is known; 0: not known")
    model: str = setting(help="smollm2, a GGUF file, or a Hugging Face directory")
    model_name: str = setting("", help="name clients use; default: the model's own")
    cache_dir: Path = setting(Path("~/.cache/kvmesh"), help="where converted models are kept")
    layers: str = setting("", help="first:end of the layers held; default: an even share by rank")
    dtype: str = setting("fp32", help="fp32, bf16 or fp16: weights, activations and KV")
    device: str = setting("cpu", help="torch device")
    threads: int = setting(1, help="compute threads")
    num_pages: int = setting(1024, help="pages of KV; the same on every stage of the pipeline")
    page_size: int = setting(16, help="tokens in a page")
    max_tokens: int = setting(0, help="longest prompt plus output served; 0: the model's positions")
    step_tokens: int = setting(128, help="most prompt tokens of one step")
    max_waiting_rooms: int = setting(256, help="rooms that may wait at rank 0")

    def check(self) -> None:
        """Raises:
        BadConfig: values that contradict each other or are out of range, all named.
        """
        if not 0 <= self.rank < self.pp_size:
            raise BadConfig(f"rank {self.rank} is outside [0, {self.pp_size}): pp_size is {self.pp_size}")
        if self.replicas not in (0, self.pp_size):
            raise BadConfig(f"replicas is {self.replicas} and pp_size is {self.pp_size}; a pipeline has pp_size stages")
        for name in ("threads", "num_pages", "page_size", "step_tokens", "max_waiting_rooms"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} is {getattr(self, name)}; at least 1 is needed")
        if self.dtype not in DTYPE_BYTES:
            raise BadConfig(f"dtype is {self.dtype!r}; fp32, bf16 and fp16 are supported")
        if self.max_tokens < 0:
            raise BadConfig(f"max_tokens is {self.max_tokens}; 0 or more is needed")
        self.check_membership()

    @property
    def dtype_name(self) -> DTypeName:
        """The dtype, checked."""
        return cast(DTypeName, self.dtype)

    @property
    def max_steps_in_flight(self) -> int:
        """Enough that every stage has a step and the next one waits for it."""
        return self.pp_size + 1

    def layer_range(self, num_layers: int) -> tuple[int, int]:
        """The layers of this rank, half-open.

        Raises:
            BadConfig: `layers` is malformed or lies outside the model.
        """
        if self.pp_size > num_layers:
            raise BadConfig(f"pp_size is {self.pp_size}; the model has only {num_layers} layers")
        if not self.layers:
            return self.rank * num_layers // self.pp_size, (self.rank + 1) * num_layers // self.pp_size
        begin, _, end = self.layers.partition(":")
        if not (begin.isdigit() and end.isdigit() and 0 <= int(begin) < int(end) <= num_layers):
            raise BadConfig(f"layers is {self.layers!r}; first:end within 0:{num_layers} is needed")
        return int(begin), int(end)
