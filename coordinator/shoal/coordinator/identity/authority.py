"""The region's own CA: EC P-256, its key in a file that only its owner reads.

A certificate of Shoal: one URI name `shoal://REGION/ROLE/NAME`, no CA flag, digitalSignature, extended key usage by
role. Roles that serve (agent, gateway, coordinator) also get DNS and IP names, for ordinary TLS clients.
"""

import ipaddress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shoal.coordinator.ports import Issued
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall
from shoal.wire.enrol import Enrolled, key_pem, new_key, request_pem, write_private
from shoal.wire.identity import check_name, dns_of, uri_of
from shoal.wire.token import ca_fingerprint

CA_LIFETIME_S: Final = Seconds(10 * 365 * 86400.0)
ALLOWANCE_S: Final = 300.0
"""Certificates begin this much earlier: clocks differ."""
CSR_BYTES: Final = 8 * 2**10
SERVERS: Final = frozenset({Role.AGENT, Role.GATEWAY, Role.COORDINATOR})
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


class FileAuthority:
    """ports.Authority with its key in memory, read from `ca/key.pem`."""

    def __init__(self, region: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self.region = region
        self._key = key
        self._certificate = certificate

    @classmethod
    def open(cls, folder: Path, region: str, *, wall: Wall, may_create: bool) -> "FileAuthority":
        """Reads `folder`/{cert.pem,key.pem}; makes them when there are none and `may_create`.

        The certificate is written last: without it nothing was ever issued, so a lone key is a start that was cut off.
        Raises ShoalError(STATE_CORRUPT) when they are unreadable, do not belong together, or are gone though the
        region is known.
        """
        certificate_file, key_file = folder / "cert.pem", folder / "key.pem"
        if certificate_file.exists():
            return cls(region, *_read(certificate_file, key_file, region))
        if not may_create:
            raise _corrupt(
                f"{folder.name}/cert.pem is gone", "restore ca/ from a copy; without it every node must enrol again"
            )
        key = new_key()
        certificate = _self_signed(region, key, wall)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(key_file, key_pem(key))
        write_private(certificate_file, certificate.public_bytes(serialization.Encoding.PEM))
        return cls(region, key, certificate)

    @property
    def ca_pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def fingerprint(self) -> str:
        return ca_fingerprint(self._certificate)

    def check(self, csr_pem: bytes, name: str) -> None:
        _checked(csr_pem, name)

    def issue(
        self, csr_pem: bytes, role: Role, name: str, *, hosts: tuple[str, ...], lifetime_s: Seconds, wall: Wall
    ) -> Issued:
        check_name(name, "name")
        request = _checked(csr_pem, name)
        server = role in SERVERS
        ends = min(_moment(wall + lifetime_s), self._certificate.not_valid_after_utc)
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if server else [])]
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri_of(self.region, role, name))]
        if server:
            names.append(x509.DNSName(dns_of(self.region, role, name)))
            names.extend(_host(host) for host in dict.fromkeys((*_LOOPBACK, *hosts)))
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(self._certificate.subject)
            .public_key(request.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_moment(wall - ALLOWANCE_S))
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(request.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Issued(
            certificate.public_bytes(serialization.Encoding.PEM),
            str(certificate.serial_number),
            Wall(ends.timestamp()),
        )

    def enrol_self(
        self, role: Role, name: str, *, hosts: tuple[str, ...] = (), lifetime_s: Seconds, wall: Wall
    ) -> Enrolled:
        """A key and its certificate for a process on this machine: the server itself, the first operator."""
        key = new_key()
        issued = self.issue(request_pem(key, name), role, name, hosts=hosts, lifetime_s=lifetime_s, wall=wall)
        return Enrolled(self.region, role, name, issued.pem, self.ca_pem, "", "", key_pem(key))


def _checked(csr_pem: bytes, name: str) -> x509.CertificateSigningRequest:
    """A request for a P-256 certificate and nothing else. Raises ShoalError(CSR_DENIED)."""
    if len(csr_pem) > CSR_BYTES:
        raise _denied(f"{len(csr_pem)} bytes", f"at most {CSR_BYTES}")
    try:
        request = x509.load_pem_x509_csr(csr_pem)
        key = request.public_key()
        sound = request.is_signature_valid
        attributes, extensions = len(request.attributes), len(request.extensions)
    except (ValueError, UnsupportedAlgorithm, InvalidSignature) as cause:
        raise _denied("not a readable signing request", "PKCS#10 in PEM") from cause
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise _denied("another kind of key", "EC P-256")
    if not sound:
        raise _denied("a signature that does not match the key", "a request signed by its own key")
    if attributes or extensions:
        raise _denied(
            f"{max(attributes, extensions)} attributes or extensions", "none: what is issued comes from the token"
        )
    subject = [(attribute.oid, attribute.value) for attribute in request.subject]
    if subject not in ([], [(NameOID.COMMON_NAME, name)]):
        raise _denied("another subject than the name that was asked for", f"no subject, or CN={name}")
    return request


def _read(certificate_file: Path, key_file: Path, region: str) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    remedy = "restore ca/ from a copy"
    try:
        certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as cause:
        raise _corrupt(f"the CA's files cannot be read: {type(cause).__name__}", remedy) from cause
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise _corrupt("the CA's key is not the one of its certificate", remedy)
    if certificate.subject != _ca_name(region):
        raise _corrupt("the CA is another region's", f"start with the data directory of {region}")
    return key, certificate


def _self_signed(region: str, key: ec.EllipticCurvePrivateKey, wall: Wall) -> x509.Certificate:
    check_name(region, "region")
    return (
        x509.CertificateBuilder()
        .subject_name(_ca_name(region))
        .issuer_name(_ca_name(region))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_moment(wall - ALLOWANCE_S))
        .not_valid_after(_moment(wall + CA_LIFETIME_S))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _ca_name(region: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Shoal region {region}")])


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _moment(wall: float) -> datetime:
    return datetime.fromtimestamp(wall, UTC)


def _denied(found: str, asked: str) -> ShoalError:
    return refuse(Code.CSR_DENIED, found, asked, "let `shoal-agent join` or `shoal context login` make the request")


def _corrupt(found: str, remedy: str) -> ShoalError:
    return refuse(Code.STATE_CORRUPT, found, "the region's CA", remedy)
