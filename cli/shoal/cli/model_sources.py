"""Where a model to be pushed comes from: a file, a folder, a URL, an OCI registry, a model hub; with its external data,
as the one file that a region takes."""

import mmap
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from google.protobuf.message import DecodeError

from shoal.cli import hub, oci
from shoal.cli.downloads import ExpectedFile, WebRequest, check_digest, open_url, save
from shoal.cli.render.output import note
from shoal.client.transfers import digest_of
from shoal.types.codes import Code, refuse
from shoal.types.units import show_bytes

if TYPE_CHECKING:
    import onnx

FORMS: Final = "FILE|FOLDER|URL|oci://..|hf://.."

FetchBeside = Callable[[Sequence[str]], None]
"""Puts the files of these paths, relative to the model, beside it."""


@contextmanager
def model_file(source: str, digest: str) -> Iterator[Path]:
    """The model as one .onnx file, which may be gone afterwards.

    digest: sha256:HEX that it must have as it is found, before external data are put into it; empty: any.

    Raises ShoalError(SOURCE_UNREACHABLE | SOURCE_DENIED | MODEL_DIGEST | MODEL_INVALID | MODEL_TOO_LARGE | MODEL_PATH |
    USAGE).
    """
    with tempfile.TemporaryDirectory(prefix="shoal-push-") as scratch:
        path, fetch_beside = _locate(source, digest, Path(scratch))
        if not path.stat().st_size:
            raise refuse(Code.MODEL_INVALID, f"{path} is empty", "an ONNX model", "get the file again")
        yield _with_external_data(path, Path(scratch), fetch_beside) if _may_have_external_data(path) else path


def _locate(source: str, digest: str, scratch: Path) -> tuple[Path, FetchBeside]:
    if source.startswith(("https://", "http://")):
        return _download(source, scratch, digest), lambda _: None
    if source.startswith(oci.SCHEME):
        artifact = oci.ArtifactSource(oci.parse_reference(source), scratch)
        return artifact.model(digest), artifact.fetch_beside
    if source.startswith(hub.SCHEME):
        repository = hub.HubSource(hub.parse_reference(source), scratch)
        return repository.model(digest), repository.fetch_beside
    scheme, is_url, _ = source.partition("://")
    if is_url and not Path(source).exists():
        raise refuse(
            Code.USAGE, f"{scheme:.40}:// as a model's source", FORMS, "fetch the file, then shoal model push FILE"
        )  # fmt: skip
    path = _find(Path(source))
    if digest:
        check_digest(path.name, digest_of(path)[0], digest)
    return path, lambda _: None


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
    path = folder / (Path(unquote(urlsplit(url).path)).name or "model.onnx")
    with open_url(WebRequest(url, lambda host: bool(digest))) as answer:
        save(answer, path, ExpectedFile(path.name, digest=digest))
    return path


def _may_have_external_data(path: Path) -> bool:
    """Whether a tensor of it can lie in another file: those name it by the key `location`. Cheap, and may be wrong."""
    if path.stat().st_size == 0:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(b"location") >= 0


def _external_locations(model: "onnx.ModelProto") -> list[str]:
    """Paths that tensors of it name, each once. Exporters move initializers of the main graph out, nothing else."""
    return list(
        dict.fromkeys(
            entry.value
            for tensor in model.graph.initializer
            for entry in tensor.external_data
            if entry.key == "location"
        )
    )


def _with_external_data(path: Path, folder: Path, fetch_beside: FetchBeside) -> Path:
    """One file with the tensors that lie in files beside it; the same file if there are none."""
    try:
        import onnx
    except ImportError:
        return path  # the region refuses it, and says why
    try:
        model = onnx.load(str(path), load_external_data=False)
        before = model.ByteSize()
        fetch_beside(_external_locations(model))
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
