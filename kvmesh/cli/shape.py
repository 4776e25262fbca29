"""The shape of a mesh on one machine: how many of each service, with which flags. Called by `mesh.py`. Starts nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmesh.cli.processes import ChildSpec

BOOTSTRAP_LISTEN = "127.0.0.1:50051"
"""Where `kvmesh up` serves the registry, and where `kvmesh status` looks for it."""
GATEWAY_LISTEN = "127.0.0.1:50061"
"""Where `kvmesh up` serves the gateway, and where `kvmesh chat` looks for it."""
ANY_PORT = "127.0.0.1:0"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One registry, one gateway, and so many stages and decoders."""

    model: str
    cache_dir: Path
    pp: int = 1
    """Stages of each pipeline."""
    pipelines: int = 1
    decoders: int = 1
    dtype: str = "fp32"
    stage_threads: int = 1
    decoder_threads: int = 2
    bootstrap_listen: str = ANY_PORT
    gateway_listen: str = ANY_PORT
    drain_seconds: float = 10.0
    bootstrap_flags: Sequence[str] = ()
    stage_flags: Sequence[str] = ()
    decoder_flags: Sequence[str] = ()
    gateway_flags: Sequence[str] = ()

    def bootstrap(self, state_dir: Path) -> ChildSpec:
        """The registry."""
        flags = ("--listen", self.bootstrap_listen, "--state-dir", str(state_dir), *self.bootstrap_flags)
        return self._spec("bootstrap", "bootstrap", flags)

    def stages(self, bootstrap: str) -> list[ChildSpec]:
        """All stages, rank 0 of every pipeline first."""
        return [self._stage(bootstrap, f"p{p}", rank) for rank in range(self.pp) for p in range(self.pipelines)]

    def decoder_specs(self, bootstrap: str) -> list[ChildSpec]:
        """All decoders."""
        flags = (*self._member(bootstrap), "--dtype", self.dtype, "--threads", str(self.decoder_threads))
        return [self._spec(f"decoder {n}", "decode", (*flags, *self.decoder_flags)) for n in range(self.decoders)]

    def gateway(self, bootstrap: str) -> ChildSpec:
        """The gateway."""
        flags = (*self._member(bootstrap), "--listen", self.gateway_listen, *self.gateway_flags)
        return self._spec("gateway", "gateway", flags)

    def _stage(self, bootstrap: str, pipeline: str, rank: int) -> ChildSpec:
        flags = (
            *self._member(bootstrap),
            *("--pipeline", pipeline, "--rank", str(rank), "--pp-size", str(self.pp)),
            *("--dtype", self.dtype, "--threads", str(self.stage_threads)),
            *self.stage_flags,
        )
        return self._spec(f"{pipeline} rank {rank}", "prefill", flags)

    def _member(self, bootstrap: str) -> tuple[str, ...]:
        return ("--bootstrap", bootstrap, "--model", self.model, "--cache-dir", str(self.cache_dir))

    def _spec(self, name: str, service: str, flags: tuple[str, ...]) -> ChildSpec:
        return ChildSpec(name, f"services.{service}", ("--drain-seconds", f"{self.drain_seconds:g}", *flags))
