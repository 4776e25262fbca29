import socket

import pytest

from kvmesh.errors import BadConfig
from kvmesh.rpc.address import Address, advertised, parse, why_not_bindable


@pytest.mark.parametrize(
    ("text", "host", "port", "spelled"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80, "127.0.0.1:80"),
        ("[::1]:80", "::1", 80, "[::1]:80"),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80, "[fe80::1%eth0]:80"),
        ("[::]:0", "::", 0, "[::]:0"),
        ("prefill-0.prefill:65535", "prefill-0.prefill", 65535, "prefill-0.prefill:65535"),
        (":50051", "::", 50051, "[::]:50051"),
    ],
)
def test_both_families_and_names_are_read_and_spelled_back(text: str, host: str, port: int, spelled: str) -> None:
    address = parse(text, field="listen")
    assert address == Address(host, port)
    assert str(address) == spelled


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", "host:x", "host:65536", "host:-1", "::1:80", "[::1]", "[host]:80", "a b:1", "http://h:1"],
)
def test_what_is_no_address_is_refused_by_the_settings_name(text: str) -> None:
    with pytest.raises(BadConfig, match=r"^bootstrap is "):
        parse(text, field="bootstrap")


@pytest.mark.parametrize(
    ("configured", "expected"),
    [
        ("10.0.0.7", "10.0.0.7:7000"),
        ("fd00::7", "[fd00::7]:7000"),
        ("stage-1", "stage-1:7000"),
        ("10.0.0.7:1", "10.0.0.7:1"),
        ("[fd00::7]:1", "[fd00::7]:1"),
        ("10.0.0.7:0", "10.0.0.7:7000"),
    ],
)
def test_an_advertised_host_takes_the_bound_port_unless_it_has_one(configured: str, expected: str) -> None:
    assert str(advertised(configured, Address("::", 7000))) == expected


@pytest.mark.parametrize("configured", ["0.0.0.0", "0.0.0.0:1", "::", "[::]:1", "[0::0]:1"])
def test_a_wildcard_is_never_advertised(configured: str) -> None:
    with pytest.raises(BadConfig, match="wildcard"):
        advertised(configured, Address("127.0.0.1", 7000))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "stage-1"])
def test_a_bound_host_is_advertised_as_it_is(host: str) -> None:
    assert advertised("", Address(host, 7000)) == Address(host, 7000)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_bound_wildcard_is_derived_or_refused_but_never_advertised(host: str) -> None:
    try:
        address = advertised("", Address(host, 7000))
    except BadConfig as error:
        assert "advertise is needed" in str(error)  # a host without any route
    else:
        assert not address.is_wildcard
        assert address.port == 7000
        assert host == "::" or ":" not in address.host


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_reason_why_a_port_can_not_be_bound_is_told(family: int, host: str) -> None:
    with socket.socket(family) as taken:
        taken.bind((host, 0))
        taken.listen()
        address = Address(host, taken.getsockname()[1])
        assert why_not_bindable(address) == "Address already in use"
    assert why_not_bindable(address) == ""
