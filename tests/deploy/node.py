"""A node, as far as pods can tell: each has a network of its own with its own address, and mounts of its own.

    with Node(16) as node:
        command = node.command(["python", "-m", "services.gateway"], node.addresses[0], hosts, mounts)

Made of Linux namespaces, so the pods' own commands run as they stand: wildcards are bound, names resolved and paths
written as the manifest has them. This checkout and its environment stand in for the image. Two things differ from a
cluster: the user is root (without any capability and without a way to get one), since the interpreter may lie where
only root looks; and memory has no limit.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

from manifests import ROOT

from tests.mesh.namespaces import Namespace

_OWN_HOST = 254
_TOOLS = ("ip", "nsenter", "unshare", "mount", "setpriv")


@dataclass(frozen=True, slots=True)
class Mount:
    """A directory that a pod sees at a path of its own."""

    path: str
    source: Path
    read_only: bool = False


class Node:
    """A node while it is entered: so many pods may have an address at a time."""

    def __init__(self, num_addresses: int) -> None:
        number = os.getpid()
        self._bridge = f"kvnode{number % 10_000}"
        # 198.18.0.0/15 is set aside for tests of networks; the tests of the mesh use its first half.
        self._prefix = f"198.19.{number % 256}"
        self.addresses = [f"{self._prefix}.{n + 1}" for n in range(num_addresses)]
        self._networks: dict[str, Namespace] = {}
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            _ip("link", "add", self._bridge, "type", "bridge")
            stack.callback(_ip, "link", "delete", self._bridge)
            _ip("address", "add", f"{self._prefix}.{_OWN_HOST}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for number, address in enumerate(self.addresses):
                self._networks[address] = stack.enter_context(Namespace.new())
                port = f"{self._bridge}p{number}"
                self._connect(self._networks[address], port, address)
                stack.callback(_ip, "link", "delete", port)
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def _connect(self, network: Namespace, port: str, address: str) -> None:
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", network.path)
        _ip("link", "set", port, "master", self._bridge, "up")
        network.run("ip", "link", "set", "lo", "up")
        network.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
        network.run("ip", "link", "set", "eth0", "up")

    def command(self, words: Sequence[str], address: str, hosts: Path, mounts: Sequence[Mount]) -> list[str]:
        """The command that becomes a pod's process.

        Args:
            words: what the kubelet would start.
            address: of the pod, one of `addresses`.
            hosts: becomes its /etc/hosts.
            mounts: its volumes; all else can't be written.
        """
        # /tmp comes last, since the other sources may lie there.
        ordered = sorted(mounts, key=lambda m: m.path.startswith("/tmp"))
        lines = [f"mount --bind {hosts} /etc/hosts", *_places(ordered), *(line for m in ordered for line in _bound(m))]
        if any(ROOT.is_relative_to(m.path) for m in mounts):
            lines = [f"exec 3< {ROOT}", *lines, *_seen_again(ROOT)]
        bare = "setpriv --pdeathsig KILL --no-new-privs --inh-caps=-all --bounding-set=-all"
        script = "\n".join([*lines, "mount -o remount,bind,ro /", "cd /", f'exec {bare} "$@"'])
        return [
            *self._networks[address].within,
            *("unshare", "--mount", "--propagation", "private"),
            *("/bin/sh", "-ec", script, "pod", *words),
        ]


def _places(mounts: Sequence[Mount]) -> list[str]:
    """Lines that make the paths that this machine lacks: in file systems in memory, mounted above them."""
    lines, covered = [], set()
    for mount in mounts:
        above = PurePosixPath(mount.path)
        while not Path(above).is_dir():
            above = above.parent
        assert above != PurePosixPath("/"), f"{mount.path} would need a directory in /"
        if str(above) != mount.path:
            if above not in covered:
                lines.append(f"mount -t tmpfs tmpfs {above}")
                covered.add(above)
            lines.append(f"mkdir -p {mount.path}")
    return lines


def _bound(mount: Mount) -> list[str]:
    lines = [f"mount --bind {mount.source} {mount.path}"]
    return [*lines, f"mount -o remount,bind,ro {mount.path}"] if mount.read_only else lines


def _seen_again(directory: Path) -> list[str]:
    """Lines that bind a directory, open as descriptor 3, to its place, which a volume now hides: say, a checkout in /tmp."""
    return [
        f"mkdir -p {directory}",
        f"mount --no-canonicalize --bind /proc/self/fd/3 {directory}",
        "exec 3<&-",
    ]


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=10, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def image_environment(root: Path, environment: Path) -> Mapping[str, str]:
    """What the image gives every process (Dockerfile, ENV), with a checkout and its environment in the image's place."""
    return {
        "PATH": f"{environment / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": str(root),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONSAFEPATH": "1",
        "HOME": "/tmp",
        "KVMESH_CACHE_DIR": "/var/cache/kvmesh",
    }


def why_not() -> str:
    """Why there can be no such node here; empty when there can."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not installed"
    if os.geteuid() != 0:
        return "namespaces of networks and mounts need root"
    try:
        with Node(1):
            pass
        subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=True, capture_output=True)
    except (OSError, AssertionError, subprocess.CalledProcessError) as error:
        return f"no namespaces here: {error}"
    return ""
