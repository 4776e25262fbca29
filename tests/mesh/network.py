"""Hosts with one address each, all in one network, and bad weather on chosen edges.

    with Network(["bootstrap", "p0 rank 0", …], forecast) as network:
        async with Mesh(model, tmp_path, placed=network.placed) as mesh: …

Each host is a network namespace. The test takes part as one more host: one interface and one address in its own namespace, of
198.18.0.0/15, which is set aside for tests of networks. Packets are carried by tc netem where the kernel has it, elsewhere by a
switch in user space.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

import netem
import switch
from namespaces import Namespace
from weather import Forecast

from kvmesh.cli.processes import ChildSpec

_OWN_HOST = 254
_LISTEN_FLAGS = ("--listen", "--health-listen", "--metrics-listen")


class Network:
    """A network while it is entered."""

    def __init__(self, hosts: Sequence[str], forecast: Forecast) -> None:
        """Args:
        hosts: their names, those of the services.
        forecast: the weather of each edge between two of them.
        """
        self._block = os.getpid() % 256  # two runs side by side seldom meet
        self._addresses = {host: self._address(number) for number, host in enumerate(hosts, start=1)}
        edges = [(a, b, forecast(a, b)) for a in hosts for b in hosts if a != b]
        self._bad = {
            (self._addresses[a], self._addresses[b]): weather for a, b, weather in edges if weather is not None
        }
        self._namespaces: dict[str, Namespace] = {}
        self._exit = ExitStack()
        self._carrier: switch.Switch | netem.Netem

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            own = self._address(_OWN_HOST)
            hosts = {own: stack.enter_context(Namespace.own())}
            for host, address in self._addresses.items():
                self._namespaces[host] = hosts[address] = stack.enter_context(Namespace.new())
                hosts[address].run("ip", "link", "set", "lo", "up")
            device = dict.fromkeys(hosts, "mesh") | {own: f"kvmesh{self._block}"}
            chosen = switch.Switch if netem.why_not() else netem.Netem
            carrier: switch.Switch | netem.Netem = chosen(hosts, device, self._bad)
            self._carrier = carrier
            stack.enter_context(carrier)
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    @property
    def carrier(self) -> str:
        """What carries the packets."""
        return self._carrier.name

    def lost(self) -> int:
        """Packets lost so far, on all edges."""
        return self._carrier.lost()

    def placed(self, spec: ChildSpec) -> ChildSpec:
        """A service on the host of its name."""
        listen = tuple(word for flag in _LISTEN_FLAGS for word in (flag, f"{self._addresses[spec.name]}:0"))
        return replace(spec, flags=(*spec.flags, *listen), within=self._namespaces[spec.name].within)

    def _address(self, number: int) -> str:
        return f"198.18.{self._block}.{number}"


def why_not() -> str:
    """Why there can be no such network here; empty when there can."""
    if missing := [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Namespace.new():
            pass
    except OSError as error:
        return f"no network namespaces here: {error.strerror}"
    reasons = {"netem": netem.why_not(), "switch": switch.why_not()}
    return "; ".join(f"no {name}: {reason}" for name, reason in reasons.items()) if all(reasons.values()) else ""
