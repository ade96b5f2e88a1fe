"""The host's etcd as a part of a local federation: a cluster of three, where all its coordinators keep their state."""

import datetime
import ipaddress
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal.devstack.layout import ETCD, HERE, ROAD, Member, Stack, road
from shoal.types.codes import Code, refuse
from shoal.wire.enrol import key_pem, new_key
from shoal.wire.private import write_private

FILES: Final = ETCD
"""Folder of the cluster's certificates, in the stack's."""
_YEARS: Final = datetime.timedelta(days=3650)
_CLOCKS_DIFFER: Final = datetime.timedelta(hours=1)


def require() -> str:
    """Its path. Raises ShoalError(NOT_FOUND) where etcd is not installed."""
    found = shutil.which("etcd")
    if found is None:
        raise refuse(
            Code.NOT_FOUND,
            "etcd is not on this machine",
            "etcd 3.4 or newer",
            "install it (Debian, Ubuntu: apt-get install etcd-server), or leave out --store etcd",
        )
    return found


def prepare(folder: Path, now: datetime.datetime, hosts: Sequence[str] = (HERE, ROAD)) -> None:
    """A CA of the cluster's own and a certificate for its members and one for coordinators, once. hosts: by which the
    members are dialled, localhost besides."""
    files = folder / FILES
    if (files / "key.pem").exists():
        return
    files.mkdir(parents=True, exist_ok=True, mode=0o700)
    ca_key, ca_name = new_key(), _name("Shoal local etcd")
    ca = _signed(ca_name, ca_name, ca_key.public_key(), ca_key, now)
    write_private(files / "ca.pem", ca.public_bytes(serialization.Encoding.PEM))
    for stem in ("member-", ""):
        key = new_key()
        certificate = _signed(_name(f"{stem}etcd"), ca_name, key.public_key(), ca_key, now, ("localhost", *hosts))
        write_private(files / f"{stem}cert.pem", certificate.public_bytes(serialization.Encoding.PEM))
        write_private(files / f"{stem}key.pem", key_pem(key))


def command(folder: Path, stack: Stack, member: Member) -> list[str]:
    """Of one member. They reach each other by road."""
    files = folder / FILES
    ca, certificate, key = (str(files / name) for name in ("ca.pem", "member-cert.pem", "member-key.pem"))
    urls = {use: f"https://{address}" for use, address in member.addresses.items()}
    cluster = ",".join(f"{each.name}=https://{road(each.addresses['peer'])}" for each in stack.etcd)
    return [
        require(), "--name", member.name, "--data-dir", str(folder / member.name), "--logger", "zap",
        "--listen-client-urls", urls["client"], "--advertise-client-urls", f"https://{road(member.addresses['client'])}",
        "--listen-peer-urls", urls["peer"], "--initial-advertise-peer-urls", f"https://{road(member.addresses['peer'])}",
        "--initial-cluster", cluster, "--initial-cluster-token", str(folder),
        "--client-cert-auth", "--trusted-ca-file", ca, "--cert-file", certificate, "--key-file", key,
        "--peer-client-cert-auth", "--peer-trusted-ca-file", ca,
        "--peer-cert-file", certificate, "--peer-key-file", key,
        "--max-txn-ops", "10240", "--max-request-bytes", "10485760",
    ]  # fmt: skip


def flags(folder: Path, stack: Stack) -> list[str]:
    """Of a coordinator whose store it is; none where it is not."""
    if not stack.etcd:
        return []
    files = folder / FILES
    endpoints = ",".join(road(each.addresses["client"]) for each in stack.etcd)
    return [
        "--store", "etcd", "--etcd-endpoints", endpoints, "--etcd-ca", str(files / "ca.pem"),
        "--etcd-cert", str(files / "cert.pem"), "--etcd-key", str(files / "key.pem"),
    ]  # fmt: skip


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    by: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    hosts: Sequence[str] = (),
) -> x509.Certificate:
    """hosts: none for a CA."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + _YEARS)
        .add_extension(x509.BasicConstraints(ca=not hosts, path_length=None), critical=True)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([*map(_host, hosts)]), critical=False)
    return builder.sign(by, hashes.SHA256())


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
