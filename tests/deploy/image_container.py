"""Containers of the image without an engine, as the pods of deploy/k8s have them: the image's user and environment, and
nothing of the host's; a read-only root; no capability; /tmp and volumes to write to; the service as process 1. The
network is the host's.

Mounts and processes live in namespaces of their own: none outlives its container, and no container outlives the test.
"""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmesh.cli.processes import Child, ChildSpec

ENTER = """
root=$1 user=$2 group=$3
shift 3
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount -t tmpfs -o nosuid,mode=755 tmpfs "$root/dev"
for device in null zero full random urandom; do
    : > "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir -m 1777 "$root/dev/shm"
mount -t tmpfs -o nosuid,nodev,mode=1777,size=64m tmpfs "$root/dev/shm"
mount -t tmpfs -o nosuid,nodev,mode=1777,size=256m tmpfs "$root/tmp"
while [ "$1" != -- ]; do
    mount --bind "$1" "$root$2"
    shift 2
done
shift
exec chroot "$root" setpriv --reuid "$user" --regid "$group" --clear-groups --no-new-privs \
    --bounding-set=-all --inh-caps=-all --pdeathsig KILL "$@"
"""
"""Run by sh in new namespaces, as process 1: root, user, group, pairs of a host's folder and a path, --, a command."""


@dataclass(frozen=True)
class Image:
    """The image's files, mounted, and what it says of itself."""

    root: Path
    config: Mapping[str, Any]
    """As the OCI image specification has it."""
    revision: str
    """What it was told to be built from."""

    @property
    def user(self) -> tuple[int, int]:
        """Its user and group."""
        user, _, group = self.config["User"].partition(":")
        return int(user), int(group)

    @property
    def environment(self) -> dict[str, str]:
        """Its variables."""
        return dict(variable.split("=", 1) for variable in self.config["Env"])

    def inside(self, *command: str, volumes: Mapping[str, Path]) -> list[str]:
        """The command that becomes another command in a new container.

        Args:
            volumes: the host's folder for each path.
        """
        mounted = [word for path, folder in volumes.items() for word in (str(folder), path)]
        return [
            *("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "sh", "-ec", ENTER, "enter"),
            *(str(self.root), *map(str, self.user), *mounted, "--", *command),
        ]

    def run(self, *command: str, volumes: Mapping[str, Path] | None = None) -> "subprocess.CompletedProcess[str]":
        """Runs a command to its end."""
        return subprocess.run(
            self.inside(*command, volumes=volumes or {}),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    async def start(
        self, name: str, module: str, *flags: str, volumes: Mapping[str, Path], variables: Mapping[str, str], logs: Path
    ) -> "Container":
        """Starts a service.

        Args:
            name: for its log and for people.
            variables: beyond the image's own.
        """
        log = logs / f"{name.replace(' ', '-')}.log"
        with log.open("ab") as written:
            process = await asyncio.create_subprocess_exec(
                *self.inside("python", "-m", module, *flags, volumes=volumes),
                env={**self.environment, **variables},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=written,
                start_new_session=True,
            )
        return Container(ChildSpec(name, module, flags), process, log)


class Container(Child):
    """One service in a container. The child is the process around it, which ends as the service ends."""

    @property
    def service_pid(self) -> int:
        """The service's process id on the host; inside it is 1."""
        (pid,) = self._inner()
        return pid

    def _inner(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def signal(self, number: int) -> None:
        """Sends the service a signal, if it still lives."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                for pid in self._inner():
                    os.kill(pid, number)

    def status(self) -> dict[str, str]:
        """What the kernel says of the service: /proc/pid/status."""
        lines = Path(f"/proc/{self.service_pid}/status").read_text().splitlines()
        return {key: " ".join(value.split()) for key, _, value in (line.partition(":") for line in lines)}

    def mounts(self) -> dict[str, str]:
        """The options of each place where it sees something mounted; "/" is its root."""
        lines = Path(f"/proc/{self.service_pid}/mounts").read_text().splitlines()
        return {place: options for _, place, _, options, *_ in (line.split() for line in lines)}


def processes_in(root: Path) -> list[int]:
    """The processes whose root is an image's."""
    return [int(p.name) for p in Path("/proc").glob("[0-9]*") if _is_root_of(root, p)]


def _is_root_of(root: Path, process: Path) -> bool:
    try:
        return (process / "root").samefile(root)
    except OSError:  # it ended
        return False


def mounts_below(folder: Path) -> list[str]:
    """Where the host has something mounted in a folder."""
    places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [place for place in places if Path(place).is_relative_to(folder)]
