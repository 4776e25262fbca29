"""TLS from certificate files: what one end of a link shows, and whom it trusts. Called by members and by `kvmesh trace`.

Both ends show a certificate and check the other's (mTLS), with the same three files. They are read once, at the start: a
process that should take up new ones is started again. Knows no service; who serves and who dials is theirs.
"""

import codecs
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvmesh.errors import BadConfig

TLS_REASON = "tls"
"""Of errors that stay until someone changes a certificate or a setting."""

_WEAK = ("EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK")
_VALID_FROM, _EXPIRED, _PURPOSE = 9, 10, 26
"""OpenSSL's X509_V_ERR_ codes: not yet valid, has expired, unsuitable purpose."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates, ready to dial and to serve with."""

    channel: grpc.ChannelCredentials
    server: grpc.ServerCredentials
    name: str
    """What the certificate of a peer that is dialled must name; empty: the host that is dialled."""


def load_tls(cert: Path | None, key: Path | None, ca: Path | None, name: str = "") -> Tls | None:
    """Reads the files and checks that they can work: the own certificate has to pass its own check, in both roles.

    Args:
        cert: PEM, the own certificate, and after it those between it and a CA, if there are any.
        key: PEM, its private key, without a passphrase.
        ca: PEM, the CAs that sign the certificates of all members.
        name: what peers' certificates name, where they don't name the addresses that are dialled.

    Returns:
        None without any file: links are plain.

    Raises:
        BadConfig: only a part is given, or a file is unusable; the setting and what to do.
    """
    check_given(cert, key, ca, name)
    if cert is None or key is None or ca is None:
        return None
    certs, keys, cas = _read("tls_cert", cert), _read("tls_key", key), _read("tls_ca", ca)
    _check_certificates("tls_cert", cert)
    _check_certificates("tls_ca", ca)
    _check_with_itself(cert, key, ca)
    return Tls(
        grpc.ssl_channel_credentials(cas, keys, certs),
        grpc.ssl_server_credentials([(keys, certs)], cas, require_client_auth=True),
        name,
    )


def check_given(cert: Path | None, key: Path | None, ca: Path | None, name: str) -> None:
    """Opens no file.

    Raises:
        BadConfig: only some of the three files are given, or a name without them.
    """
    files = {"tls_cert": cert, "tls_key": key, "tls_ca": ca}
    given = [field for field, path in files.items() if path is not None]
    missing = [field for field, path in files.items() if path is None]
    if (given or name) and missing:
        there = " and ".join(given) or "tls_name"
        raise BadConfig(f"{there} without {' and '.join(missing)}; TLS needs all three files, plain links none")


def add_port(server: grpc.aio.Server, target: str, tls: Tls | None) -> int:
    """Takes a port for a server, with TLS or without; returns it.

    Raises:
        RuntimeError: it can't be had.
    """
    return server.add_insecure_port(target) if tls is None else server.add_secure_port(target, tls.server)


def trouble(details: str) -> str | None:
    """What gRPC tells of a connection that TLS did not let come about, in words that say what to do.

    Args:
        details: of a status that gRPC made at this end.

    Returns:
        None where TLS had no part in it.
    """
    if "Hostname Verification Check failed" in details:
        return "its certificate names neither the host dialled nor tls_name; set tls_name to a name in it, or renew it"
    _, failed, why = details.partition("CERTIFICATE_VERIFY_FAILED: ")
    if failed and "expired" in why:
        return "its certificate, or its CA's, has expired; renew it there and start it again"
    if failed and "not yet valid" in why:
        return "its certificate, or its CA's, is not valid yet; look at the clocks of both hosts"
    if failed:
        why = why.removesuffix(": OK")
        return f"its certificate is not trusted ({why}); give both ends certificates of a CA that is in both tls_ca"
    if "WRONG_VERSION_NUMBER" in details:
        return "it serves without TLS; set tls_cert, tls_key and tls_ca there too, or nowhere"
    if "SSL_ERROR_SSL" in details:
        return "the TLS handshake failed; keys must be RSA of 2,048 bits or more, or ECDSA on P-256 or P-384"
    return None


def is_hung_up(details: str) -> bool:
    """Whether the peer took the connection and closed it before a word: most of all, since it wants another kind of TLS.

    A server tells nobody what it found wrong. It may also have died just then.
    """
    closed = "Socket closed" in details or "Connection reset by peer" in details
    return closed and details.startswith("failed to connect to all addresses")


def _read(field: str, path: Path) -> bytes:
    try:
        content = path.read_bytes()
        if content.startswith(codecs.BOM_UTF8):
            raise BadConfig(f"{field} is {path}, which begins with a byte order mark; take it off")
        return content
    except OSError as error:
        why = error.strerror or str(error)
        raise BadConfig(f"{field} is {path}: {why}; a PEM file that this process may read is needed") from error


def _check_certificates(field: str, path: Path) -> None:
    try:
        _context(ssl.PROTOCOL_TLS_CLIENT, path)
    except ssl.SSLError as error:
        raise BadConfig(f"{field} is {path}, which holds no certificate; a PEM file with some is needed") from error


def _check_with_itself(cert: Path, key: Path, ca: Path) -> None:
    """Dials itself, in memory: whatever a peer of the same CA would find wrong shows here."""

    def no_passphrase() -> str:
        raise BadConfig(f"tls_key is {key}, which has a passphrase; give a key without one")

    client, server = (_context(kind, ca) for kind in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
    try:
        for end in (client, server):
            end.load_cert_chain(cert, key, no_passphrase)
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            why = f"the key of another certificate than tls_cert ({cert}); give the two that belong together"
            raise BadConfig(f"tls_key is {key}, {why}") from error
        if error.reason in _WEAK:
            why = f"too weak for TLS ({error.reason}); make one with 2,048 bits of RSA or more, and SHA-256"
            raise BadConfig(f"tls_cert is {cert}, which is {why}") from error
        why = error.reason or "nothing of that kind in it"
        raise BadConfig(f"tls_key is {key}, no private key for tls_cert ({why}); a PEM file is needed") from error
    try:
        _shake_hands(client, server)
    except ssl.SSLCertVerificationError as error:
        raise BadConfig(f"tls_cert is {cert}, {_unfit(error, ca)}") from error
    except ssl.SSLError as error:
        raise BadConfig(f"tls_cert is {cert}, which TLS can't use ({error.reason}); make another one") from error


def _context(kind: int, ca: Path) -> ssl.SSLContext:
    """One that trusts what gRPC would, a CA below a root included, and checks no name: the own one is not for itself."""
    context = ssl.SSLContext(kind)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_TRUSTED_FIRST
    context.load_verify_locations(ca)
    return context


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue  # it is the other's turn


def _unfit(error: ssl.SSLCertVerificationError, ca: Path) -> str:
    if error.verify_code == _EXPIRED:
        return f"which has expired, or tls_ca ({ca}) has; renew it"
    if error.verify_code == _VALID_FROM:
        return f"which is not valid yet, or tls_ca ({ca}) is not; look at this host's clock"
    if error.verify_code == _PURPOSE:
        return "which is not for servers and clients alike; make one with both usages (serverAuth, clientAuth), or none"
    return f"which no CA in tls_ca ({ca}) has signed ({error.verify_message}); give the CA that did"
