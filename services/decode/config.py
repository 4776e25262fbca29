"""Settings of a decoder: `KVMESH_*` variables and the same-named flags, read once, in `__main__`."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvmesh.errors import BadConfig
from kvmesh.kv.layout import DTYPE_BYTES, DTypeName
from kvmesh.kv.segment import CELL_BYTES, CELL_FRAME_BYTES, MAX_SEGMENT_BYTES
from kvmesh.rpc.membership import MemberSettings
from kvmesh.settings import setting

MAX_WINDOW_MIB = 2048
"""The bytes of a window, and of the credit for all of it and a frame, are told in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(MemberSettings):
    """One decoder."""

    bootstrap: str = setting(help="address of the registry, host:port")
    model: str = setting(help="smollm2, a GGUF file, or a Hugging Face directory")
    model_name: str = setting("", help="name clients use; default: the model's own")
    cache_dir: Path = setting(Path("~/.cache/kvmesh"), help="where converted models are kept")
    dtype: str = setting("fp32", help="fp32, bf16 or fp16: weights, activations and KV")
    device: str = setting("cpu", help="torch device")
    threads: int = setting(2, help="compute threads")
    num_pages: int = setting(2048, help="pages of KV")
    page_size: int = setting(16, help="tokens in a page")
    max_tokens: int = setting(0, help="longest prompt plus output served; 0: the model's positions")
    max_running_rooms: int = setting(64, help="rooms that hold pages at once: the largest decode batch")
    max_waiting_rooms: int = setting(256, help="rooms that may wait for pages")
    kv_wire: str = setting(
        "auto", help="auto, int8 or fp8: how KV travels; auto: as the narrower of both sides' dtypes"
    )
    window_mib: int = setting(32, help="MiB of KV that each stage may have in flight")
    in_flight_mib: int = setting(256, help="MiB of KV of all stages together that may wait to be written")
    shared_mib: int = setting(16, help="MiB of shared memory for the KV of each stage on this host; 0: none")

    def check(self) -> None:
        """Raises:
        BadConfig: values that contradict each other or are out of range, all named.
        """
        for name in ("threads", "num_pages", "page_size", "max_running_rooms", "window_mib", "in_flight_mib"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} is {getattr(self, name)}; at least 1 is needed")
        if self.window_mib > MAX_WINDOW_MIB:
            raise BadConfig(f"window_mib is {self.window_mib}; at most {MAX_WINDOW_MIB} is possible")
        if self.dtype not in DTYPE_BYTES:
            raise BadConfig(f"dtype is {self.dtype!r}; fp32, bf16 and fp16 are supported")
        if self.kv_wire not in ("auto", "int8", "fp8"):
            raise BadConfig(f"kv_wire is {self.kv_wire!r}; auto, int8 and fp8 are supported")
        if min(self.max_tokens, self.max_waiting_rooms) < 0:
            raise BadConfig("max_tokens and max_waiting_rooms are 0 or more")
        lowest, highest = CELL_FRAME_BYTES >> 20, MAX_SEGMENT_BYTES // CELL_BYTES * CELL_FRAME_BYTES >> 20
        if self.shared_mib and not lowest <= self.shared_mib <= highest:
            raise BadConfig(f"shared_mib is {self.shared_mib}; 0 (none) and {lowest} to {highest} are possible")
        self.check_membership()

    @property
    def dtype_name(self) -> DTypeName:
        """The dtype, checked."""
        return cast(DTypeName, self.dtype)

    @property
    def shared_cells(self) -> int:
        """Cells of shared memory for each stage: a frame in each."""
        return (self.shared_mib << 20) // CELL_FRAME_BYTES
