"""The region's own CA: EC P-256, its key in a file that only its owner can read.

A Shoal certificate has one URI name `shoal://REGION/ROLE/NAME`, no CA flag, digitalSignature, and extended key usage by
role. Roles that serve (`SERVERS`) also get DNS and IP names, for ordinary TLS clients.
"""

import asyncio
import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shoal.coordinator.identity.roots import Root, Roots, bundle_pem, key_usage, to_datetime
from shoal.coordinator.ports import IssuedCertificate, RecognisedCertificate, RootInfo
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import check_name, uri_of
from shoal.types.units import Seconds, Wall
from shoal.wire.certificates import CERTIFICATE_ERRORS, identity_of_certificate
from shoal.wire.enrol import RENEWAL, key_pem, new_key, request_pem
from shoal.wire.identity import BACKDATED_S, common_name_of, dns_of
from shoal.wire.member_files import Enrolled
from shoal.wire.signing import verify

CSR_BYTES: Final = 8 * 2**10
SERVERS: Final = frozenset({Role.AGENT, Role.GATEWAY, Role.COORDINATOR, Role.FEDERATION, Role.BROKER})
CLIENTS: Final = frozenset(Role) - {Role.BROKER}
_LOOPBACK: Final = ("localhost", "127.0.0.1", "127.0.0.2", "::1")
"""This machine. At 127.0.0.2 the members of a local region reach each other, and are listed."""


class FileAuthority:
    """ports.SharedAuthority; its keys are in memory, read from `ca/`."""

    def __init__(self, roots: Roots) -> None:
        self.region = roots.region
        self._roots = roots
        self._rotation_lock = asyncio.Lock()

    @classmethod
    def open(cls, folder: Path, region: str, *, wall: Wall, may_create: bool) -> "FileAuthority":
        """Raises ShoalError(STATE_CORRUPT), as `Roots.open` does."""
        return cls(Roots.open(folder, region, wall=wall, may_create=may_create))

    @property
    def ca_pem(self) -> bytes:
        return bundle_pem(self._roots.trusted_roots)

    @property
    def roots(self) -> tuple[str, ...]:
        return tuple(root.pem.decode() for root in self._roots.trusted_roots)

    @property
    def chain_pem(self) -> bytes:
        """What a server sends after its own certificate: for joiners, who pin a CA before they trust anything, and for
        nodes that were away and know only the previous CA."""
        return self._roots.issuing.cross_pem + self.ca_pem

    @property
    def fingerprint(self) -> str:
        return self._roots.issuing.fingerprint

    @property
    def fingerprints(self) -> tuple[str, ...]:
        return tuple(root.fingerprint for root in self._roots.trusted_roots)

    def recognise(self, certificate_pem: bytes, *, retired: bool = False) -> RecognisedCertificate:
        try:
            certificate = x509.load_pem_x509_certificate(certificate_pem)
            issuer = self.find_issuer(certificate, retired=retired)
            return RecognisedCertificate(identity_of_certificate(certificate), issuer)
        except CERTIFICATE_ERRORS as cause:
            raise refuse(Code.CERT_UNTRUSTED, "not a readable certificate", "one in PEM", "enrol again") from cause

    def verify_renewal(self, certificate_pem: bytes, csr_pem: bytes, nonce: str, signature: bytes) -> None:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        name = identity_of_certificate(certificate).name
        verify(certificate, signature, self.region, name, RENEWAL, nonce.encode() + csr_pem)

    def find_issuer(self, certificate: x509.Certificate, *, retired: bool = False) -> str:
        """The fingerprint of the CA that signed the certificate. retired: also accept a CA that is no longer trusted.

        Raises ShoalError(CERT_UNTRUSTED).
        """
        for root in self._roots.all_roots if retired else self._roots.trusted_roots:
            if root.is_issuer_of(certificate):
                return root.fingerprint
        raise refuse(
            Code.CERT_UNTRUSTED,
            "a certificate of another authority",
            f"one of {self.region}",
            "join with a token",
        )

    @property
    def stage(self) -> str:
        return self._roots.stage

    @property
    def since(self) -> Wall:
        return self._roots.since

    def infos(self) -> tuple[RootInfo, ...]:
        roots = self._roots
        return tuple(
            RootInfo(root.fingerprint, Wall(root.certificate.not_valid_after_utc.timestamp()), _state(roots, root))
            for root in roots.all_roots
        )

    async def begin(self, wall: Wall) -> None:
        await self._advance("idle", lambda: self._roots.begin(wall))

    async def promote(self, wall: Wall) -> None:
        await self._advance("trust", lambda: self._roots.promote(wall))

    async def retire(self, wall: Wall) -> None:
        await self._advance("issue", lambda: self._roots.retire(wall))

    async def _advance(self, stage: str, step: Callable[[], Roots]) -> None:
        async with self._rotation_lock:
            if self._roots.stage != stage:
                raise refuse(
                    Code.CONFLICT,
                    f"the rotation is at {self._roots.stage}",
                    f"at {stage}",
                    "look at it: shoal ca status",
                )
            self._roots = await asyncio.to_thread(step)

    async def reload(self) -> None:
        async with self._rotation_lock:
            self._roots = await asyncio.to_thread(self._roots.reload)

    def check(self, csr_pem: bytes, name: str) -> None:
        _parse_csr(csr_pem, name)

    def issue(
        self, csr_pem: bytes, role: Role, name: str, *, hosts: tuple[str, ...], lifetime_s: Seconds, wall: Wall
    ) -> IssuedCertificate:
        check_name(name, "name")
        request = _parse_csr(csr_pem, name)
        server = role in SERVERS
        issuing = self._roots.issuing
        if issuing.key is None:
            raise refuse(Code.STATE_CORRUPT, "the key of the CA that issues is gone", "ca/ whole", "restore it")
        ends = min(to_datetime(wall + lifetime_s), issuing.certificate.not_valid_after_utc)
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH] if role in CLIENTS else []
        usages += [ExtendedKeyUsageOID.SERVER_AUTH] if server else []
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri_of(self.region, role, name))]
        if server:
            names.append(x509.DNSName(dns_of(self.region, role, name)))
            names.extend(_host(host) for host in dict.fromkeys((*_LOOPBACK, *hosts)))
        common_name = common_name_of(role, name)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else [])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuing.certificate.subject)
            .public_key(request.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(to_datetime(wall - BACKDATED_S))
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(key_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=not common_name)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(request.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuing.key.public_key()), critical=False)
            .sign(issuing.key, hashes.SHA256())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        if self._roots.stage == "issue":
            pem += issuing.cross_pem
        return IssuedCertificate(pem, str(certificate.serial_number), Wall(ends.timestamp()), issuing.fingerprint)

    def enrol_self(
        self, role: Role, name: str, *, hosts: tuple[str, ...] = (), lifetime_s: Seconds, wall: Wall
    ) -> Enrolled:
        """A key and its certificate for a process on this machine: the server itself, or the first operator."""
        key = new_key()
        issued = self.issue(request_pem(key, name), role, name, hosts=hosts, lifetime_s=lifetime_s, wall=wall)
        return Enrolled(self.region, role, name, issued.pem, self.ca_pem, "", "", key_pem(key))


def _parse_csr(csr_pem: bytes, name: str) -> x509.CertificateSigningRequest:
    """Accepts only a request for a P-256 certificate. Raises ShoalError(CSR_DENIED)."""
    if len(csr_pem) > CSR_BYTES:
        raise _denial(f"{len(csr_pem)} bytes", f"at most {CSR_BYTES}")
    try:
        request = x509.load_pem_x509_csr(csr_pem)
        key = request.public_key()
        sound = request.is_signature_valid
        attributes, extensions = len(request.attributes), len(request.extensions)
    except (*CERTIFICATE_ERRORS, UnsupportedAlgorithm, InvalidSignature) as cause:
        raise _denial("not a readable signing request", "PKCS#10 in PEM") from cause
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise _denial("another kind of key", "EC P-256")
    if not sound:
        raise _denial("a signature that does not match the key", "a request signed by its own key")
    if attributes or extensions:
        raise _denial(
            f"{max(attributes, extensions)} attributes or extensions", "none: what is issued comes from the token"
        )
    subject = [(attribute.oid, attribute.value) for attribute in request.subject]
    if subject not in ([], [(NameOID.COMMON_NAME, name)]):
        raise _denial("another subject than the name that was asked for", f"no subject, or CN={name}")
    return request


def _state(roots: Roots, root: Root) -> str:
    if root.name == roots.issuing_name:
        return "issuing"
    if root.name not in roots.trusted_names:
        return "retired"
    return "next" if roots.stage == "trust" else "trusted"


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _denial(found: str, asked: str) -> ShoalError:
    return refuse(Code.CSR_DENIED, found, asked, "let `shoal-agent join` or `shoal context login` make the request")
