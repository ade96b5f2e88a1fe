"""Files for plan and apply: read, checked offline, local models found and pushed by digest."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.cli.modelfiles import signature_of
from shoal.cli.render.progress import bytes_progress
from shoal.client import Region
from shoal.client.region import digest_of
from shoal.policies import Problem, Workload, load
from shoal.types.codes import Code, refuse
from shoal.v1 import operator_pb2

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Bundle:
    """documents as sent; sources: model source as written -> file here. samples: as written -> file here, and the
    models (as written) that they are for."""

    documents: tuple[operator_pb2.Document, ...]
    problems: tuple[Problem, ...]
    sources: dict[str, Path]
    samples: dict[str, tuple[Path, tuple[str, ...]]]


def read(paths: Sequence[str]) -> Bundle:
    """All documents of files and folders. Raises ShoalError(SOURCE_UNREACHABLE)."""
    files = [file for path in paths for file in _expand(Path(path))]
    texts = [(str(file), _text(file)) for file in files]
    loaded = load(texts)
    sources: dict[str, Path] = {}
    samples: dict[str, tuple[Path, tuple[str, ...]]] = {}
    for document in loaded.documents:
        if isinstance(document.value, Workload):
            folder = Path(document.text).parent
            model = document.value.spec.model
            models = (model.source, *(variant.source for variant in model.variants))
            for source in models:
                if _is_path(source):
                    sources[source] = folder / source
            if model.samples is not None and _is_path(model.samples):
                before = samples.get(model.samples, (folder, ()))[1]
                samples[model.samples] = folder / model.samples, tuple(dict.fromkeys((*before, *models)))
    if files and not loaded.documents and not loaded.problems:
        raise refuse(
            Code.FIELD_MISSING, f"no documents in {', '.join(paths)}", "at least one", "begin with: shoal policy new"
        )
    documents = tuple(operator_pb2.Document(name=name, text=text.decode()) for name, text in texts)
    return Bundle(documents, tuple(loaded.problems), sources, samples)


def push_sources(api: Region, bundle: Bundle) -> dict[str, str]:
    """Pushes each local model that the region does not hold yet, with the signature beside it, then samples for them;
    source -> digest.

    Bytes by digest change nothing that runs, and a plan needs the model's profile: so plan pushes as well as apply.
    """
    held = {model.digest: bool(model.signatures) for model in api.models()}
    digests: dict[str, str] = {}
    for source, path in bundle.sources.items():
        digest, size = digest_of(path)
        digests[source] = digest
        signature = signature_of(path, None)
        if digest not in held or (signature and not held[digest]):
            with bytes_progress(f"push {path.name}", size) as progress:
                api.push(path, progress=progress, signature=signature)
    known = {(pack.digest, pack.model) for pack in api.packs()} if bundle.samples else set()
    for source, (path, models) in bundle.samples.items():
        digest, size = digest_of(path)
        for model in models:
            if (digest, digests.get(model, model)) not in known:
                with bytes_progress(f"push {path.name}", size) as progress:
                    api.push_samples(path, digests.get(model, model), progress)
        digests[source] = digest
    return digests


def _expand(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        if not found:
            raise refuse(Code.SOURCE_UNREACHABLE, f"no {' or '.join(SUFFIXES)} in {path}", "documents", "name a file")
        return found
    return [path]


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as cause:
        raise refuse(
            Code.SOURCE_UNREACHABLE, f"{path}: {cause.strerror}", "a YAML file that can be read", "correct the path"
        ) from cause


def _is_path(source: str) -> bool:
    return source.startswith(("./", "../", "/"))
