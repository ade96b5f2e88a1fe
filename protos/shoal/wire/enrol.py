"""The joiner's side of enrolment, the same for agents and operators: a key, a request, a pinned CA, one redemption.

Blocking: called by commands (`shoal-agent join`, `shoal context login`), never by a server.
"""

import os
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.v1 import enrolment_pb2, enrolment_pb2_grpc
from shoal.wire.identity import check_name, dns_of
from shoal.wire.limits import ENROL_BYTES, channel_options
from shoal.wire.status import refusal_of
from shoal.wire.token import JoinToken, ca_fingerprint, parse_join_token

TIMEOUT_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Enrolled:
    """What a redemption gave. key_pem: unencrypted PKCS#8, made here and never sent."""

    region: str
    role: Role
    name: str
    certificate_pem: bytes
    ca_pem: bytes
    link_address: str
    api_address: str
    key_pem: bytes = field(repr=False)

    def write(self, folder: Path) -> None:
        """`cert.pem`, `key.pem`, `ca.pem` in `folder` (0700), each 0600, replaced whole."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, content in (("key.pem", self.key_pem), ("ca.pem", self.ca_pem), ("cert.pem", self.certificate_pem)):
            write_private(folder / name, content)


def write_private(path: Path, content: bytes) -> None:
    """Replaces `path` by a file that only its owner reads; on disk when this returns."""
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


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


def redeem(address: str, token_text: str, name: str) -> Enrolled:
    """Redeems a join token at the enrolment server `address` (host:port) for the identity that it is bound to.

    name: may be empty for a token that is bound to one.

    Raises ShoalError(TOKEN_* | CERT_UNTRUSTED | COORDINATOR_UNREACHABLE | NAME_INVALID | CSR_DENIED).
    """
    token = parse_join_token(token_text)
    if name:
        check_name(name, "name")
    ca = _pinned_ca(address, token)
    key = new_key()
    credentials = grpc.ssl_channel_credentials(root_certificates=ca)
    server_name = dns_of(token.region, Role.COORDINATOR, "coordinator")
    with grpc.secure_channel(address, credentials, channel_options(ENROL_BYTES, server_name=server_name)) as channel:
        stub = enrolment_pb2_grpc.EnrolmentStub(channel)
        request = enrolment_pb2.RedeemRequest(token=token.text, csr_pem=request_pem(key, name).decode(), name=name)
        try:
            reply = stub.Redeem(request, timeout=TIMEOUT_S)
        except grpc.RpcError as cause:
            raise ShoalError(refusal_of(cause)) from cause
    return Enrolled(
        region=reply.region,
        role=Role(reply.role),
        name=reply.name,
        certificate_pem=reply.certificate_pem.encode(),
        ca_pem=reply.ca_pem.encode(),
        link_address=reply.link_address,
        api_address=reply.api_address,
        key_pem=key_pem(key),
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
        raise refuse(
            Code.COORDINATOR_UNREACHABLE, f"{address}: {cause}", "an enrolment server", "check the address and the port"
        ) from cause
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
