"""What a handshake tells of the certificate that was shown in it, and what a peer does about that later."""

import ssl
from pathlib import Path
from typing import Any, cast

import pytest

from harness.crypto.handshakes import Handshake, client_context, half_a_key_update, server_context, shake_hands
from harness.crypto.pki import Authority, CertificateFiles
from shoal.host.peer_certificate import PeerCertificate, certificate_of_peer, verified_chain
from shoal.types.device import Role
from shoal.wire.certificates import identity_of_pem

NOW = 1_800_000_000.0
VERSIONS = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3


@pytest.fixture
def eu(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "eu", "eu", NOW)


@pytest.fixture
def server(eu: Authority) -> ssl.SSLContext:
    own = eu.issue(Role.GATEWAY, "g1")
    return server_context(own, own.issuer)


@pytest.fixture
def files(eu: Authority) -> CertificateFiles:
    return eu.issue(Role.TENANT, "acme")


@pytest.fixture
def handshake(server: ssl.SSLContext, files: CertificateFiles) -> Handshake:
    return shake_hands(server, client_context(files))


class Connection:
    """The server's side of a connection, as another Python has it: without its chain, but for what is given."""

    def __init__(self, connection: ssl.SSLObject, **given: object) -> None:
        self._connection = connection
        self.__dict__.update(given)

    def getpeercert(self, binary_form: bool = False) -> Any:
        return self._connection.getpeercert(binary_form)

    def show(self) -> PeerCertificate | None:
        return certificate_of_peer(cast(Any, self))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_handshake_tells_whom_the_certificate_names_and_who_issued_it(
    eu: Authority, server: ssl.SSLContext, files: CertificateFiles, version: ssl.TLSVersion
) -> None:
    client = client_context(files)
    client.maximum_version = version
    shown = shake_hands(server, client).certificate
    assert shown.pem == files.certificate.read_bytes()
    assert shown.verified is not None
    assert shown.verified.issuer == ssl.PEM_cert_to_DER_cert(eu.certificate.read_text())
    assert shown.verified.identity == identity_of_pem(shown.pem)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_session_that_is_resumed_tells_nothing(
    server: ssl.SSLContext, files: CertificateFiles, version: ssl.TLSVersion
) -> None:
    client = client_context(files)
    client.maximum_version = version
    shown = shake_hands(server, client, shake_hands(server, client).session).certificate
    assert shown == PeerCertificate(files.certificate.read_bytes())


def test_a_peer_that_begins_another_message_of_a_handshake_changes_nothing(
    server: ssl.SSLContext, files: CertificateFiles, tmp_path: Path
) -> None:
    """Until it ends the ssl module raises ValueError, and who called meanwhile was a traceback in the log."""
    client = client_context(files)
    client.keylog_filename = str(tmp_path / "keys")
    done = shake_hands(server, client)
    assert done.connection.cipher() == ("TLS_AES_256_GCM_SHA384", "TLSv1.3", 256)
    done.receive(half_a_key_update(tmp_path / "keys"))
    with pytest.raises(ssl.SSLWantReadError):
        done.connection.read(1)
    with pytest.raises(ValueError, match="handshake not done yet"):
        done.connection.getpeercert()
    assert done.certificate.verified is not None
    assert done.certificate.verified.identity.name == "acme"


def test_nothing_of_openssl_is_kept(handshake: Handshake) -> None:
    """A certificate outlives its connection: in the calls and sessions that came over it."""
    verified = handshake.certificate.verified
    assert verified is not None
    kept = [getattr(each, name) for each in (handshake.certificate, verified) for name in each.__slots__]
    assert {type(each).__name__ for each in kept} == {"bytes", "VerifiedCertificate", "Identity"}


def test_a_chain_of_another_certificate_tells_nothing(handshake: Handshake, eu: Authority) -> None:
    """OpenSSL keeps the chain of a handshake when a later one resumes a session."""
    ops = eu.issue(Role.OPERATOR, "ops").certificate
    own, issuer, other = map(
        ssl.PEM_cert_to_DER_cert, (handshake.certificate.pem.decode(), eu.certificate.read_text(), ops.read_text())
    )
    for first, expected in ((own, handshake.certificate), (other, PeerCertificate(handshake.certificate.pem))):
        chain = [first, issuer]
        assert Connection(handshake.connection, get_verified_chain=lambda chain=chain: chain).show() == expected


def test_chains_are_read_as_each_python_tells_them(handshake: Handshake) -> None:
    """In DER by the connection since Python 3.13, before that as objects by what is beneath."""
    inner = handshake.connection._sslobj  # type: ignore[attr-defined]
    chain = [ssl.PEM_cert_to_DER_cert(each.public_bytes()) for each in inner.get_verified_chain()]
    assert Connection(handshake.connection, _sslobj=inner).show() == handshake.certificate
    assert Connection(handshake.connection, get_verified_chain=lambda: chain).show() == handshake.certificate
    longer = [*chain, b"who issued the issuer"]
    assert Connection(handshake.connection, get_verified_chain=lambda: longer).show() == handshake.certificate


@pytest.mark.parametrize(
    "given", [{}, *({"get_verified_chain": lambda told=told: told} for told in (None, [], [b"0"]))]
)
def test_where_python_tells_no_chain_somebody_else_verifies(handshake: Handshake, given: dict[str, object]) -> None:
    connection = Connection(handshake.connection, **given)
    assert connection.show() == PeerCertificate(handshake.certificate.pem)
    assert len(verified_chain(cast(Any, connection))) < 2


@pytest.mark.parametrize(
    "error", [ssl.SSLError("cannot be decoded"), ValueError(), KeyError("notAfter"), MemoryError()]
)
def test_what_cannot_be_decoded_somebody_else_verifies(handshake: Handshake, error: Exception) -> None:
    def decode(binary_form: bool = False) -> bytes | None:
        if not binary_form:
            raise error
        return handshake.connection.getpeercert(binary_form=True)

    inner = handshake.connection._sslobj  # type: ignore[attr-defined]
    shown = Connection(handshake.connection, _sslobj=inner, getpeercert=decode).show()
    assert shown == PeerCertificate(handshake.certificate.pem)


@pytest.mark.parametrize("uris", [(), ("shoal://eu/agent/a", "shoal://eu/agent/b"), ("https://eu/agent/a",)])
def test_a_certificate_that_names_none_of_ours_is_somebody_elses_to_refuse(
    eu: Authority, server: ssl.SSLContext, uris: tuple[str, ...]
) -> None:
    files = eu.issue(Role.AGENT, "edge-1", uris=uris)
    assert shake_hands(server, client_context(files)).certificate == PeerCertificate(files.certificate.read_bytes())


def test_a_certificate_that_is_trusted_by_itself_has_no_issuer_to_tell(eu: Authority, files: CertificateFiles) -> None:
    server = server_context(eu.issue(Role.GATEWAY, "g1"), files.certificate.read_text())
    server.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    assert shake_hands(server, client_context(files)).certificate.verified is None
