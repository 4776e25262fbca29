"""A network by a switch in user space, for kernels without netem: hosts send into TUN devices, this carries each packet.

What TCP sees is the same: whole packets late, lost, or overtaken. Run as a program it is the switch itself, a process that
ends with the one that started it. Called by `network.py`.
"""

import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from namespaces import Namespace
from weather import Weather

_TUN = Path("/dev/net/tun")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SENDER, _RECEIVER = slice(12, 16), slice(16, 20)
"""Where an IPv4 header has the addresses."""
_IPV4 = 4
_LARGEST_PACKET = 65535
_AT_ONCE = 64
"""Packets taken from one host before the others have their turn."""
_PACKETS = 10_000
"""Queue of a device, for a switch that has to wait for a core."""
_NICE = -10
"""A network does not get slower because hosts compute."""


class Switch:
    """The network while it is entered."""

    name = "a switch in user space"

    def __init__(
        self, hosts: Mapping[str, Namespace], device: Mapping[str, str], bad: Mapping[tuple[str, str], Weather]
    ) -> None:
        """Args: see Netem."""
        self._hosts, self._device, self._bad = hosts, device, bad
        self._exit = ExitStack()
        self._process: subprocess.Popen[str]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            ports = {}
            for address, host in self._hosts.items():
                device = self._device[address]
                ports[address] = port = host.call(lambda device=device: _open_tun(device))  # type: ignore[misc]
                stack.callback(os.close, port)  # the device goes with the last who holds it
                up = [f"address add {address}/24 dev {device}", f"link set {device} txqueuelen {_PACKETS} up"]
                host.run("ip", "-batch", "-", lines=up)
            bad = [(*edge, asdict(weather)) for edge, weather in self._bad.items()]
            self._process = subprocess.Popen(
                [sys.executable, __file__, json.dumps({"ports": ports, "bad": bad})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=list(ports.values()),
            )
            stack.callback(self._end)
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def lost(self) -> int:
        """Packets lost so far, on all edges."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("?")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def _end(self) -> None:
        self._process.communicate()  # its input ends, so it does
        assert self._process.returncode == 0, "the switch failed"


def _open_tun(device: str) -> int:
    """A new device of the calling thread's namespace; its packets come and go through the descriptor."""
    port = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(port, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
    return port


def why_not() -> str:
    """Why it can't be; empty when it can."""
    return "" if _TUN.exists() else f"no {_TUN}"


class _Carrier:
    """The switch itself."""

    def __init__(self, ports: Mapping[bytes, int], bad: Mapping[tuple[bytes, bytes], Weather]) -> None:
        self._ports, self._bad = ports, bad
        self._rng = random.Random(0)
        self._under_way: list[tuple[float, int, int, bytes]] = []
        """When it is due, a number that keeps those of one moment in order, the port it leaves by, the packet."""
        self._count = self._lost = 0

    def run(self) -> None:
        """Carries until the input ends; tells the packets lost to who asks there."""
        with select.epoll() as ready:
            for port in (sys.stdin.fileno(), *self._ports.values()):
                ready.register(port, select.EPOLLIN)
            while True:
                for port, _ in ready.poll(self._pause()):
                    if port != sys.stdin.fileno():
                        self._take(port)
                    elif os.read(port, 1):
                        print(self._lost, flush=True)
                    else:
                        return
                while self._under_way and self._under_way[0][0] <= monotonic():
                    _, _, port, packet = heapq.heappop(self._under_way)
                    os.write(port, packet)

    def _pause(self) -> float | None:
        return max(0.0, self._under_way[0][0] - monotonic()) if self._under_way else None

    def _take(self, port: int) -> None:
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(port, _LARGEST_PACKET)
            except BlockingIOError:
                return
            to = self._ports.get(packet[_RECEIVER])
            if packet[0] >> 4 == _IPV4 and to is not None:
                self._send(packet, to, self._bad.get((packet[_SENDER], packet[_RECEIVER])))

    def _send(self, packet: bytes, to: int, weather: Weather | None) -> None:
        if weather is None:
            os.write(to, packet)
        elif self._rng.uniform(0, 100) < weather.loss_percent:
            self._lost += 1
        else:
            self._count += 1
            due = monotonic() + self._rng.uniform(weather.least_ms, weather.most_ms) / 1e3
            heapq.heappush(self._under_way, (due, self._count, to, packet))


def _packed(address: str) -> bytes:
    return bytes(int(part) for part in address.split("."))


def _main() -> None:
    os.nice(_NICE)
    told = json.loads(sys.argv[1])
    ports = {_packed(address): port for address, port in told["ports"].items()}
    _Carrier(ports, {(_packed(a), _packed(b)): Weather(**weather) for a, b, weather in told["bad"]}).run()


if __name__ == "__main__":
    _main()
