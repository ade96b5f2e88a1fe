"""A certificate authority for tests: short keys' worth of time, the same names as the real one."""

import datetime
import ipaddress
import math
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal.agent.clock import SystemClock
from shoal.types.device import Role
from shoal.types.identity import uri_of
from shoal.wire.identity import ca_common_name_of, common_name_of, dns_of

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files of one identity."""

    certificate: Path
    key: Path
    # The CAs of its region, which may change.
    authority: Path
    # The certificate of the CA that issued it, PEM.
    issuer: str = field(default="", kw_only=True)

    @property
    def ca(self) -> Path:
        """As wire.handshake.PemFiles calls it."""
        return self.authority

    def read(self) -> tuple[bytes, bytes, bytes]:
        return self.certificate.read_bytes(), self.key.read_bytes(), self.authority.read_bytes()


class Authority:
    """Issues certificates into `folder`. wall: what it is when this is made, seconds since 1970."""

    def __init__(self, folder: Path, region: str, wall: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.region = region
        self._wall = wall
        self._clock = SystemClock()
        self._since = self._clock.now()
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ca_common_name_of(region))])
        certificate = (
            self._builder(self._name, self._key.public_key(), 0.0, 86400.0)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = folder / "ca.pem"
        self._pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
        self.certificate.write_text(self._pem)

    def issue(
        self,
        role: Role,
        name: str,
        *,
        begins_s: float = -3600.0,
        valid_s: float = 3600.0,
        region: str = "",
        uris: tuple[str, ...] | None = None,
    ) -> CertificateFiles:
        """A certificate from `begins_s` from now (an hour ago) until `valid_s` from now."""
        region = region or self.region
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(uri) for uri in (uris if uris is not None else (uri_of(region, role, name),))
        ]
        common_name = common_name_of(role, name)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else [])
        names += [
            x509.DNSName(dns_of(region, role, name)),
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.IPv4Address("127.0.0.1")),
        ]
        certificate = (
            self._builder(subject, key.public_key(), begins_s, valid_s)
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        stem = f"{role}-{name}-{certificate.serial_number % 10**8}"
        paths = self.folder / f"{stem}.pem", self.folder / f"{stem}.key", self.certificate
        files = CertificateFiles(*paths, issuer=self._pem)
        files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files.key.touch(0o600)
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files

    def certify(self, other: "Authority") -> str:
        """The other's key and name in a certificate (PEM) of this one."""
        return (
            self._builder(other._name, other._key.public_key(), 0.0, 86400.0)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
            .public_bytes(serialization.Encoding.PEM)
            .decode()
        )

    def _builder(
        self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey, start_s: float, end_s: float
    ) -> x509.CertificateBuilder:
        # Certificates know whole seconds: none ends before its time.
        now = _EPOCH + datetime.timedelta(seconds=math.ceil(self._wall + self._clock.now() - self._since))
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + datetime.timedelta(seconds=start_s) - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(seconds=end_s))
        )
