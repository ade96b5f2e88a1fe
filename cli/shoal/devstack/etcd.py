"""The host's etcd in a local federation: a cluster of three that holds the state of all its coordinators."""

import datetime
import ipaddress
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shoal.devstack.layout import ETCD, MEMBER_HOST, RELAY_HOST, StackLayout, StackMember
from shoal.host.private_files import write_private
from shoal.types.codes import Code, refuse
from shoal.wire.enrol import key_pem, new_key
from shoal.wire.identity import store_user_of

FILES: Final = ETCD
"""Folder of the cluster's certificates, within the stack's folder."""
AUTHORITY: Final = "authority"
MEMBER: Final = "member"
ROOT: Final = "root"
"""Folders in `FILES`, one per user of the files: the CA, etcd's members, its administrator. Beside them each region and
federation has one, named after its etcd user."""
MEMBER_NAME: Final = "member-etcd"
"""Common name of the members' certificate, the only one that members accept from each other."""
_YEARS: Final = datetime.timedelta(days=3650)
_CLOCK_SKEW: Final = datetime.timedelta(hours=1)


def require() -> str:
    """Path of etcd. Raises ShoalError(NOT_FOUND) if it is not installed."""
    found = shutil.which("etcd")
    if found is None:
        raise refuse(
            Code.NOT_FOUND,
            "etcd is not on this machine",
            "etcd 3.4 or newer",
            "install it (Debian, Ubuntu: apt-get install etcd-server), or leave out --store etcd",
        )
    return found


def prepare(
    folder: Path, now: datetime.datetime, scopes: Sequence[str], hosts: Sequence[str] = (MEMBER_HOST, RELAY_HOST)
) -> Path:
    """Make the cluster's CA and the certificates of members, administrator and scopes, as far as they are missing;
    return their folder.

    A scope's certificate is not accepted as a member's. scopes: `region/NAME`, `federation/NAME`. hosts: names by which
    members are dialled, in addition to localhost.
    """
    files = folder / FILES
    authority = _Authority.load_or_make(files / AUTHORITY, now)
    authority.certify(files / MEMBER, MEMBER_NAME, "member-", ("localhost", *hosts))
    for name in (ROOT, *map(store_user_of, scopes)):
        authority.certify(files / name, name)
    return files


@dataclass(frozen=True, slots=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    now: datetime.datetime

    @classmethod
    def load_or_make(cls, folder: Path, now: datetime.datetime) -> "_Authority":
        """Load the CA from `folder`, or make it there."""
        certificate, key = folder / "ca.pem", folder / "ca-key.pem"
        if key.exists():
            held = serialization.load_pem_private_key(key.read_bytes(), None)
            assert isinstance(held, ec.EllipticCurvePrivateKey), "we made it"
            return cls(x509.load_pem_x509_certificate(certificate.read_bytes()), held, now)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh, name = new_key(), _name("Shoal local etcd")
        is_ca = x509.BasicConstraints(ca=True, path_length=None)
        made = _builder(name, name, fresh, now).add_extension(is_ca, critical=True).sign(fresh, hashes.SHA256())
        write_private(certificate, made.public_bytes(serialization.Encoding.PEM))
        write_private(key, key_pem(fresh))
        return cls(made, fresh, now)

    def certify(self, folder: Path, name: str, stem: str = "", hosts: Sequence[str] = ()) -> None:
        """Write the CA's certificate, a certificate and its key to `folder`; keep files that this CA issued.

        hosts: of a server, which is also a client of its peers; without hosts the certificate is for clients only.
        """
        ca, key = self.certificate.public_bytes(serialization.Encoding.PEM), folder / f"{stem}key.pem"
        if key.exists() and (folder / "ca.pem").read_bytes() == ca:
            return
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = new_key()
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *((ExtendedKeyUsageOID.SERVER_AUTH,) if hosts else ())]
        builder = (
            _builder(_name(name), self.certificate.subject, fresh, self.now)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([*map(_host, hosts)]), critical=False)
        made = builder.sign(self.key, hashes.SHA256())
        key.unlink(missing_ok=True)  # of another CA; without the key the set counts as incomplete
        write_private(folder / "ca.pem", ca)
        write_private(folder / f"{stem}cert.pem", made.public_bytes(serialization.Encoding.PEM))
        write_private(key, key_pem(fresh))


def command(folder: Path, stack: StackLayout, member: StackMember) -> list[str]:
    """Command line of one member. Members reach each other through the relays."""
    files = folder / FILES / MEMBER
    ca, certificate, key = (str(files / name) for name in ("ca.pem", "member-cert.pem", "member-key.pem"))
    urls = {use: f"https://{address}" for use, address in member.addresses.items()}
    client, peer = (f"https://{stack.dial_address(member.addresses[use])}" for use in ("client", "peer"))
    cluster = ",".join(f"{each.name}=https://{stack.dial_address(each.addresses['peer'])}" for each in stack.etcd)
    return [
        require(), "--name", member.name, "--data-dir", str(folder / member.name), "--logger", "zap",
        "--listen-client-urls", urls["client"], "--advertise-client-urls", client,
        "--listen-peer-urls", urls["peer"], "--initial-advertise-peer-urls", peer,
        "--initial-cluster", cluster, "--initial-cluster-token", str(folder),
        "--client-cert-auth", "--trusted-ca-file", ca, "--cert-file", certificate, "--key-file", key,
        "--peer-client-cert-auth", "--peer-trusted-ca-file", ca, "--peer-cert-allowed-cn", MEMBER_NAME,
        "--peer-cert-file", certificate, "--peer-key-file", key,
        "--max-txn-ops", "10240", "--max-request-bytes", "10485760",
    ]  # fmt: skip


def scope_of(member: StackMember) -> str:
    """Part of the store that a coordinator or federation replica keeps its state in."""
    return f"{'region' if member.role == 'coordinator' else member.role}/{member.region}"


def scopes_of(stack: StackLayout) -> tuple[str, ...]:
    """Every part of the store that members use, once each."""
    return tuple(dict.fromkeys(scope_of(each) for each in (*stack.federation, *stack.coordinators)))


def flags(folder: Path, stack: StackLayout, user: str) -> list[str]:
    """Flags of a program that connects as `user`."""
    files = folder / FILES / user
    endpoints = ",".join(stack.dial_address(each.addresses["client"]) for each in stack.etcd)
    return [
        "--etcd-endpoints", endpoints, "--etcd-ca", str(files / "ca.pem"),
        "--etcd-cert", str(files / "cert.pem"), "--etcd-key", str(files / "key.pem"),
    ]  # fmt: skip


def store_flags(folder: Path, stack: StackLayout, member: StackMember) -> list[str]:
    """Flags of a coordinator whose store is etcd; none for SQLite."""
    return ["--store", "etcd", *flags(folder, stack, store_user_of(scope_of(member)))] if stack.etcd else []


def users_command(folder: Path, stack: StackLayout) -> list[str]:
    """Arguments of `shoal-coordinator` that give each region and federation access to its own part only."""
    scopes = [each for scope in scopes_of(stack) for each in ("--scope", scope)]
    return ["etcd-users", *scopes, *flags(folder, stack, ROOT)]


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _YEARS)
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
