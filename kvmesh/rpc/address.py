"""Addresses, host:port, for both families of IP. Called by whoever binds or dials.

What a process binds and what others dial are two addresses: a wildcard can be bound, never dialled. Opens no connection.
"""

import ipaddress
import socket
from dataclasses import dataclass

from kvmesh.errors import BadConfig

_MAX_PORT = 65535
# Addresses set aside for documentation. A datagram socket "connected" there sends nothing, but tells the address this
# host would send from.
_ROUTE_PROBES = ((socket.AF_INET6, "2001:db8::1"), (socket.AF_INET, "192.0.2.1"))


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port. `str` gives the one spelling: IPv6 hosts in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_wildcard(self) -> bool:
        """Whether it means every interface of the host, so that nobody can dial it."""
        return _is_wildcard(self.host)


def parse(text: str, *, field: str, default_port: int | None = None) -> Address:
    """Reads host:port, [IPv6]:port, and, with a default port, a bare host of any kind.

    Args:
        text: what was configured.
        field: the setting it came from, for the message.
        default_port: the port where the text has none; without it a port is needed.

    Raises:
        BadConfig: the text is no such address.
    """
    if default_port is not None and (_is_ip(text) or (text and ":" not in text)):
        return Address(text, default_port)
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not port.isdecimal() or int(port) > _MAX_PORT:
        raise BadConfig(f"{field} is {text!r}; host:port is needed, [host]:port for IPv6")
    if bracketed != (":" in host) or (bracketed and not _is_ip(host)) or any(c in host for c in " /[]"):
        raise BadConfig(f"{field} is {text!r}; an IPv6 host stands in brackets, e.g. [::1]:{port}")
    return Address(host or "::", int(port))


def advertised(configured: str, bound: Address, *, field: str = "advertise") -> Address:
    """The address that others dial.

    Args:
        configured: the setting: a host or host:port; empty: derived from what is bound.
        bound: what this process listens on, with its real port.
        field: the setting's name, for the message.

    Raises:
        BadConfig: the setting is malformed or a wildcard, or nothing can be derived.
    """
    if configured:
        address = parse(configured, field=field, default_port=bound.port)
        address = Address(address.host, address.port or bound.port)
        if address.is_wildcard:
            raise BadConfig(f"{field} is {configured!r}, a wildcard; the address that others dial is needed")
        return address
    if not bound.is_wildcard:
        return bound
    return Address(_own_host(bound, field), bound.port)


def _own_host(bound: Address, field: str) -> str:
    """The address this host sends from, of a family that is bound."""
    for family, probe in _ROUTE_PROBES:
        if family == socket.AF_INET6 and ":" not in bound.host:
            continue
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probing:
                probing.connect((probe, 9))
                return str(probing.getsockname()[0])
        except OSError:
            continue  # no route of this family
    raise BadConfig(f"{field} is needed: {bound} is a wildcard, and this host has no route to derive an address from")


def why_not_bindable(address: Address) -> str:
    """What the system says of binding there, e.g. "Address already in use"; empty when it is free now."""
    try:
        family, _, _, _, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probing:
            probing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probing.bind(target)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_wildcard(host: str) -> bool:
    return host == "" or (_is_ip(host) and ipaddress.ip_address(host).is_unspecified)
