"""Where a model to be pushed comes from: a file, a folder, a URL; with its external data, as the one file that a region
takes."""

import mmap
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from google.protobuf.message import DecodeError

from shoal.cli.render.output import note
from shoal.cli.render.progress import bytes_progress
from shoal.client.transfers import digest_of
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import show_bytes
from shoal.wire.limits import CHUNK_BYTES, MODEL_BYTES

CONNECT_S: Final = 30.0
"""Seconds without a byte after which a download is given up."""


@contextmanager
def model_file(source: str, digest: str) -> Iterator[Path]:
    """The model as one .onnx file, which may be gone afterwards.

    digest: sha256:HEX that it must have as it is found, before external data are put into it; empty: any. Raises
    ShoalError(SOURCE_UNREACHABLE | SOURCE_DENIED | MODEL_DIGEST | MODEL_TOO_LARGE | NOT_SUPPORTED_YET).
    """
    with tempfile.TemporaryDirectory(prefix="shoal-push-") as scratch:
        if source.startswith(("https://", "http://")):
            path = _download(source, Path(scratch), digest)
        else:
            path = _find(Path(source))
        if digest:
            _check(path, digest)
        yield _with_external_data(path, Path(scratch)) if _may_have_external_data(path) else path


def _find(path: Path) -> Path:
    if not path.is_dir():
        if not path.is_file():
            raise refuse(Code.SOURCE_UNREACHABLE, f"no file {path}", "an .onnx file, a folder with one, or a URL",
                         "correct the path")  # fmt: skip
        return path
    found = sorted(path.glob("*.onnx"))
    if len(found) != 1:
        said = (
            f"{len(found)} models in {path}: {', '.join(each.name for each in found[:5])}"
            if found
            else f"no .onnx in {path}"
        )
        raise refuse(Code.SOURCE_UNREACHABLE, said, "one .onnx file", "name the file")
    return found[0]


def _download(url: str, folder: Path, digest: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme == "http" and not digest:
        raise _without_tls(url)
    path = folder / (Path(unquote(parts.path)).name or "model.onnx")
    try:
        with urllib.request.urlopen(url, timeout=CONNECT_S) as answer, path.open("wb") as file:
            if answer.url.startswith("http:") and not digest:
                raise _without_tls(answer.url)
            size = int(answer.headers.get("Content-Length") or 0)
            _check_size(url, size)
            done = 0
            with bytes_progress(f"download {path.name}", size) as progress:
                while data := answer.read(CHUNK_BYTES):
                    done += len(data)
                    _check_size(url, done)
                    file.write(data)
                    progress(done, max(size, done))
    except (OSError, urllib.error.URLError, ValueError) as cause:
        why = getattr(cause, "reason", None) or cause
        raise refuse(
            Code.SOURCE_UNREACHABLE, f"{url}: {why}", "a model that can be fetched", "correct the URL"
        ) from cause
    return path


def _without_tls(url: str) -> ShoalError:
    return refuse(Code.SOURCE_DENIED, f"{url} without TLS", "https, or a digest that it has", "--digest sha256:..")


def _check_size(url: str, size: int) -> None:
    if size > MODEL_BYTES:
        raise refuse(Code.MODEL_TOO_LARGE, f"{url}: {show_bytes(size)}", f"at most {show_bytes(MODEL_BYTES)}",
                     "split the model")  # fmt: skip


def _check(path: Path, digest: str) -> None:
    found, _ = digest_of(path)
    if found != digest:
        raise refuse(Code.MODEL_DIGEST, f"{path.name} is {found}", digest, "get the model again, from who publishes it")


def _may_have_external_data(path: Path) -> bool:
    """Whether a tensor of it can lie in another file: those name it by the key `location`. Cheap, and may be wrong."""
    if path.stat().st_size == 0:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(b"location") >= 0


def _with_external_data(path: Path, folder: Path) -> Path:
    """One file with the tensors that lie in files beside it; the same file if there are none."""
    try:
        import onnx
    except ImportError:
        return path  # the region refuses it, and says why
    try:
        model = onnx.load(str(path), load_external_data=False)
        before = model.ByteSize()
        onnx.load_external_data_for_model(model, str(path.parent))
    except (OSError, ValueError, onnx.checker.ValidationError) as cause:
        raise refuse(
            Code.SOURCE_UNREACHABLE, f"external data of {path}: {cause}", f"the files that it names, in {path.parent}",
            "put them beside the model",
        ) from cause  # fmt: skip
    except DecodeError:
        return path  # no model: the region says what it is
    if model.ByteSize() == before:
        return path
    whole = folder / path.name
    whole.write_bytes(model.SerializeToString())
    note(f"{path.name} and its external data are one file of {show_bytes(whole.stat().st_size)} now")
    return whole
