"""The client side of enrolment, for agents and operators: make a key and a request, pin the CA, redeem the token. Also
renewal.

All calls block. Commands call them directly, long-running processes from a thread.
"""

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal.types.address import HostPort
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import Identity, check_name
from shoal.types.token import JoinToken, parse_join_token
from shoal.v1 import enrolment_pb2, enrolment_pb2_grpc
from shoal.wire.certificates import ca_fingerprint, identity_of_certificate, identity_of_der
from shoal.wire.grpcio_status import refusal_of
from shoal.wire.identity import dns_of
from shoal.wire.limits import ENROL_BYTES, LINK_BYTES
from shoal.wire.member_files import Enrolled
from shoal.wire.signing import sign
from shoal.wire.tls_ignoring_dates import channel_ignoring_dates

TIMEOUT_S: Final = 15.0
ALERT_S: Final = 1.0
"""How long a server may take, once TLS is agreed on, to say that it requires a certificate: a round trip plus its
backlog."""
RENEWAL: Final = "renewal"
"""Topic of the signature by which the holder of a certificate requests the next one."""


def is_matching_pair(certificate_pem: bytes, key_pem: bytes) -> bool:
    """Whether this key is that of the (first) certificate. Raises ValueError when either is unreadable."""
    key = serialization.load_pem_private_key(key_pem, password=None)
    return x509.load_pem_x509_certificate(certificate_pem).public_key() == key.public_key()


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def request_pem(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    """A signing request that only asks for a certificate: the token decides what is issued."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else [])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def _ask_each(addresses: str, ask: Callable[[str], Enrolled]) -> Enrolled:
    """Tries each address in turn, because only the leading coordinator of a region answers. Raises the last one's
    error."""
    *others, last = addresses.split(",")
    for address in others:
        try:
            return ask(address)
        except ShoalError as error:
            if error.code not in (Code.COORDINATOR_UNREACHABLE, Code.NOT_LEADER):
                raise
    return ask(last)


def redeem(addresses: str, token_text: str, name: str) -> Enrolled:
    """Redeems a join token for the identity that it is bound to.

    addresses: host:port of the enrolment servers, separated by commas. name: may be empty for a token that is bound to
    one.

    Raises ShoalError(TOKEN_* | CERT_UNTRUSTED | COORDINATOR_UNREACHABLE | NAME_INVALID | CSR_DENIED | FIELD_INVALID).
    """
    token = parse_join_token(token_text)
    if name:
        check_name(name, "name")
    return _ask_each(addresses, lambda address: _redeem(address, token, name))


def _redeem(address: str, token: JoinToken, name: str) -> Enrolled:
    try:
        return _redeem_at(address, _fetch_pinned_ca(address, token), token, name)
    except ShoalError as error:
        # Checked only after a failure: a caller with the right port needs no second connection.
        if error.code in _WRONG_PORT and (wrong := wrong_port(address)) is not None:
            raise ShoalError(wrong) from error
        raise


_WRONG_PORT: Final = (Code.COORDINATOR_UNREACHABLE, Code.CERT_UNTRUSTED, Code.UNIMPLEMENTED, Code.UNAUTHENTICATED)
"""Codes with which redeeming fails at a port of this region that is not the enrolment port."""


def wrong_port(address: str) -> Refusal | None:
    """Names the service at `address` where it is not an enrolment port. It is recognised by its certificate and by
    whether it requires one of the caller. None: it may be an enrolment port, or it cannot be determined."""
    try:
        found = _describe_listener(address)
    except (OSError, ValueError, ShoalError):
        return None
    return (
        Refusal(
            Code.COORDINATOR_UNREACHABLE,
            f"{address} is {found}",
            "the coordinator's enrolment port, 7444 unless it was told otherwise",
            "`shoal dev up` prints it; it is what the coordinator has as --enrol",
        )
        if found
        else None
    )


def _describe_listener(address: str) -> str:
    """Empty for a possible enrolment port. Raises ShoalError, OSError."""
    server = HostPort.parse(address)
    with (
        socket.create_connection((server.host, server.port), timeout=TIMEOUT_S) as plain,
        _context_without_verification().wrap_socket(plain, server_hostname=server.host) as secured,
    ):
        leaf = secured.getpeercert(binary_form=True)
        who = identity_of_der(leaf) if leaf else None
        if who is not None and who.role not in (Role.COORDINATOR, Role.FEDERATION):
            return f"a port of the {who.role} {who.name}"
        secured.settimeout(ALERT_S)
        # With TLS 1.3 a server that requires a certificate reports that, or hangs up, only now. One that does not sends
        # its HTTP/2 settings first, or waits.
        try:
            if secured.recv(1):
                return ""
        except TimeoutError:
            return ""
        except OSError:
            pass
        is_link = secured.selected_alpn_protocol() == "h2"
    return "the coordinator's link port, of agents and operators" if is_link else "the coordinator's metrics port"


def _redeem_at(address: str, ca: bytes, token: JoinToken, name: str) -> Enrolled:
    key = new_key()
    request = enrolment_pb2.RedeemRequest(token=token.text, csr_pem=request_pem(key, name).decode(), name=name)
    with _enrolment_stub(address, ca, token.region) as stub:
        reply = stub.Redeem(request, timeout=TIMEOUT_S)
    return Enrolled(
        region=reply.region,
        role=Role(reply.role),
        name=reply.name,
        certificate_pem=reply.certificate_pem.encode(),
        ca_pem=reply.ca_pem.encode(),
        link_address=reply.link_address,
        api_address=reply.api_address,
        key_pem=key_pem(key),
        enrol_address=reply.enrol_address or address,
        mqtt_address=reply.mqtt_address,
    )


def renew(addresses: str, folder: Path) -> Enrolled:
    """A certificate for a new key and the identity in `folder`, which may have expired. Writes nothing.

    The server is checked against the CA in the folder, but not by dates, because this machine's clock may be wrong.
    addresses: host:port, several with commas.

    Raises ShoalError(RENEW_DENIED | CERT_REVOKED | CERT_UNTRUSTED | COORDINATOR_UNREACHABLE | UNAUTHENTICATED).
    """
    return _ask_each(addresses, lambda address: _renew(address, folder))


def _renew(address: str, folder: Path) -> Enrolled:
    old_key, identity, certificate_pem, ca = _read_member_files(folder)
    key = new_key()
    csr = request_pem(key, "")
    with _enrolment_stub(address, ca, identity.region) as stub:
        nonce = stub.Challenge(enrolment_pb2.ChallengeRequest(), timeout=TIMEOUT_S).nonce
        signature = sign(old_key, identity.region, identity.name, RENEWAL, nonce.encode() + csr)
        request = enrolment_pb2.RenewCertificateRequest(
            certificate_pem=certificate_pem.decode(), csr_pem=csr.decode(), nonce=nonce, signature=signature
        )
        reply = stub.Renew(request, timeout=TIMEOUT_S)
    issued = x509.load_pem_x509_certificate(reply.certificate_pem.encode())
    if identity_of_certificate(issued).uri != identity.uri or issued.public_key() != key.public_key():
        raise refuse(
            Code.CERT_NAME_INVALID, "a certificate for another name or key", identity.uri, "look at the coordinator"
        )
    return Enrolled(
        region=identity.region,
        role=identity.role,
        name=identity.name,
        certificate_pem=reply.certificate_pem.encode(),
        ca_pem=reply.ca_pem.encode(),
        link_address=reply.link_address,
        api_address=reply.api_address,
        key_pem=key_pem(key),
        enrol_address=address,
    )


def _read_member_files(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, Identity, bytes, bytes]:
    """(key, identity, leaf, CA). Only the leaf: the certificates after it in the file are for servers to show."""
    try:
        leaf = x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / "key.pem").read_bytes(), password=None)
        ca = (folder / "ca.pem").read_bytes()
    except (OSError, ValueError) as cause:
        raise refuse(Code.UNAUTHENTICATED, f"{folder}: {cause}", "a member's files", "enrol again") from cause
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise refuse(Code.UNAUTHENTICATED, "a key that is not P-256", "the member's key", "enrol again")
    return key, identity_of_certificate(leaf), leaf.public_bytes(serialization.Encoding.PEM), ca


@contextmanager
def open_pinned_channel(address: str, token: JoinToken, server_name: str) -> Iterator[grpc.Channel]:
    """A channel to the server that the token names, verified by the CA that the token pins. Raises ShoalError for any
    error inside."""
    with _channel(address, _fetch_pinned_ca(address, token), server_name, LINK_BYTES) as channel:
        yield channel


@contextmanager
def _enrolment_stub(address: str, ca_pem: bytes, region: str) -> Iterator[Any]:
    """A stub of the enrolment service. Raises ShoalError for any error inside."""
    with _channel(address, ca_pem, dns_of(region, Role.COORDINATOR, "coordinator")) as channel:
        yield enrolment_pb2_grpc.EnrolmentStub(channel)


@contextmanager
def _channel(address: str, ca_pem: bytes, server_name: str, most_bytes: int = ENROL_BYTES) -> Iterator[grpc.Channel]:
    try:
        with channel_ignoring_dates(address, ca_pem, server_name, most_bytes) as channel:
            yield channel
    except grpc.RpcError as cause:
        raise ShoalError(refusal_of(cause)) from cause
    except ssl.SSLCertVerificationError as cause:
        raise refuse(
            Code.CERT_UNTRUSTED,
            f"the server at {address}: {cause.verify_message}",
            "the coordinator of this region",
            "check the address, or enrol again with a join token",
        ) from cause
    except (OSError, ValueError) as cause:
        raise ShoalError(_unreachable(address, cause)) from cause


def _unreachable(address: str, cause: Exception) -> Refusal:
    why = getattr(cause, "strerror", None) or cause
    return Refusal(
        Code.COORDINATOR_UNREACHABLE, f"{address}: {why}", "an enrolment server", "check the address and the port"
    )


def _context_without_verification() -> ssl.SSLContext:
    """For a server whose CA is not known yet."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def _fetch_pinned_ca(address: str, token: JoinToken) -> bytes:
    """The region's CA certificate (PEM) from the server's own chain, accepted only by the token's fingerprint."""
    server = HostPort.parse(address)
    try:
        with (
            socket.create_connection((server.host, server.port), timeout=TIMEOUT_S) as plain,
            _context_without_verification().wrap_socket(plain, server_hostname=server.host) as secured,
        ):
            # Public since Python 3.13 (SSLSocket.get_unverified_chain); earlier versions have the same call underneath.
            chain = secured._sslobj.get_unverified_chain() or ()  # type: ignore[attr-defined]
            ders = [one if isinstance(one, bytes) else ssl.PEM_cert_to_DER_cert(one.public_bytes()) for one in chain]
    except (OSError, ValueError) as cause:
        raise ShoalError(_unreachable(address, cause)) from cause
    for der in ders:
        certificate = x509.load_der_x509_certificate(der)
        if ca_fingerprint(certificate) == token.ca_sha256:
            return certificate.public_bytes(serialization.Encoding.PEM)
    raise refuse(
        Code.CERT_UNTRUSTED,
        f"the server at {address} does not show the CA that the token names",
        "the coordinator that made the token",
        "check the address, or make a new token there",
    )
