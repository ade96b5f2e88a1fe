"""Files for plan and apply: read, checked offline, with their local models found and pushed by digest."""

import errno
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from shoal.cli.modelfiles import signature_of
from shoal.cli.render.progress import bytes_progress
from shoal.client import RegionClient
from shoal.client.transfers import digest_of
from shoal.policies import MAX_BYTES, Problem, Workload, load
from shoal.policies import Document as Loaded
from shoal.types.codes import Code, refuse
from shoal.v1 import operator_pb2

SUFFIXES: Final = (".yaml", ".yml")
STDIN: Final = Path("standard input")
"""Stands for what is piped in. Models that its documents name are found from the folder that the command runs in."""


class FileDocumentKey(NamedTuple):
    """Identifies one document."""

    # As the document writes it, e.g. `Workload`.
    kind: str
    name: str
    # Only workloads have one; empty for other kinds.
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The documents that `plan` and `apply` send, and the local files that they name."""

    # One per file, as sent to the region; empty if there is any problem.
    documents: tuple[operator_pb2.Document, ...]
    # What the offline check found, with file and line.
    problems: tuple[Problem, ...]
    # Local models: `source` as the document writes it -> path here.
    sources: dict[str, Path]
    # Local sample packs: `samples` as written -> (path here, models they belong to, as written).
    samples: dict[str, tuple[Path, tuple[str, ...]]]
    # Of every document in the files, in file order.
    keys: tuple[FileDocumentKey, ...] = ()
    # The file of each key, as `documents` names it.
    files: tuple[str, ...] = ()
    # Policy and tenant that each key's document names; empty for kinds other than Workload.
    references: tuple[tuple[FileDocumentKey, ...], ...] = ()

    @property
    def workloads(self) -> tuple[tuple[str, str], ...]:
        """(tenant, name)."""
        return tuple((key.tenant, key.name) for key in self.keys if key.kind == "Workload")


def read(paths: Sequence[str]) -> Bundle:
    """Read all documents of files and folders; `-` is standard input. Raises ShoalError(SOURCE_UNREACHABLE)."""
    files = [file for path in dict.fromkeys(paths) for file in ([STDIN] if path == "-" else _expand(Path(path)))]
    texts = [(str(file), _text(file)) for file in files]
    loaded = load(texts)
    sources: dict[str, Path] = {}
    samples: dict[str, tuple[Path, tuple[str, ...]]] = {}
    for document in loaded.documents:
        if isinstance(document.value, Workload):
            folder = Path(document.source).parent
            model = document.value.spec.model
            models = (model.source, *(variant.source for variant in model.variants))
            for source in models:
                if _is_path(source):
                    sources[source] = folder / source
            if model.samples is not None and _is_path(model.samples):
                before = samples.get(model.samples, (folder, ()))[1]
                samples[model.samples] = folder / model.samples, tuple(dict.fromkeys((*before, *models)))
    if files and not loaded.documents and not loaded.problems:
        names = ", ".join(str(STDIN) if path == "-" else path for path in paths)
        raise refuse(Code.FIELD_MISSING, f"no documents in {names}", "at least one", "begin with: shoal policy new")
    # Nothing is sent if there is a problem: a file may not even be text.
    sent = () if loaded.problems else texts
    documents = tuple(operator_pb2.Document(name=name, text=text.decode()) for name, text in sent)
    keys = tuple(_key(document) for document in loaded.documents)
    origins = tuple(document.source for document in loaded.documents)
    references = tuple(_references(document) for document in loaded.documents)
    return Bundle(documents, tuple(loaded.problems), sources, samples, keys, origins, references)


def waves(bundle: Bundle, share: float) -> tuple[Bundle, ...]:
    """The files of the bundle in the order in which `apply --wave` takes them: one with a workload alone, then `share`
    of those at once. A file without a workload goes with the first that uses it, or else with the first of all."""
    parts = _parts(bundle)
    unused = {each.name for each in bundle.documents}.difference(*parts)
    size = max(1, int(share * len(parts)))
    groups = [
        unused.union(*parts[:1]),
        *(set[str]().union(*parts[at : at + size]) for at in range(1, len(parts), size)),
    ]
    return tuple(_restricted(bundle, group) for group in groups)


def _parts(bundle: Bundle) -> list[set[str]]:
    """Sets of files, in an order in which the region can take one set after another: each has a file with a workload,
    and what that needs and no earlier set has. Otherwise as the files are in order."""
    file_of = dict(zip(bundle.keys, bundle.files, strict=True))
    needs = defaultdict[str, set[str]](set)
    for file, references in zip(bundle.files, bundle.references, strict=True):
        needs[file].update(file_of[key] for key in references if key in file_of)
    loaded = dict.fromkeys(file for key, file in file_of.items() if key.kind == "Workload")
    closures = {file: _closure(needs, file) for file in loaded}
    parts, taken = list[set[str]](), set[str]()
    for file in loaded:
        # What another needs has no larger closure; an equal one where both need each other, which go together.
        for each in sorted(closures[file] & loaded.keys(), key=lambda name: (len(closures[name]), name)):
            if each not in taken:
                parts.append(closures[each] - taken)
                taken |= closures[each]
    return parts


def _closure(needs: Mapping[str, Set[str]], file: str) -> set[str]:
    """The file, those that it needs, those that they need, and so on."""
    found, ahead = {file}, [file]
    while ahead:
        fresh = needs.get(ahead.pop(), frozenset[str]()) - found
        found |= fresh
        ahead += fresh
    return found


def _restricted(bundle: Bundle, names: Set[str]) -> Bundle:
    """Those files of the bundle alone."""
    kept = [at for at, file in enumerate(bundle.files) if file in names]
    return replace(
        bundle,
        documents=tuple(each for each in bundle.documents if each.name in names),
        keys=tuple(bundle.keys[at] for at in kept),
        files=tuple(bundle.files[at] for at in kept),
        references=tuple(bundle.references[at] for at in kept),
    )


def push_sources(api: RegionClient, bundle: Bundle) -> dict[str, str]:
    """Push each local model that the region lacks, with the signature beside it, then its samples; source -> digest.

    Plan pushes as well as apply: bytes by digest change nothing that runs, and a plan needs the model's profile.
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
        found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and not file.is_dir())
        if not found:
            raise refuse(Code.SOURCE_UNREACHABLE, f"no {' or '.join(SUFFIXES)} in {path}", "documents", "name a file")
        return found
    return [path]


def _text(path: Path) -> bytes:
    """Read no more than shows that the file is too large: the path may name a model."""
    if path is STDIN:
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as cause:
        raise refuse(
            Code.SOURCE_UNREACHABLE,
            f"{path}: {cause.strerror}",
            "a YAML file that can be read",
            "let this user read it" if cause.errno == errno.EACCES else "correct the path",
        ) from cause


def _key(document: Loaded) -> FileDocumentKey:
    if isinstance(document.value, Workload):
        metadata = document.value.metadata
        return FileDocumentKey(document.kind, metadata.name, metadata.tenant)
    return FileDocumentKey(document.kind, document.name)


def _references(document: Loaded) -> tuple[FileDocumentKey, ...]:
    if not isinstance(document.value, Workload):
        return ()
    tenant, policy = document.value.metadata.tenant, document.value.spec.policy
    return (FileDocumentKey("Tenant", tenant), *([FileDocumentKey("Policy", policy)] if policy is not None else []))


def _is_path(source: str) -> bool:
    return source.startswith(("./", "../", "/"))
