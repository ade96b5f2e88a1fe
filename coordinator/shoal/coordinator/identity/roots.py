"""The region's CA keys on disk: the one that issues, and beside it, while one follows the other, its successor.

The first lies in `ca/`, each successor in `ca/2`, `ca/3`, ..; `ca/rotation.json` says which of them issues and which
are trusted, and is replaced as a whole, so that a rotation that was cut off goes on where it stood. A retired CA keeps
its certificate, by which a node that was away may still be recognised; its key is deleted.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import Seconds, Wall
from shoal.wire.enrol import key_pem, new_key
from shoal.wire.identity import BACKDATED_S, check_name
from shoal.wire.private import write_private
from shoal.wire.token import ca_fingerprint

CA_LIFETIME_S: Final = Seconds(10 * 365 * 86400.0)
FIRST: Final = "1"
_STATE: Final = "rotation.json"


@dataclass(frozen=True, slots=True)
class Root:
    """One CA. key: None once it is retired. cross: itself as its predecessor signed it, PEM, for those who trust only
    that one; empty for the first."""

    name: str
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey | None
    cross: bytes = b""

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def fingerprint(self) -> str:
        return ca_fingerprint(self.certificate)

    def issued(self, certificate: x509.Certificate) -> bool:
        try:
            certificate.verify_directly_issued_by(self.certificate)
        except (InvalidSignature, ValueError, TypeError):
            return False
        return True


@dataclass(frozen=True, slots=True)
class Roots:
    """trusted: by name, oldest first; two while a rotation is on. since: when the stage began."""

    folder: Path
    region: str
    known: tuple[Root, ...]
    issuing_name: str
    trusted: tuple[str, ...]
    since: Wall

    @classmethod
    def open(cls, folder: Path, region: str, *, wall: Wall, may_create: bool) -> Self:
        """Makes the first CA when there is none and `may_create`.

        A certificate is written last: without it nothing was ever issued, so a lone key is a start that was cut off.
        Raises ShoalError(STATE_CORRUPT) when files are unreadable, do not belong together, or are gone though the
        region is known.
        """
        if not (folder / "cert.pem").exists():
            if not may_create:
                raise _corrupt(
                    f"{folder.name}/cert.pem is gone", "restore ca/ from a copy; without it every node must enrol again"
                )
            key = new_key()
            _write(folder, Root(FIRST, _signed(region, key.public_key(), key, wall), key))
        state = _State.read(folder / _STATE)
        names = [FIRST, *sorted((f.parent.name for f in folder.glob("*/cert.pem")), key=_number)]
        known = tuple(_read(folder, name, region, keyless=name not in state.trusted) for name in names)
        if state.issuing not in names or not set(state.trusted) <= set(names):
            raise _corrupt("rotation.json names a CA that is gone", "restore ca/ from a copy")
        _forget(folder, (name for name in names if _number(name) < min(map(_number, state.trusted))))
        return cls(folder, region, known, state.issuing, state.trusted, Wall(state.since))

    @property
    def issuing(self) -> Root:
        return self._of(self.issuing_name)

    @property
    def trusting(self) -> tuple[Root, ...]:
        """The one that issues first."""
        return tuple(sorted(map(self._of, self.trusted), key=lambda root: root.name != self.issuing_name))

    @property
    def stage(self) -> str:
        """idle | trust (the successor is made known) | issue (it issues, and the old one is trusted still)."""
        if len(self.trusted) == 1:
            return "idle"
        return "issue" if self.issuing_name == self.trusted[-1] else "trust"

    def begun(self, wall: Wall) -> Self:
        """With a successor that is trusted and issues nothing yet. Blocking."""
        old = self.issuing
        key = new_key()
        name = str(max(_number(root.name) for root in self.known) + 1)
        certificate = _signed(self.region, key.public_key(), key, wall)
        root = Root(name, certificate, key, _crossed(self.region, key.public_key(), old, wall))
        _write(self.folder / name, root)
        return replace(self, known=(*self.known, root))._saved(old.name, (old.name, name), wall)

    def promoted(self, wall: Wall) -> Self:
        """The successor issues from now on. Blocking."""
        return self._saved(self.trusted[-1], self.trusted, wall)

    def retired(self, wall: Wall) -> Self:
        """The successor alone is trusted; the old key is gone. Blocking."""
        after = self._saved(self.issuing_name, (self.issuing_name,), wall)
        _forget(self.folder, (name for name in self.trusted if name != self.issuing_name))
        known = (root if root.name in after.trusted else replace(root, key=None) for root in self.known)
        return replace(after, known=tuple(known))

    def _saved(self, issuing: str, trusted: tuple[str, ...], wall: Wall) -> Self:
        write_private(self.folder / _STATE, json.dumps(asdict(_State(issuing, trusted, wall))).encode())
        return replace(self, issuing_name=issuing, trusted=trusted, since=wall)

    def _of(self, name: str) -> Root:
        return next(root for root in self.known if root.name == name)


@dataclass(frozen=True, slots=True)
class _State:
    issuing: str
    trusted: tuple[str, ...]
    since: float

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            data = json.loads(path.read_text())
            return cls(str(data["issuing"]), tuple(map(str, data["trusted"])), float(data["since"]))
        except FileNotFoundError:
            return cls(FIRST, (FIRST,), 0.0)
        except (OSError, ValueError, KeyError, TypeError) as cause:
            raise _corrupt(f"{path.name} cannot be read", "restore ca/ from a copy") from cause


def moment(wall: float) -> datetime:
    return datetime.fromtimestamp(wall, UTC)


def key_usage(*, signs: bool) -> x509.KeyUsage:
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


def joined(roots: Iterable[Root]) -> bytes:
    return b"".join(root.pem for root in roots)


def _number(name: str) -> int:
    return int(name) if name.isdigit() else 0


def _place(folder: Path, name: str) -> Path:
    return folder if name == FIRST else folder / name


def _forget(folder: Path, retired: Iterable[str]) -> None:
    """Their keys; at an open also those of a retirement that was cut off."""
    for name in retired:
        (_place(folder, name) / "key.pem").unlink(missing_ok=True)


def _write(folder: Path, root: Root) -> None:
    assert root.key is not None
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(folder / "key.pem", key_pem(root.key))
    if root.cross:
        write_private(folder / "cross.pem", root.cross)
    write_private(folder / "cert.pem", root.pem)


def _read(folder: Path, name: str, region: str, *, keyless: bool) -> Root:
    place = _place(folder, name)
    remedy = "restore ca/ from a copy"
    try:
        certificate = x509.load_pem_x509_certificate((place / "cert.pem").read_bytes())
        cross = (place / "cross.pem").read_bytes() if (place / "cross.pem").exists() else b""
        content = None if keyless else (place / "key.pem").read_bytes()
        key = None if content is None else serialization.load_pem_private_key(content, password=None)
    except (OSError, ValueError, TypeError) as cause:
        raise _corrupt(f"the CA's files cannot be read: {type(cause).__name__}", remedy) from cause
    if certificate.subject != _ca_name(region):
        raise _corrupt("the CA is another region's", f"start with the data directory of {region}")
    if key is None:
        return Root(name, certificate, None, cross)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise _corrupt("the CA's key is not the one of its certificate", remedy)
    return Root(name, certificate, key, cross)


def _signed(
    region: str,
    key: ec.EllipticCurvePublicKey,
    by: ec.EllipticCurvePrivateKey,
    wall: Wall,
    *,
    ends: datetime | None = None,
    path_length: int = 1,
) -> x509.Certificate:
    """path_length 1: room for a successor that it signs."""
    check_name(region, "region")
    latest = moment(wall + CA_LIFETIME_S)
    return (
        x509.CertificateBuilder()
        .subject_name(_ca_name(region))
        .issuer_name(_ca_name(region))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(moment(wall - BACKDATED_S))
        .not_valid_after(min(latest, ends) if ends is not None else latest)
        .add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True)
        .add_extension(key_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False)
        .sign(by, hashes.SHA256())
    )


def _crossed(region: str, key: ec.EllipticCurvePublicKey, by: Root, wall: Wall) -> bytes:
    """Empty where the older CA's certificate leaves no room for another beneath it."""
    room = by.certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length
    if by.key is None or room == 0:
        return b""
    ends = by.certificate.not_valid_after_utc
    cross = _signed(region, key, by.key, wall, ends=ends, path_length=0)
    return cross.public_bytes(serialization.Encoding.PEM)


def _ca_name(region: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Shoal region {region}")])


def _corrupt(found: str, remedy: str) -> ShoalError:
    return refuse(Code.STATE_CORRUPT, found, "the region's CA", remedy)
