"""The member's side of enrolment, the same for agents and operators: a key, a request, a pinned CA, one redemption.

Renewing is here too. Blocking: called by commands, and from a thread by what runs for long.
"""

import json
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.v1 import enrolment_pb2, enrolment_pb2_grpc
from shoal.wire.identity import Identity, check_name, dns_of, identity_of_certificate
from shoal.wire.limits import ENROL_BYTES, LINK_BYTES
from shoal.wire.private import write_private
from shoal.wire.signing import sign
from shoal.wire.status import refusal_of
from shoal.wire.token import JoinToken, ca_fingerprint, parse_join_token
from shoal.wire.undated import undated_channel

TIMEOUT_S: Final = 15.0
RENEWAL: Final = "renewal"
"""What the holder of a certificate signs a request for its successor as."""
_NAMES: Final = ("key.pem", "ca.pem", "cert.pem")
_PENDING: Final = "pending.json"


@dataclass(frozen=True, slots=True)
class Enrolled:
    """What a redemption or a renewal gave. key_pem: unencrypted PKCS#8, made here and never sent."""

    region: str
    role: Role
    name: str
    certificate_pem: bytes
    ca_pem: bytes
    link_address: str
    api_address: str
    key_pem: bytes = field(repr=False)
    enrol_address: str = ""
    mqtt_address: str = ""

    def write(self, folder: Path) -> None:
        """`cert.pem`, `key.pem`, `ca.pem` in `folder` (0700), each 0600.

        All or none, whenever it is cut off: what is to be written is on disk first, and `complete` goes on with it.
        Who reads meanwhile may see a key beside another's certificate, and can tell by `belong`.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        contents = dict(zip(_NAMES, (self.key_pem, self.ca_pem, self.certificate_pem), strict=True))
        write_private(folder / _PENDING, json.dumps({name: pem.decode() for name, pem in contents.items()}).encode())
        complete(folder)


def complete(folder: Path) -> None:
    """Ends a `write` that was cut off; nothing where there is none. Raises OSError."""
    pending = folder / _PENDING
    try:
        contents: dict[str, str] = json.loads(pending.read_text())
    except FileNotFoundError:
        return
    for name in _NAMES:
        write_private(folder / name, contents[name].encode())
    pending.unlink(missing_ok=True)


def belong(certificate_pem: bytes, key_pem: bytes) -> bool:
    """Whether this is the key of the (first) certificate. Raises ValueError when one of them is unreadable."""
    key = serialization.load_pem_private_key(key_pem, password=None)
    return x509.load_pem_x509_certificate(certificate_pem).public_key() == key.public_key()


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def request_pem(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    """A signing request that asks for nothing but a certificate: what is issued comes from the token."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else [])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def _in_turn(addresses: str, ask: Callable[[str], Enrolled]) -> Enrolled:
    """Of a region's coordinators the one that leads answers. Raises what the last one said."""
    *others, last = addresses.split(",")
    for address in others:
        try:
            return ask(address)
        except ShoalError as error:
            if error.code not in (Code.COORDINATOR_UNREACHABLE, Code.NOT_LEADER):
                raise
    return ask(last)


def redeem(addresses: str, token_text: str, name: str) -> Enrolled:
    """Redeems a join token at an enrolment server of `addresses` (host:port, several with commas) for the identity that
    it is bound to.

    name: may be empty for a token that is bound to one.

    Raises ShoalError(TOKEN_* | CERT_UNTRUSTED | COORDINATOR_UNREACHABLE | NAME_INVALID | CSR_DENIED).
    """
    token = parse_join_token(token_text)
    if name:
        check_name(name, "name")
    return _in_turn(addresses, lambda address: _redeem(address, token, name))


def _redeem(address: str, token: JoinToken, name: str) -> Enrolled:
    ca = _pinned_ca(address, token)
    key = new_key()
    request = enrolment_pb2.RedeemRequest(token=token.text, csr_pem=request_pem(key, name).decode(), name=name)
    with _enrolment(address, ca, token.region) as stub:
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
    """A certificate for a new key and the identity of `folder`'s, which may have expired; writes nothing.

    The server is known by the CA that the folder trusts and not by dates: this machine's clock may be wrong.
    addresses: host:port, several with commas.
    Raises ShoalError(RENEW_DENIED | CERT_REVOKED | CERT_UNTRUSTED | COORDINATOR_UNREACHABLE | UNAUTHENTICATED).
    """
    return _in_turn(addresses, lambda address: _renew(address, folder))


def _renew(address: str, folder: Path) -> Enrolled:
    old_key, identity, certificate_pem, ca = _held(folder)
    key = new_key()
    csr = request_pem(key, "")
    with _enrolment(address, ca, identity.region) as stub:
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


def _held(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, Identity, bytes, bytes]:
    """(key, identity, leaf, CA). The leaf alone: what comes after it in the file is for servers to show."""
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
def pinned_channel(address: str, token: JoinToken, server_name: str) -> Iterator[grpc.Channel]:
    """To the server that the token names, known by the CA that the token pins. Raises ShoalError for whatever goes
    wrong inside."""
    with _channel(address, _pinned_ca(address, token), server_name, LINK_BYTES) as channel:
        yield channel


@contextmanager
def _enrolment(address: str, ca_pem: bytes, region: str) -> Iterator[Any]:
    """A stub of the enrolment service. Raises ShoalError for whatever goes wrong inside."""
    with _channel(address, ca_pem, dns_of(region, Role.COORDINATOR, "coordinator")) as channel:
        yield enrolment_pb2_grpc.EnrolmentStub(channel)


@contextmanager
def _channel(address: str, ca_pem: bytes, server_name: str, most_bytes: int = ENROL_BYTES) -> Iterator[grpc.Channel]:
    try:
        with undated_channel(address, ca_pem, server_name, most_bytes) as channel:
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
    return Refusal(
        Code.COORDINATOR_UNREACHABLE, f"{address}: {cause}", "an enrolment server", "check the address and the port"
    )


def _pinned_ca(address: str, token: JoinToken) -> bytes:
    """The region's CA certificate (PEM) out of the server's own chain, accepted by the token's fingerprint alone."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            # Public from Python 3.13 on (SSLSocket.get_unverified_chain); the same call lies beneath before.
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
