import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.errors import BadConfig, Unavailable
from kvmesh.rpc.channels import dial, server_options
from kvmesh.rpc.status import peer_errors
from kvmesh.rpc.tls import Tls, add_port, load_tls, trouble
from tests.certificates import HOST, Authority, Files

ROOT = Path(__file__).parents[3]
OURS, THEIRS = Authority(), Authority()


@asynccontextmanager
async def served(tls: Tls | None, host: str = HOST) -> AsyncIterator[str]:
    """A server that says back what it hears."""

    async def ask(request: bytes, context: Any) -> bytes:
        return request

    server = grpc.aio.server(options=server_options(2.0))
    methods = {"Ask": grpc.unary_unary_rpc_method_handler(ask)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("toy.Toy", methods),))
    port = add_port(server, f"{host}:0", tls)
    await server.start()
    try:
        yield f"{host}:{port}"
    finally:
        await server.stop(0)


async def answer(address: str, tls: Tls | None) -> bytes:
    async with dial(address, tls=tls) as channel:
        with peer_errors("rank 1 of p0"):
            reply: bytes = await channel.unary_unary("/toy.Toy/Ask")(b"hello", timeout=10)
    return reply


# Two ends.


async def test_members_of_one_ca_talk(tmp_path: Path) -> None:
    async with served(OURS.files(tmp_path / "stage").load()) as address:
        assert await answer(address, OURS.files(tmp_path / "decoder", "anything").load()) == b"hello"


async def test_an_address_of_the_other_family_is_in_certificates_as_well(tmp_path: Path) -> None:
    async with served(OURS.files(tmp_path / "stage", "::1").load(), "[::1]") as address:
        assert await answer(address, OURS.files(tmp_path / "decoder").load()) == b"hello"


async def test_a_port_in_use_is_not_taken(tmp_path: Path) -> None:
    tls = OURS.files(tmp_path / "stage").load()
    async with served(tls) as address:
        with pytest.raises(RuntimeError):
            add_port(grpc.aio.server(options=server_options(2.0)), address, tls)


async def test_a_name_stands_for_addresses_that_certificates_do_not_hold(tmp_path: Path) -> None:
    async with served(OURS.files(tmp_path / "stage", "stages.kvmesh").load()) as address:
        assert await answer(address, OURS.files(tmp_path / "decoder").load("stages.kvmesh")) == b"hello"


async def test_a_ca_between_the_root_and_the_certificate_comes_with_the_certificate(tmp_path: Path) -> None:
    below = Authority.__new__(Authority)
    below._ca = OURS._ca.create_child_ca()
    async with served(below.files(tmp_path / "stage", trusted=OURS.pem).load()) as address:
        assert await answer(address, OURS.files(tmp_path / "decoder").load()) == b"hello"


Ends = Callable[[Path], tuple[Tls | None, Tls | None]]


def of_another_name(tmp: Path) -> tuple[Tls, Tls]:
    return OURS.files(tmp / "a", "elsewhere.kvmesh").load(), OURS.files(tmp / "b").load()


def of_another_name_than_asked_for(tmp: Path) -> tuple[Tls, Tls]:
    return OURS.files(tmp / "a").load(), OURS.files(tmp / "b").load("stages.kvmesh")


def stage_of_another_ca(tmp: Path) -> tuple[Tls, Tls]:
    return THEIRS.files(tmp / "a").load(), OURS.files(tmp / "b").load()


def decoder_of_another_ca(tmp: Path) -> tuple[Tls, Tls]:
    """It knows the stage's CA; the stage does not know its."""
    return OURS.files(tmp / "a").load(), THEIRS.files(tmp / "b", trusted=THEIRS.pem + OURS.pem).load()


def stage_in_plain_text(tmp: Path) -> tuple[None, Tls]:
    return None, OURS.files(tmp / "a").load()


def decoder_in_plain_text(tmp: Path) -> tuple[Tls, None]:
    return OURS.files(tmp / "a").load(), None


def decoder_without_a_certificate(tmp: Path) -> tuple[Tls, Tls]:
    """It trusts the stage and shows nothing."""
    stage = OURS.files(tmp / "a").load()
    return stage, replace(stage, channel=grpc.ssl_channel_credentials(OURS.pem))


def expired_stage(tmp: Path) -> tuple[Tls, Tls]:
    """Expired since it started: no such file is loaded."""
    files = OURS.files(tmp / "a", valid=(-9, -1))
    pair = (files.key.read_bytes(), files.cert.read_bytes())
    late = Tls(grpc.ssl_channel_credentials(), grpc.ssl_server_credentials([pair], OURS.pem, True), "")
    return late, OURS.files(tmp / "b").load()


@pytest.mark.parametrize(
    ("ends", "reason", "said"),
    [
        (of_another_name, "tls", "names neither the host dialled nor tls_name; set tls_name"),
        (of_another_name_than_asked_for, "tls", "names neither the host dialled nor tls_name; set tls_name"),
        (stage_of_another_ca, "tls", "not trusted (unable to get local issuer certificate); give both ends"),
        (decoder_of_another_ca, "unreachable", "closed the connection at once (TLS at one end only, or it does not"),
        (decoder_without_a_certificate, "unreachable", "closed the connection at once (TLS at one end only, or it"),
        (stage_in_plain_text, "tls", "it serves without TLS; set tls_cert, tls_key and tls_ca there too"),
        (decoder_in_plain_text, "unreachable", "closed the connection at once (TLS at one end only, or it does not"),
        (expired_stage, "tls", "its certificate, or its CA's, has expired; renew it"),
    ],
)
async def test_the_end_that_dials_says_what_is_wrong_with_whom_and_what_to_do(
    tmp_path: Path, ends: Ends, reason: str, said: str
) -> None:
    stage, decoder = ends(tmp_path)
    async with served(stage) as address:
        with pytest.raises(Unavailable) as raised:
            await answer(address, decoder)
    assert raised.value.message.startswith("rank 1 of p0: ")
    assert said in raised.value.message
    assert raised.value.reason == reason
    assert HOST not in raised.value.message
    assert (raised.value.retry_after_seconds is not None) == (reason == "tls")


async def test_after_a_refusal_the_right_one_is_served(tmp_path: Path) -> None:
    async with served(OURS.files(tmp_path / "stage").load()) as address:
        for stranger in (None, THEIRS.files(tmp_path / "other", trusted=OURS.pem + THEIRS.pem).load()):
            with pytest.raises(Unavailable):
                await answer(address, stranger)
        assert await answer(address, OURS.files(tmp_path / "decoder").load()) == b"hello"


# Files.


def test_without_any_file_links_are_plain() -> None:
    assert load_tls(None, None, None) is None


@pytest.mark.parametrize("left_out", ["cert", "key", "ca"])
def test_a_part_of_the_files_is_refused_with_what_is_missing(tmp_path: Path, left_out: str) -> None:
    files = {"cert": tmp_path / "c", "key": tmp_path / "k", "ca": tmp_path / "a"} | {left_out: None}
    with pytest.raises(BadConfig, match=f"without tls_{left_out}; TLS needs all three"):
        load_tls(**files)


def test_a_name_without_files_is_refused() -> None:
    with pytest.raises(BadConfig, match="tls_name without tls_cert and tls_key and tls_ca"):
        load_tls(None, None, None, "stages.kvmesh")


FIELDS = ("cert", "key", "ca")


@pytest.mark.parametrize("field", FIELDS)
def test_a_file_that_is_not_there_is_named(tmp_path: Path, field: str) -> None:
    files = OURS.files(tmp_path / "own")
    with pytest.raises(BadConfig, match=rf"^tls_{field} is \S+: No such file or directory; a PEM file"):
        replace(files, **{field: tmp_path / "nowhere"}).load()


@pytest.mark.parametrize("field", FIELDS)
def test_a_directory_is_no_file(tmp_path: Path, field: str) -> None:
    files = OURS.files(tmp_path / "own")
    with pytest.raises(BadConfig, match=rf"^tls_{field} is \S+: Is a directory"):
        replace(files, **{field: tmp_path}).load()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("field", FIELDS)
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, field: str) -> None:
    files = OURS.files(tmp_path / "own")
    getattr(files, field).chmod(0)
    with pytest.raises(BadConfig, match=rf"^tls_{field} is \S+: Permission denied"):
        files.load()


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\xff\x00\xff", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
@pytest.mark.parametrize(
    ("field", "said"), [("cert", "holds no certificate"), ("key", "no private key"), ("ca", "holds no certificate")]
)
def test_a_file_of_something_else_is_named(tmp_path: Path, field: str, said: str, content: bytes) -> None:
    files = OURS.files(tmp_path / "own")
    getattr(files, field).write_bytes(content)
    with pytest.raises(BadConfig, match=rf"^tls_{field} is \S+, .*{said}"):
        files.load()


@pytest.mark.parametrize("field", FIELDS)
def test_a_byte_order_mark_is_named(tmp_path: Path, field: str) -> None:
    """gRPC can't read what follows one, and does not say so."""
    files = OURS.files(tmp_path / "own")
    path = getattr(files, field)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    with pytest.raises(BadConfig, match=rf"^tls_{field} is \S+, which begins with a byte order mark"):
        files.load()


def test_a_clock_that_is_wrong_is_not_a_ca_that_is() -> None:
    said = trouble("SSL_ERROR_SSL: error: CERTIFICATE_VERIFY_FAILED: certificate is not yet valid: OK")
    assert said is not None
    assert "clocks of both hosts" in said


def test_the_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    files, other = OURS.files(tmp_path / "own"), OURS.files(tmp_path / "other")
    with pytest.raises(BadConfig, match=r"^tls_key is \S+, the key of another certificate than tls_cert"):
        replace(files, key=other.key).load()


def test_a_certificate_that_no_ca_given_has_signed_is_refused(tmp_path: Path) -> None:
    files = OURS.files(tmp_path / "own", trusted=THEIRS.pem)
    with pytest.raises(
        BadConfig, match=r"^tls_cert is \S+, which no CA in tls_ca .* has signed .*give the CA that did"
    ):
        files.load()


@pytest.mark.parametrize(
    ("valid", "said"), [((-9, -1), "has expired, .*; renew it"), ((1, 9), "is not valid yet, .*clock")]
)
def test_a_certificate_out_of_its_time_is_refused(tmp_path: Path, valid: tuple[int, int], said: str) -> None:
    with pytest.raises(BadConfig, match=rf"^tls_cert is \S+, which {said}"):
        OURS.files(tmp_path / "own", valid=valid).load()


# What docs/operations.md says to type.

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")


def typed(directory: Path, commands: str) -> Files:
    subprocess.run(["sh", "-ec", commands], cwd=directory, check=True, capture_output=True, timeout=30)
    return Files(directory / "tls.crt", directory / "tls.key", directory / "ca.crt")


def documented() -> str:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- certificates -->\n\n(.*?)\n\n<!-- end -->", page, re.DOTALL)
    assert block is not None
    return block.group(1)


@needs_openssl
async def test_the_documented_commands_make_files_that_work(tmp_path: Path) -> None:
    files = typed(tmp_path, documented())
    async with served(files.load()) as address:
        assert await answer(address, files.load()) == b"hello"
        assert await answer(address, files.load("kvmesh")) == b"hello"


@needs_openssl
def test_a_certificate_for_servers_only_is_refused(tmp_path: Path) -> None:
    files = typed(tmp_path, documented().replace("-addext", '-addext "extendedKeyUsage=serverAuth" -addext', 1))
    with pytest.raises(BadConfig, match=r"^tls_cert is \S+, which is not for servers and clients alike"):
        files.load()


@needs_openssl
def test_a_key_with_a_passphrase_is_refused_and_asks_nobody(tmp_path: Path) -> None:
    files = typed(tmp_path, documented() + "\nopenssl pkey -in tls.key -aes256 -passout pass:secret -out locked.key")
    with pytest.raises(BadConfig, match=r"^tls_key is \S+, which has a passphrase; give a key without one"):
        replace(files, key=tmp_path / "locked.key").load()
