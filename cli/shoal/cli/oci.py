"""Models in an OCI registry, as ORAS and the like put them there: a manifest whose layers are files with titles.

Sources: OCI distribution spec 1.1 (pulls, limits of manifests, names of repositories and tags), OCI image spec 1.1
(manifests, `org.opencontainers.image.title`), distribution's token authentication (the challenge `Bearer`).
"""

import base64
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import urlencode, urlsplit
from urllib.request import parse_http_list, parse_keqv_list

from shoal.cli.downloads import (
    ExpectedFile,
    WebAnswer,
    WebRequest,
    check_digest,
    check_size,
    is_confidential,
    is_inner_path,
    is_loopback,
    open_url,
    read_json,
    save,
)
from shoal.cli.render.output import note
from shoal.types.codes import Code, ShoalError, refuse

SCHEME: Final = "oci://"
FORM: Final = "oci://REGISTRY/REPOSITORY[:TAG][@sha256:HEX][#FILE]"
_TITLE: Final = "org.opencontainers.image.title"
_INDEXES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFESTS: Final = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
MANIFEST_BYTES: Final = 4 * 2**20
"""What a registry has to take at least, and clients need not exceed (distribution spec, Pushing Manifests)."""
_TOKEN_BYTES: Final = 64 * 2**10
_CONFIG_BYTES: Final = 2**20
_REFERENCE: Final = re.compile(
    r"oci://(?P<registry>[a-z0-9.-]+(?::[0-9]{1,5})?|\[[0-9a-f:]+\](?::[0-9]{1,5})?)"
    r"/(?P<repository>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
    r"(?:#(?P<file>.+))?"
)
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ArtifactReference:
    """Names an artifact of a registry, and a file of it."""

    # Host, with its port if that is another than HTTPS's.
    registry: str
    # Path within the registry.
    repository: str
    # Empty where the digest alone is given.
    tag: str
    # Of the manifest, sha256:HEX; empty where the tag alone is given.
    digest: str
    # Title of the layer that is the model; empty: the only one whose title ends in .onnx.
    file: str

    @property
    def base(self) -> str:
        """URL of the registry. One on this machine's loopback is called without TLS, as container tools do."""
        host = urlsplit(f"//{self.registry}").hostname or ""
        return f"{'http' if is_loopback(host) else 'https'}://{self.registry}"


@dataclass(frozen=True, slots=True)
class Layer:
    """A file of an artifact."""

    # Path within the artifact; empty where it has none.
    title: str
    # sha256:HEX.
    digest: str
    # Bytes.
    size: int


def parse_reference(text: str) -> ArtifactReference:
    """Raises ShoalError(USAGE)."""
    found = _REFERENCE.fullmatch(text)
    if found is None or not (found["tag"] or found["digest"]):
        raise refuse(Code.USAGE, f"{text:.200}", FORM, "give the digest, or a tag")
    return ArtifactReference(
        found["registry"], found["repository"], found["tag"] or "", found["digest"] or "", found["file"] or ""
    )


def layers_of(manifest: Mapping[str, Any]) -> tuple[Layer, ...]:
    """The layers of a manifest, which is untrusted. Raises ShoalError(SOURCE_UNREACHABLE | MODEL_PATH)."""
    given = manifest.get("layers")
    if not isinstance(given, list):
        raise _unfit("a manifest without layers")
    layers = tuple(_layer(each) for each in given)
    titles = [layer.title for layer in layers if layer.title]
    if len(titles) != len(set(titles)):
        raise _unfit("two layers with one title")
    return layers


def _layer(given: Any) -> Layer:
    if not isinstance(given, dict):
        raise _unfit("a layer that is no object")
    digest, size, annotations = given.get("digest"), given.get("size"), given.get("annotations") or {}
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise _unfit(f"a layer of digest {digest!r:.80}")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise _unfit(f"a layer of {size!r:.40} bytes")
    title = annotations.get(_TITLE, "") if isinstance(annotations, dict) else None
    if not isinstance(title, str):
        raise _unfit("annotations that are no texts")
    if title and not is_inner_path(title):
        raise refuse(Code.MODEL_PATH, f"a layer with the title {title!r:.200}", "a path within the artifact",
                     "do not use this artifact")  # fmt: skip
    return Layer(title, digest, size)


def choose_model(layers: Sequence[Layer], file: str) -> Layer:
    """The layer that is the model. file: its title; empty: the only .onnx. Raises ShoalError(SOURCE_UNREACHABLE)."""
    titles = [layer.title for layer in layers if layer.title]
    found = [layer for layer in layers if (layer.title == file if file else layer.title.endswith(".onnx"))]
    if not found and not file and len(layers) == 1 and not titles:
        found = list(layers)
    if len(found) != 1:
        raise refuse(
            Code.SOURCE_UNREACHABLE, f"{len(found)} models among {', '.join(titles[:8]) or 'layers without titles'}",
            "one .onnx file", "name it: oci://..#FILE",
        )  # fmt: skip
    return found[0]


def beside(layers: Sequence[Layer], model: Layer, locations: Sequence[str]) -> list[Layer]:
    """The layers that hold a model's external data. locations: paths relative to the model, untrusted."""
    folder = PurePosixPath(model.title).parent
    wanted = {(folder / location).as_posix() for location in locations}
    return [layer for layer in layers if layer.title in wanted and layer is not model]


class ArtifactSource:
    """The files of one artifact. Every layer is bound by its digest, and those by the manifest's."""

    def __init__(self, reference: ArtifactReference, folder: Path) -> None:
        """folder: where files are written. Asks the registry. Raises ShoalError."""
        self._reference = reference
        self._folder = folder
        self._authorization = ""
        manifest, found = self._manifest(reference.digest or reference.tag, reference.digest)
        if not reference.digest:
            note(f"{SCHEME}{reference.registry}/{reference.repository}:{reference.tag} is {found}")
        if "manifests" in manifest:
            inner = _only_manifest(manifest)
            manifest, _ = self._manifest(inner, inner)
        self._layers = layers_of(manifest)
        self._model = choose_model(self._layers, reference.file)

    def model(self, digest: str) -> Path:
        """The model. digest: that the file must have; empty: any."""
        if digest:
            check_digest(self._model.title or "the model", self._model.digest, digest)
        return self._fetch(self._model)

    def fetch_beside(self, locations: Sequence[str]) -> None:
        """External data, beside the model."""
        found = beside(self._layers, self._model, locations)
        check_size(self._reference.repository, sum(layer.size for layer in (self._model, *found)))
        for layer in found:
            self._fetch(layer)

    def _fetch(self, layer: Layer) -> Path:
        name = layer.title or f"{self._reference.repository.rpartition('/')[2]}.onnx"
        check_size(name, layer.size)
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._get(f"blobs/{layer.digest}", "*/*", layer.digest) as answer:
            save(answer, path, ExpectedFile(name, layer.size, layer.digest))
        return path

    def _manifest(self, named: str, digest: str) -> tuple[Mapping[str, Any], str]:
        with self._get(f"manifests/{named}", ", ".join((*_MANIFESTS, *_INDEXES)), digest) as answer:
            if answer.status != 200:
                raise answer.refusal("correct the reference, or log in: oras login, or docker login")
            manifest, found = read_json(answer, MANIFEST_BYTES)
        if digest:
            check_digest(answer.url, found, digest)
        return manifest, found

    @contextmanager
    def _get(self, path: str, accept: str, digest: str) -> Iterator[WebAnswer]:
        """The answer; where the registry asks for a token, one is got first, and kept."""
        request = WebRequest(
            f"{self._reference.base}/v2/{self._reference.repository}/{path}",
            lambda host: bool(digest) or is_loopback(host),
            self._authorization,
            accept,
        )
        with open_url(request) as answer:
            if answer.status != 401 or self._authorization:
                yield answer
                return
            challenges = answer.headers.get_all("WWW-Authenticate") or []
        self._authorization = self._authorize(challenges)
        with open_url(WebRequest(request.url, request.is_plain_allowed, self._authorization, accept)) as answer:
            yield answer

    def _authorize(self, challenges: Sequence[str]) -> str:
        """The header Authorization that a registry asks for. Raises ShoalError(SOURCE_DENIED)."""
        basic = _credentials(self._reference.registry)
        for challenge in challenges:
            scheme, _, rest = challenge.partition(" ")
            if scheme.lower() == "bearer":
                return f"Bearer {self._token(_parameters(rest), basic)}"
            if scheme.lower() == "basic" and basic:
                return basic
        raise refuse(
            Code.SOURCE_DENIED, f"{self._reference.registry} asks for credentials",
            "those of the Docker configuration", f"oras login {self._reference.registry}, or docker login",
        )  # fmt: skip

    def _token(self, given: Mapping[str, str], basic: str) -> str:
        realm = given.get("realm", "")
        if not is_confidential(realm):
            raise refuse(Code.SOURCE_DENIED, f"a token service at {realm!r:.200}", "one with TLS", "do not use it")
        query = {
            "service": given.get("service", ""),
            "scope": given.get("scope") or f"repository:{self._reference.repository}:pull",
        }
        request = WebRequest(f"{realm}{'&' if '?' in realm else '?'}{urlencode(query)}", is_loopback, basic)
        with open_url(request) as answer:
            if answer.status != 200:
                raise answer.refusal(f"log in: oras login {self._reference.registry}, or docker login")
            found, _ = read_json(answer, _TOKEN_BYTES)
        token = found.get("token") or found.get("access_token")
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
            raise refuse(Code.SOURCE_DENIED, f"{realm} gives no token", "a token", "see that the registry is right")
        return token


def _only_manifest(index: Mapping[str, Any]) -> str:
    """Digest of the one manifest that an index names. Raises ShoalError(SOURCE_UNREACHABLE)."""
    given = index.get("manifests")
    digests = [each.get("digest") for each in given if isinstance(each, dict)] if isinstance(given, list) else []
    if len(digests) != 1 or not isinstance(digests[0], str) or not _DIGEST.fullmatch(digests[0]):
        raise refuse(
            Code.SOURCE_UNREACHABLE, f"an index of {len(digests)} manifests", "one manifest", "name it by its digest"
        )
    return digests[0]


def _parameters(challenge: str) -> Mapping[str, str]:
    """`realm="..",service=".."` as a mapping; empty if it is no such list."""
    try:
        return parse_keqv_list(parse_http_list(challenge))
    except (ValueError, IndexError):
        return {}


def _credentials(registry: str) -> str:
    """The header for this registry from the Docker configuration, where `oras login` and `docker login` leave it; empty
    if there is none. Credential helpers are not called."""
    folder = os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker"
    try:
        with (Path(folder) / "config.json").open("rb") as file:
            given = json.loads(file.read(_CONFIG_BYTES))["auths"][registry]["auth"]
        base64.b64decode(given, validate=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return ""
    return f"Basic {given}"


def _unfit(found: str) -> ShoalError:
    return refuse(Code.SOURCE_UNREACHABLE, found, "an OCI manifest with a model", "push it with ORAS, or the like")
