"""The region's CA keys on disk: the issuing CA and, during a rotation, its successor.

The first CA lies in `ca/`, each successor in `ca/2`, `ca/3`, ... `ca/rotation.json` says which CA issues and which are
trusted. It is replaced atomically, so an interrupted rotation resumes at its stage. A retired CA keeps its certificate,
so that a node that was away can still be recognised; its key is deleted.
"""

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal.host.private_files import write_private
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.identity import check_name
from shoal.types.units import Seconds, Wall
from shoal.wire.certificates import ca_fingerprint
from shoal.wire.enrol import key_pem, new_key
from shoal.wire.identity import BACKDATED_S, ca_common_name_of
from shoal.wire.trust import has_known_issuer

CA_LIFETIME_S: Final = Seconds(10 * 365 * 86400.0)
FIRST: Final = "1"
_STATE: Final = "rotation.json"
_MIN_STEP_S: Final = 0.001
"""Between the beginnings of two stages, at least. A float of seconds since 1970 resolves less than a microsecond."""


@dataclass(frozen=True, slots=True)
class Root:
    """One CA."""

    # "1" for the first CA, the next number for each successor.
    name: str
    certificate: x509.Certificate
    # None once the CA is retired.
    key: ec.EllipticCurvePrivateKey | None
    # This CA's certificate as signed by its predecessor, PEM, for peers that trust only the predecessor. Empty for the
    # first CA, and if the predecessor's path length left no room.
    cross_pem: bytes = b""

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def fingerprint(self) -> str:
        return ca_fingerprint(self.certificate)

    def is_issuer_of(self, certificate: x509.Certificate) -> bool:
        return has_known_issuer(certificate, (self.certificate,))


@dataclass(frozen=True, slots=True)
class Roots:
    """All CAs of a region and the stage of their rotation; methods that change it return a new value."""

    # Folder of the first CA (`ca/`), in which the others are subfolders.
    folder: Path
    # Name of the region, part of each CA's subject.
    region: str
    # Every CA, retired ones included, oldest first.
    all_roots: tuple[Root, ...]
    # Name of the CA that issues certificates.
    issuing_name: str
    # Names of the trusted CAs, oldest first; two during a rotation.
    trusted_names: tuple[str, ...]
    # Wall time at which the current stage began; 0 before the first rotation.
    since: Wall

    @classmethod
    def open(cls, folder: Path, region: str, *, wall: Wall, may_create: bool) -> Self:
        """Reads the CAs. Creates the first one if there is none and `may_create`.

        A CA's certificate is written last: without it nothing was ever issued, so a key alone is an interrupted first
        start. Raises ShoalError(STATE_CORRUPT) if files are unreadable, do not belong together, or are gone although
        the region is known.
        """
        if not (folder / "cert.pem").exists():
            if not may_create:
                raise _corrupt(
                    f"{folder.name}/cert.pem is gone", "restore ca/ from a copy; without it every node must enrol again"
                )
            key = new_key()
            _write(folder, Root(FIRST, _sign_certificate(region, key.public_key(), key, wall), key))
        state = _State.read(folder / _STATE)
        names = [FIRST, *sorted((f.parent.name for f in folder.glob("*/cert.pem")), key=_number)]
        known = tuple(_read(folder, name, region, keyless=name not in state.trusted) for name in names)
        if state.issuing not in names or not set(state.trusted) <= set(names):
            raise _corrupt("rotation.json names a CA that is gone", "restore ca/ from a copy")
        _forget(folder, (name for name in names if _number(name) < min(map(_number, state.trusted))))
        return cls(folder, region, known, state.issuing, state.trusted, Wall(state.since))

    @property
    def issuing(self) -> Root:
        return self._find(self.issuing_name)

    @property
    def trusted_roots(self) -> tuple[Root, ...]:
        """The trusted CAs, the issuing one first."""
        return tuple(sorted(map(self._find, self.trusted_names), key=lambda root: root.name != self.issuing_name))

    @property
    def stage(self) -> str:
        """idle | trust (the successor is published but does not issue) | issue (it issues; the old CA is still
        trusted)."""
        if len(self.trusted_names) == 1:
            return "idle"
        return "issue" if self.issuing_name == self.trusted_names[-1] else "trust"

    def reload(self) -> Self:
        """The CAs as another process of the same folder left them. Blocking. Raises as `open`."""
        state = _State.read(self.folder / _STATE)
        if self._is_current(state):
            return self
        return self.open(self.folder, self.region, wall=Wall(state.since), may_create=False)

    def begin(self, wall: Wall) -> Self:
        """Adds a successor that is trusted but does not issue yet. Blocking. Raises ShoalError(CONFLICT) where another
        process changes the CAs."""
        old = self.issuing
        key = new_key()
        name = _make_folder(self.folder)
        certificate = _sign_certificate(self.region, key.public_key(), key, wall)
        root = Root(name, certificate, key, _cross_sign(self.region, key.public_key(), old, wall))
        _write(self.folder / name, root)
        try:
            return replace(self, all_roots=(*self.all_roots, root))._save(old.name, (old.name, name), wall)
        except ShoalError:
            shutil.rmtree(self.folder / name)
            raise

    def promote(self, wall: Wall) -> Self:
        """Makes the successor the issuing CA. Blocking. Raises as `begin`."""
        return self._save(self.trusted_names[-1], self.trusted_names, wall)

    def retire(self, wall: Wall) -> Self:
        """Trusts only the successor and deletes the old key. Blocking. Raises as `begin`."""
        after = self._save(self.issuing_name, (self.issuing_name,), wall)
        _forget(self.folder, (name for name in self.trusted_names if name != self.issuing_name))
        known = (root if root.name in after.trusted_names else replace(root, key=None) for root in self.all_roots)
        return replace(after, all_roots=tuple(known))

    def _save(self, issuing: str, trusted: tuple[str, ...], wall: Wall) -> Self:
        """Time moves on with each stage, whatever the clock says: members of a federation take the newest roots.

        Another process of the same folder may have begun a change while this one was paused or its disk was slow: what
        it wrote stays.
        """
        if not self._is_current(_State.read(self.folder / _STATE)):
            raise _overtaken()
        wall = Wall(max(wall, self.since + _MIN_STEP_S))
        write_private(self.folder / _STATE, json.dumps(asdict(_State(issuing, trusted, wall))).encode())
        return replace(self, issuing_name=issuing, trusted_names=trusted, since=wall)

    def _is_current(self, state: "_State") -> bool:
        return (state.issuing, state.trusted, state.since) == (self.issuing_name, self.trusted_names, self.since)

    def _find(self, name: str) -> Root:
        return next(root for root in self.all_roots if root.name == name)


@dataclass(frozen=True, slots=True)
class _State:
    """The content of `rotation.json`."""

    # Name of the issuing CA.
    issuing: str
    # Names of the trusted CAs, oldest first.
    trusted: tuple[str, ...]
    # Wall time at which the stage began; 0 before the first rotation.
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


def to_datetime(wall: float) -> datetime:
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


def bundle_pem(roots: Iterable[Root]) -> bytes:
    return b"".join(root.pem for root in roots)


def _number(name: str) -> int:
    return int(name) if name.isdigit() else 0


def _folder_of(folder: Path, name: str) -> Path:
    return folder if name == FIRST else folder / name


def _forget(folder: Path, retired: Iterable[str]) -> None:
    """Deletes the keys of retired CAs; at `open` this also completes an interrupted retirement."""
    for name in retired:
        (_folder_of(folder, name) / "key.pem").unlink(missing_ok=True)


def _make_folder(folder: Path) -> str:
    """Makes a folder for the next CA, for this process alone; returns its name. The folder of one that was cut off
    stays, since its writer may only be slow. Raises ShoalError(CONFLICT)."""
    newest = max((_number(each.name) for each in folder.iterdir() if each.is_dir()), default=0)
    name = str(max(newest, _number(FIRST)) + 1)
    try:
        (folder / name).mkdir(mode=0o700)
    except FileExistsError as cause:
        raise _overtaken() from cause
    return name


def _write(folder: Path, root: Root) -> None:
    assert root.key is not None
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(folder / "key.pem", key_pem(root.key))
    if root.cross_pem:
        write_private(folder / "cross.pem", root.cross_pem)
    write_private(folder / "cert.pem", root.pem)


def _read(folder: Path, name: str, region: str, *, keyless: bool) -> Root:
    place = _folder_of(folder, name)
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


def _sign_certificate(
    region: str,
    key: ec.EllipticCurvePublicKey,
    by: ec.EllipticCurvePrivateKey,
    wall: Wall,
    *,
    ends: datetime | None = None,
    path_length: int = 1,
) -> x509.Certificate:
    """A CA certificate. A path_length of 1 leaves room for a successor that it cross-signs."""
    check_name(region, "region")
    latest = to_datetime(wall + CA_LIFETIME_S)
    return (
        x509.CertificateBuilder()
        .subject_name(_ca_name(region))
        .issuer_name(_ca_name(region))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(to_datetime(wall - BACKDATED_S))
        .not_valid_after(min(latest, ends) if ends is not None else latest)
        .add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True)
        .add_extension(key_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False)
        .sign(by, hashes.SHA256())
    )


def _cross_sign(region: str, key: ec.EllipticCurvePublicKey, by: Root, wall: Wall) -> bytes:
    """The successor's certificate signed by the older CA. Empty if the older CA's path length leaves no room beneath
    it."""
    room = by.certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length
    if by.key is None or room == 0:
        return b""
    ends = by.certificate.not_valid_after_utc
    cross = _sign_certificate(region, key, by.key, wall, ends=ends, path_length=0)
    return cross.public_bytes(serialization.Encoding.PEM)


def _ca_name(region: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ca_common_name_of(region))])


def _overtaken() -> ShoalError:
    found = "another process that changes the CA"
    return refuse(Code.CONFLICT, found, "one change at a time", "look at it: shoal ca status")


def _corrupt(found: str, remedy: str) -> ShoalError:
    return refuse(Code.STATE_CORRUPT, found, "the region's CA", remedy)
