"""`shoal model sign | verify | key`: a publisher's side of signed models. Nothing here needs a region."""

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import click
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from shoal.artifacts import signature_bundle as bundles
from shoal.cli.modelfiles import default_signature_path, files_of, model_name
from shoal.cli.options import output
from shoal.cli.render.output import emit, line
from shoal.cli.render.resources import when
from shoal.host.private_files import write_private
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.signature import PublisherKey, parse_key
from shoal.types.units import Wall

DIRECTORY_BYTES: Final = 16 * 2**20
"""Largest bundle over a directory of many files; such a bundle is only read here."""


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--key", "key_file", type=click.Path(path_type=Path), required=True, help="Your private key (PEM).")
@click.option("--name", default="", help="What counts as the same model. [default: the file's, without .onnx]")
@click.option(
    "--version", type=click.IntRange(1, bundles.MAX_VERSION), help="A region takes no older version after this one."
)
@click.option("--expires", type=click.DateTime(["%Y-%m-%d"]), help="The last day (UTC) on which it counts.")
@click.option("--ignore", multiple=True, metavar="PATH", help="Leave this out of a directory; repeatable.")
@click.option("--signature", "-s", type=click.Path(path_type=Path), help="[default: PATH.sig]")
def sign(
    path: Path,
    key_file: Path,
    name: str,
    version: int | None,
    expires: datetime | None,
    ignore: tuple[str, ...],
    signature: Path | None,
) -> None:
    """Sign a model's file (or directory) in the OpenSSF format. A passphrase comes as SHOAL_KEY_PASSPHRASE."""
    target = signature or default_signature_path(path)
    key = bundles.load_signing_key(_read(key_file, "a private key"), _passphrase())
    files = files_of(path, ignore, target)
    bundle = bundles.sign(
        key,
        path.resolve().name,
        files,
        model=name or model_name(path),
        version=version or 0,
        expires_at=None if expires is None else Wall((expires.replace(tzinfo=UTC) + timedelta(days=1)).timestamp()),
        ignored=ignore,
    )
    target.write_bytes(bundle)
    key_name = bundles.publisher_key("", key).fingerprint[:16]
    line(f"{target}  {len(files)} {'file' if len(files) == 1 else 'files'}, by key {key_name}")


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--key", "key_files", type=click.Path(path_type=Path), multiple=True, required=True,
    help="A public key (PEM) that may have made it; repeatable.",
)  # fmt: skip
@click.option("--signature", "-s", type=click.Path(path_type=Path), help="[default: PATH.sig]")
@click.option("--ignore-unsigned-files", is_flag=True, help="Files beside the signed ones are no reason to refuse.")
@output
def verify(
    path: Path, key_files: tuple[Path, ...], signature: Path | None, ignore_unsigned_files: bool, output: str
) -> None:
    """Verify a model's file or directory against its signature, here and now."""
    source = signature or default_signature_path(path)
    keys = [PublisherKey(file.stem, parse_key(_text(file))) for file in key_files]
    key, signed = bundles.verify(_read(source, "a signature"), keys, most=DIRECTORY_BYTES)
    present = {file.name: file.sha256 for file in files_of(path, signed.ignored, source)}
    bundles.check_files(signed, present, others_allowed=ignore_unsigned_files)
    if signed.expires_at is not None and time.time() >= signed.expires_at:  # noqa: TID251 - a command's own clock
        raise refuse(
            Code.SIGNATURE_EXPIRED, f"it ended {when(signed.expires_at)}", "one that counts now", "sign the model again"
        )
    if output in ("json", "yaml"):
        emit(
            {
                "key": key.name,
                "fingerprint": signed.fingerprint,
                "model": signed.model,
                "version": signed.version,
                "expires": when(signed.expires_at) if signed.expires_at else None,
                "files": {file.name: f"sha256:{file.sha256}" for file in signed.files},
            },
            output,
        )
    else:
        line(f"{path}  signed by {key.name} as {signed.model} version {signed.version or '-'}")


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--new", is_flag=True, help="Make a new private key (Ed25519) in FILE first.")
@click.option("--pem", is_flag=True, help="As PEM, for devices (`shoal-agent run --publisher-keys`) and other tools.")
def key(file: Path, new: bool, pem: bool) -> None:
    """Print the public key of FILE (a private or public key, PEM) as the Region's `keys` take it. With
    SHOAL_KEY_PASSPHRASE a new key is sealed, and a sealed one is opened."""
    if new:
        _make(file)
    content = _text(file)
    if "PRIVATE KEY" in content:
        private = bundles.load_signing_key(content.encode(), _passphrase())
        public = bundles.publisher_key(file.stem, private)
    else:
        public = PublisherKey(file.stem, parse_key(content))
    if pem:
        click.echo(public.pem, nl=False)
    else:
        click.echo(f"{{name: {model_name(file)}, key: {public.key}}}")


def _make(file: Path) -> None:
    if file.exists():
        raise refuse(Code.CONFLICT, f"{file} is there", "a new file", "choose another name, or leave --new out")
    passphrase = _passphrase()
    sealed = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    private = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, sealed
    )
    try:
        write_private(file, private)
    except OSError as cause:
        raise _unreachable(file, cause, "a place to write to") from cause


def _passphrase() -> bytes | None:
    return os.environ.get("SHOAL_KEY_PASSPHRASE", "").encode() or None


def _text(file: Path) -> str:
    try:
        return _read(file, "a key").decode()
    except UnicodeDecodeError as cause:
        raise refuse(Code.FIELD_INVALID, f"{file}: no text", "a key as PEM", "correct the path") from cause


def _read(file: Path, asked: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as cause:
        raise _unreachable(file, cause, f"{asked} that can be read") from cause


def _unreachable(file: Path, cause: OSError, asked: str) -> ShoalError:
    return refuse(Code.SOURCE_UNREACHABLE, f"{file}: {cause.strerror}", asked, "correct the path")
