"""A network by the kernel: a bridge in a namespace of its own, a cable to each host, and tc netem on what hosts send.

Each host sorts what it sends by destination (htb, u32); each bad edge has a queue of its own, with netem. Called by
`network.py`.
"""

import functools
import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from namespaces import Namespace
from weather import Weather

_RATE = "100gbit"
"""htb is here to sort; it must not slow."""
_PACKETS = 100_000
"""Longest queue of an edge: a shorter one would lose more than the weather says."""


class Netem:
    """The network while it is entered."""

    name = "tc netem"

    def __init__(
        self, hosts: Mapping[str, Namespace], device: Mapping[str, str], bad: Mapping[tuple[str, str], Weather]
    ) -> None:
        """Args:
        hosts: where each address lives.
        device: the name of the interface of each address.
        bad: the weather, by address of sender and receiver.
        """
        self._hosts, self._device, self._bad = hosts, device, bad
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:  # with the bridge's namespace all cables go
            bridge = stack.enter_context(Namespace.new())
            bridge.run("ip", "-batch", "-", lines=["link add name bridge type bridge", "link set bridge up"])
            for number, (address, host) in enumerate(self._hosts.items()):
                device = self._device[address]
                plug = f"link add name port{number} type veth peer name {device} netns {host.path}"
                up = [f"link set port{number} master bridge", f"link set port{number} up"]
                bridge.run("ip", "-batch", "-", lines=[plug, *up])
                host.run("ip", "-batch", "-", lines=[f"address add {address}/24 dev {device}", f"link set {device} up"])
                if edges := {to: weather for (sender, to), weather in self._bad.items() if sender == address}:
                    host.run("tc", "-batch", "-", lines=_queues(device, edges))
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def lost(self) -> int:
        """Packets lost so far, on all edges."""
        senders = {sender for sender, _ in self._bad}
        pages = [self._hosts[a].run("tc", "-s", "-j", "qdisc", "show", "dev", self._device[a]) for a in senders]
        return sum(queue["drops"] for page in pages for queue in json.loads(page) if queue["kind"] == "netem")


def _queues(device: str, edges: Mapping[str, Weather]) -> list[str]:
    """Commands for tc: a class for the clear sky, and one with netem for each bad edge."""
    lines = [f"qdisc add dev {device} root handle 1: htb default 1 r2q 100000"]
    lines += [f"class add dev {device} parent 1: classid 1:1 htb rate {_RATE} quantum 60000"]
    for number, (to, weather) in enumerate(edges.items(), start=2):
        middle, jitter = (weather.least_ms + weather.most_ms) / 2, (weather.most_ms - weather.least_ms) / 2
        lines += [
            f"class add dev {device} parent 1: classid 1:{number:x} htb rate {_RATE} quantum 60000",
            f"qdisc add dev {device} parent 1:{number:x} handle {number:x}: netem limit {_PACKETS} "
            f"delay {middle:g}ms {jitter:g}ms loss {weather.loss_percent:g}%",
            f"filter add dev {device} parent 1: protocol ip prio 1 u32 match ip dst {to}/32 flowid 1:{number:x}",
        ]
    return lines


@functools.cache
def why_not() -> str:
    """Why the kernel can't; empty when it can."""
    if shutil.which("tc") is None:
        return "tc is not installed"
    with Namespace.new() as tried:
        try:
            tried.run("ip", "-batch", "-", lines=["link add name bridge type bridge", "link add name mesh type veth"])
            tried.run(
                "tc", "-batch", "-", lines=_queues("mesh", {"198.18.0.1": Weather(most_ms=2.0, loss_percent=1.0)})
            )
        except AssertionError as error:
            return " ".join(str(error).split())
    return ""
