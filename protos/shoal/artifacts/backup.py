"""A backup: one self-describing tar file, which `tar` and `sha256sum -c SHA256SUMS` can read too.

    manifest.json             whose state, at which revision, how much of it
    records-00000.jsonl.gz    stored records: {"key": .., "value": base64} a line, in key order
    keys.sealed               keys of the CA, if a secret was given to seal them with
    models/<hex>              models and samples by SHA-256, where they were requested
    SHA256SUMS                of every member before; without it the file is truncated

The keys are sealed by AES-256-GCM under a key that scrypt derives from the secret. The digests of the manifest and of
all records are its associated data, so keys that open belong to exactly this state.
"""

import base64
import gzip
import hashlib
import io
import json
import re
import secrets
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import Wall

FORMAT: Final = 1
PART_BYTES: Final = 4 * 2**20
"""Limit of records in one member, before compression; a larger record has a member of its own."""
MEMBER_BYTES: Final = 256 * 2**20
"""Limit of any member but a model, when it is read."""
SECRET_BYTES: Final = 16
"""Least length of a secret that keys are sealed with."""
MANIFEST: Final = "manifest.json"
KEYS: Final = "keys.sealed"
SUMS: Final = "SHA256SUMS"
MODELS: Final = "models/"
_NAMES: Final = re.compile(r"manifest\.json|records-\d{5}\.jsonl\.gz|keys\.sealed|models/[0-9a-f]{64}|SHA256SUMS")
_SALT: Final = 16
_NONCE: Final = 12
_BLOCK: Final = tarfile.BLOCKSIZE


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a backup contains."""

    # region | federation
    role: str
    # Name of the region or federation.
    name: str
    # Store that it was taken from.
    store: str
    # Revision of the store that it was taken at.
    revision: int
    # When it was made.
    made_at: Wall
    # Version of Shoal that made it.
    version: str
    # Number of records.
    records: int
    # Size in bytes of each model and sample pack in the file, by its digest.
    models: Mapping[str, int]
    # True: the file contains the sealed keys.
    keys: bool
    # Version of the file format.
    format: int = FORMAT


Keyring = Mapping[str, bytes]
"""Files of a CA's folder, by their relative path."""


class BackupWriter:
    """Makes the members in order. The caller must write the bytes of each call as they come."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._digests: dict[str, str] = {}

    def head(self) -> bytes:
        content = json.dumps({**asdict(self._manifest), "models": dict(self._manifest.models)}, indent=1).encode()
        return self._member(MANIFEST, content + b"\n")

    def records(self, records: Iterable[tuple[str, bytes]]) -> Iterator[bytes]:
        lines, size, number = list[bytes](), 0, 0
        for key, value in records:
            line = json.dumps({"key": key, "value": base64.b64encode(value).decode()}).encode() + b"\n"
            if lines and size + len(line) > PART_BYTES:
                yield self._part(number, lines)
                lines, size, number = [], 0, number + 1
            lines.append(line)
            size += len(line)
        if lines:
            yield self._part(number, lines)

    def keys(self, keyring: Keyring, secret: bytes) -> bytes:
        """The member with the sealed keys; call it after all records."""
        plain = json.dumps({name: base64.b64encode(content).decode() for name, content in keyring.items()}).encode()
        salt, nonce = secrets.token_bytes(_SALT), secrets.token_bytes(_NONCE)
        sealed = AESGCM(_derive_key(secret, salt)).encrypt(nonce, plain, _associated_data(self._digests))
        return self._member(KEYS, salt + nonce + sealed)

    def model_head(self, digest: str) -> bytes:
        """Header of a model's member; the caller then writes the model's bytes and `padding`. The name contains the
        digest, which a reader compares."""
        name = MODELS + digest.removeprefix("sha256:")
        self._digests[name] = digest.removeprefix("sha256:")
        return self._header(name, self._manifest.models[digest])

    def padding(self, size: int) -> bytes:
        return bytes(-size % _BLOCK)

    def tail(self) -> bytes:
        sums = "".join(f"{digest}  {name}\n" for name, digest in self._digests.items())
        return self._member(SUMS, sums.encode()) + bytes(2 * _BLOCK)

    def _part(self, number: int, lines: list[bytes]) -> bytes:
        return self._member(f"records-{number:05}.jsonl.gz", gzip.compress(b"".join(lines), 6, mtime=0))

    def _member(self, name: str, content: bytes) -> bytes:
        self._digests[name] = hashlib.sha256(content).hexdigest()
        return self._header(name, len(content)) + content + self.padding(len(content))

    def _header(self, name: str, size: int) -> bytes:
        info = tarfile.TarInfo(name)
        info.size, info.mode, info.mtime = size, 0o600, int(self._manifest.made_at)
        return info.tobuf(tarfile.GNU_FORMAT)


@dataclass(frozen=True, slots=True)
class Backup:
    """A file that was read to its end and found complete."""

    path: Path
    manifest: Manifest
    # SHA-256 (hex) of each member, by its name.
    digests: Mapping[str, str]

    @classmethod
    def open(cls, path: Path, *, progress: Callable[[int], None] = lambda done: None) -> Self:
        """Reads the whole file.

        progress: called with the number of bytes of each step. Raises ShoalError(NOT_FOUND | STATE_CORRUPT |
        NOT_SUPPORTED_YET).
        """
        digests, told, count, manifest = dict[str, str](), "", 0, None
        try:
            with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as members:
                for member in members:
                    if told or not _NAMES.fullmatch(member.name) or not member.isreg() or member.name in digests:
                        raise _corrupt(path, f"member {member.name!r:.80}")
                    if member.name.startswith(MODELS):
                        digests[member.name] = _digest(members, member, progress)
                        continue
                    content = _content(path, members, member)
                    progress(len(content))
                    if member.name == SUMS:
                        told = content.decode("ascii")
                        continue
                    digests[member.name] = hashlib.sha256(content).hexdigest()
                    if member.name == MANIFEST:
                        manifest = _manifest(path, content)
                    elif member.name.startswith("records-"):
                        count += sum(1 for _ in _lines(path, content))
        except FileNotFoundError as cause:
            raise refuse(Code.NOT_FOUND, str(path), "a backup", "correct the path") from cause
        except (OSError, tarfile.TarError, ValueError) as cause:
            raise _corrupt(path, f"{type(cause).__name__}: {cause}") from cause
        if manifest is None or not told:
            raise _corrupt(path, "its end is missing" if digests else "it is no backup")
        if told != "".join(f"{digest}  {name}\n" for name, digest in digests.items()):
            raise _corrupt(path, "checksums differ")
        models = {f"sha256:{name.removeprefix(MODELS)}" for name in digests if name.startswith(MODELS)}
        if any(digest != name.removeprefix(MODELS) for name, digest in digests.items() if name.startswith(MODELS)):
            raise _corrupt(path, "a model is not the one of its name")
        if (count, models, KEYS in digests) != (manifest.records, set(manifest.models), manifest.keys):
            raise _corrupt(path, f"{count} records, {len(models)} models: not what its manifest says")
        return cls(path, manifest, digests)

    def records(self) -> Iterator[tuple[str, bytes]]:
        with tarfile.open(self.path, mode="r:") as members:
            for member in members:
                if member.name.startswith("records-"):
                    for line in _lines(self.path, _content(self.path, members, member)):
                        said = json.loads(line)
                        yield said["key"], base64.b64decode(said["value"])

    def model(self, digest: str, chunk_bytes: int) -> Iterator[bytes]:
        with tarfile.open(self.path, mode="r:") as members:
            content = members.extractfile(MODELS + digest.removeprefix("sha256:"))
            assert content is not None
            while chunk := content.read(chunk_bytes):
                yield chunk

    def keys(self, secret: bytes) -> Keyring:
        """Raises ShoalError(UNAUTHENTICATED) for a secret that the keys were not sealed with, or for keys of another
        state."""
        with tarfile.open(self.path, mode="r:") as members:
            sealed = _content(self.path, members, members.getmember(KEYS))
        salt, nonce, sealed = sealed[:_SALT], sealed[_SALT : _SALT + _NONCE], sealed[_SALT + _NONCE :]
        try:
            plain = AESGCM(_derive_key(secret, salt)).decrypt(nonce, sealed, _associated_data(self.digests))
        except (InvalidTag, ValueError) as cause:
            raise refuse(
                Code.UNAUTHENTICATED,
                f"the keys in {self.path.name} do not open",
                "the secret that they were sealed with",
                "give the file that the coordinator's --backup-key-file was",
            ) from cause
        return {name: base64.b64decode(content) for name, content in json.loads(plain).items()}


def read_secret(path: Path) -> bytes:
    """Raises ShoalError(FIELD_INVALID)."""
    try:
        content = path.read_bytes().strip()
        readable = path.stat().st_mode & 0o077
    except OSError as cause:
        raise refuse(
            Code.FIELD_INVALID, f"{path}: {cause.strerror}", "a file with a secret", "head -c 32 /dev/urandom | base64"
        ) from cause
    if readable:
        raise refuse(Code.FIELD_INVALID, f"{path}: others can read it", "mode 0600", f"chmod 600 {path}")
    if len(content) < SECRET_BYTES:
        raise refuse(
            Code.FIELD_INVALID,
            f"{path}: {len(content)} bytes",
            f"at least {SECRET_BYTES}",
            "head -c 32 /dev/urandom | base64",
        )
    return content


def _derive_key(secret: bytes, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, n=2**15, r=8, p=1).derive(secret)


def _associated_data(digests: Mapping[str, str]) -> bytes:
    of_state = {name: digest for name, digest in digests.items() if name == MANIFEST or name.startswith("records-")}
    return hashlib.sha256(json.dumps(of_state, sort_keys=True).encode()).digest()


def _manifest(path: Path, content: bytes) -> Manifest:
    said: dict[str, Any] = json.loads(content)
    if said.get("format") != FORMAT:
        raise refuse(
            Code.NOT_SUPPORTED_YET,
            f"{path.name}: format {said.get('format')!r:.20}, of shoal {said.get('version')!r:.40}",
            f"format {FORMAT}",
            "use the version of shoal that made it, or a later one",
        )
    if missing := {each.name for each in fields(Manifest)} - said.keys():
        raise _corrupt(path, f"its manifest lacks {', '.join(sorted(missing))}")
    return Manifest(**{each.name: said[each.name] for each in fields(Manifest)})


def _content(path: Path, members: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.size > MEMBER_BYTES:
        raise _corrupt(path, f"{member.name} of {member.size} bytes")
    content = members.extractfile(member)
    assert content is not None
    found = content.read()
    if len(found) != member.size:
        raise _corrupt(path, "its end is missing")
    return found


def _digest(members: tarfile.TarFile, member: tarfile.TarInfo, progress: Callable[[int], None]) -> str:
    content, digest = members.extractfile(member), hashlib.sha256()
    assert content is not None
    while chunk := content.read(2**20):
        digest.update(chunk)
        progress(len(chunk))
    return digest.hexdigest()


def _lines(path: Path, compressed: bytes) -> list[bytes]:
    """Decompresses no more than a member may hold, whatever the compressed size."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(compressed)) as file:
            content = file.read(MEMBER_BYTES + 1)
    except (OSError, EOFError, zlib.error) as cause:
        raise _corrupt(path, str(cause)) from cause
    if len(content) > MEMBER_BYTES:
        raise _corrupt(path, "records that grow too large")
    return content.splitlines()


def _corrupt(path: Path, found: str) -> ShoalError:
    return refuse(Code.STATE_CORRUPT, f"{path.name}: {found}", "a whole backup", "use another copy")
