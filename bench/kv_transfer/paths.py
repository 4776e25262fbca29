"""All paths that are measured, by their names in the result. Read by `__main__`."""

from functools import partial

from bench.kv_transfer.certificates import Certificate
from bench.kv_transfer.link import NUM_CELLS, LinkSource, LinkTarget
from bench.kv_transfer.memory import MemorySource, MemoryTarget
from bench.kv_transfer.mooncake import MooncakeSource, MooncakeTarget
from bench.kv_transfer.nixl import NixlSource, NixlTarget
from bench.kv_transfer.pair import Path
from bench.kv_transfer.sockets import SocketSource, SocketTarget

MEMORY, GRPC, TLS, SHARED, MOONCAKE = "memcpy", "grpc_tcp", "grpc_tcp_tls", "shm", "mooncake_tcp"
NIXL_TCP, NIXL_HOST = "nixl_tcp", "nixl_host"
RAW = {1 << 20: "raw_tcp 1 MiB", 4 << 20: "raw_tcp 4 MiB"}
"""By the size of its pieces; the faster one counts."""


def all_paths(certificate: Certificate) -> list[Path]:
    """Each with its own pair of processes."""
    return [
        Path(MEMORY, MemorySource, MemoryTarget, is_straight=True),
        *(
            Path(
                name, partial(SocketSource, piece_bytes=size), partial(SocketTarget, piece_bytes=size), is_straight=True
            )
            for size, name in RAW.items()
        ),
        Path(GRPC, LinkSource, LinkTarget),
        Path(TLS, partial(LinkSource, certificate=certificate), partial(LinkTarget, certificate=certificate)),
        Path(SHARED, LinkSource, partial(LinkTarget, num_cells=NUM_CELLS)),
        Path(MOONCAKE, MooncakeSource, MooncakeTarget, is_peer=True),
        Path(NIXL_TCP, NixlSource, NixlTarget, is_peer=True, environment={"UCX_TLS": "tcp"}),
        Path(NIXL_HOST, NixlSource, NixlTarget, is_peer=True),
    ]


UNCHECKED = (GRPC, SHARED)
"""Also measured without the checksum."""
