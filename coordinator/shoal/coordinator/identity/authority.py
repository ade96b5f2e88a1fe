"""The region's own CA: EC P-256, its key in a file that only its owner reads.

A certificate of Shoal: one URI name `shoal://REGION/ROLE/NAME`, no CA flag, digitalSignature, extended key usage by
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

from shoal.coordinator.identity.roots import Root, Roots, joined, key_usage, moment
from shoal.coordinator.ports import Issued, RootInfo
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall
from shoal.wire.enrol import Enrolled, key_pem, new_key, request_pem
from shoal.wire.identity import BACKDATED_S, UNREADABLE, check_name, common_name_of, dns_of, uri_of

CSR_BYTES: Final = 8 * 2**10
SERVERS: Final = frozenset({Role.AGENT, Role.GATEWAY, Role.COORDINATOR, Role.FEDERATION, Role.BROKER})
CLIENTS: Final = frozenset(Role) - {Role.BROKER}
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


class FileAuthority:
    """ports.Authority and ports.RotatingAuthority, its keys in memory, read from `ca/`."""

    def __init__(self, roots: Roots) -> None:
        self.region = roots.region
        self._roots = roots
        self._turning = asyncio.Lock()

    @classmethod
    def open(cls, folder: Path, region: str, *, wall: Wall, may_create: bool) -> "FileAuthority":
        """Raises ShoalError(STATE_CORRUPT), as `Roots.open` does."""
        return cls(Roots.open(folder, region, wall=wall, may_create=may_create))

    @property
    def ca_pem(self) -> bytes:
        return joined(self._roots.trusting)

    @property
    def roots(self) -> tuple[str, ...]:
        return tuple(root.pem.decode() for root in self._roots.trusting)

    @property
    def chain_pem(self) -> bytes:
        """What a server shows after its own certificate: for joiners, who pin a CA before they trust anything, and for
        those who were away and know only the CA before this one."""
        return self._roots.issuing.cross + self.ca_pem

    @property
    def fingerprint(self) -> str:
        return self._roots.issuing.fingerprint

    @property
    def fingerprints(self) -> tuple[str, ...]:
        return tuple(root.fingerprint for root in self._roots.trusting)

    def recognise(self, certificate: x509.Certificate, *, retired: bool = False) -> str:
        for root in self._roots.known if retired else self._roots.trusting:
            if root.issued(certificate):
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
            for root in roots.known
        )

    async def begin(self, wall: Wall) -> None:
        await self._turn("idle", lambda: self._roots.begun(wall))

    async def promote(self, wall: Wall) -> None:
        await self._turn("trust", lambda: self._roots.promoted(wall))

    async def retire(self, wall: Wall) -> None:
        await self._turn("issue", lambda: self._roots.retired(wall))

    async def _turn(self, stage: str, step: Callable[[], Roots]) -> None:
        async with self._turning:
            if self._roots.stage != stage:
                raise refuse(
                    Code.CONFLICT,
                    f"the rotation is at {self._roots.stage}",
                    f"at {stage}",
                    "look at it: shoal ca status",
                )
            self._roots = await asyncio.to_thread(step)

    def check(self, csr_pem: bytes, name: str) -> None:
        _checked(csr_pem, name)

    def issue(
        self, csr_pem: bytes, role: Role, name: str, *, hosts: tuple[str, ...], lifetime_s: Seconds, wall: Wall
    ) -> Issued:
        check_name(name, "name")
        request = _checked(csr_pem, name)
        server = role in SERVERS
        issuing = self._roots.issuing
        if issuing.key is None:
            raise refuse(Code.STATE_CORRUPT, "the key of the CA that issues is gone", "ca/ whole", "restore it")
        ends = min(moment(wall + lifetime_s), issuing.certificate.not_valid_after_utc)
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
            .not_valid_before(moment(wall - BACKDATED_S))
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
            pem += issuing.cross
        return Issued(pem, str(certificate.serial_number), Wall(ends.timestamp()), issuing.fingerprint)

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
    except (*UNREADABLE, UnsupportedAlgorithm, InvalidSignature) as cause:
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


def _state(roots: Roots, root: Root) -> str:
    if root.name == roots.issuing_name:
        return "issuing"
    if root.name not in roots.trusted:
        return "retired"
    return "next" if roots.stage == "trust" else "trusted"


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _denied(found: str, asked: str) -> ShoalError:
    return refuse(Code.CSR_DENIED, found, asked, "let `shoal-agent join` or `shoal context login` make the request")
