"""A model as files: its name, the signature beside it, and which files a publisher signs."""

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from shoal.artifacts import signature_bundle as bundles
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.signature import SignedFile

SUFFIX: Final = ".sig"


def model_name(path: Path) -> str:
    """A valid model name made from a file's or directory's name."""
    stem = path.resolve().name if path.is_dir() else path.stem
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:63].rstrip("-")


def default_signature_path(path: Path) -> Path:
    """Where the signature of a model's file or directory is by default."""
    return path.with_name(f"{path.name}{SUFFIX}")


def signature_of(path: Path, given: Path | None) -> bytes:
    """The signature to send with a model: the given one, else the one beside it, else none.

    Raises ShoalError(SOURCE_UNREACHABLE).
    """
    source = given or default_signature_path(path)
    if given is None and not source.is_file():
        return b""
    try:
        return source.read_bytes()
    except OSError as cause:
        raise refuse(
            Code.SOURCE_UNREACHABLE, f"{source}: {cause.strerror}", "a signature that can be read", "correct the path"
        ) from cause


def files_of(path: Path, excluded: Sequence[str], signature: Path) -> tuple[SignedFile, ...]:
    """Every regular file of a model: the file itself, or all beneath a directory except `excluded` and the signature.

    excluded: paths relative to the directory. Raises ShoalError(SOURCE_UNREACHABLE | MODEL_PATH).
    """
    try:
        if not path.is_dir():
            return (SignedFile(path.name, _digest(path)),)
        found = tuple(
            SignedFile(name, _digest(file))
            for file in _walk(path)
            if not bundles.is_ignored(name := file.relative_to(path).as_posix(), (*bundles.DEFAULT_IGNORED, *excluded))
            and file.resolve() != signature.resolve()
        )
    except OSError as cause:
        raise refuse(
            Code.SOURCE_UNREACHABLE,
            f"{cause.filename}: {cause.strerror}",
            "a model that can be read",
            "correct the path",
        ) from cause
    if not found:
        raise refuse(Code.SOURCE_UNREACHABLE, f"{path}: no file", "a model of at least one file", "correct the path")
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry)
        else:
            yield entry


def _digest(path: Path) -> str:
    """Digest of a regular file that is not a link. Raises OSError, ShoalError(MODEL_PATH)."""
    if path.is_symlink():
        raise _not_a_plain_file(path, "a link")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _not_a_plain_file(path, "no regular file")
        return hashlib.file_digest(file, "sha256").hexdigest()


def _not_a_plain_file(path: Path, found: str) -> ShoalError:
    return refuse(Code.MODEL_PATH, f"{path}: {found}", "plain files alone", "remove it, or leave it out (--ignore)")
