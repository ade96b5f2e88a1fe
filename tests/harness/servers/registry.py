"""A server that behaves like an OCI registry with token authentication, as the storage that registries redirect to, and
as a model hub; each on an origin of its own. A test changes single answers to have it lie."""

import base64
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX: Final = "application/vnd.oci.image.index.v1+json"
TITLE: Final = "org.opencontainers.image.title"
TOKEN: Final = "a-token-of-this-registry"
COMMIT: Final = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True)
class StoredAnswer:
    """One answer; Content-Length is its body's unless the headers say another."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """One request that came."""

    path: str
    authorization: str


class Origin:
    """An HTTP server on a free port of the loopback."""

    def __init__(self) -> None:
        # By path, before anything else.
        self.answers: dict[str, StoredAnswer] = {}
        self.asked: list[Asked] = []
        # Bytes of bodies that were sent whole.
        self.sent = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, path: str, query: Mapping[str, list[str]], authorization: str) -> StoredAnswer:
        return StoredAnswer(404)


Served = TypeVar("Served", bound=Origin)


class Storage(Origin):
    """Where registries and hubs redirect to: whatever `answers` has."""


class Registry(Origin):
    """Pulls need the token of its own service, which needs the user's name and password where one is set."""

    def __init__(self, storage: Storage) -> None:
        super().__init__()
        self.storage = storage
        self.blobs: dict[str, bytes] = {}
        # Tag or digest -> (media type, bytes).
        self.manifests: dict[str, tuple[str, bytes]] = {}
        self.has_tokens = True
        # NAME:PASSWORD; empty: anybody gets a token.
        self.user = ""

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def push(self, tag: str, files: Sequence[tuple[str, bytes]]) -> str:
        """An artifact as ORAS pushes it. files: (title, bytes). Its digest."""
        layers = list[dict[str, Any]]()
        for title, data in files:
            digest = digest_of(data)
            self.blobs[digest] = data
            layers.append({"mediaType": "application/octet-stream", "digest": digest, "size": len(data)})
            if title:
                layers[-1]["annotations"] = {TITLE: title}
        return self.push_manifest(tag, {"schemaVersion": 2, "mediaType": MANIFEST, "layers": layers})

    def push_manifest(self, tag: str, manifest: object, media_type: str = MANIFEST) -> str:
        text = json.dumps(manifest).encode()
        for name in (tag, digest_of(text)):
            self.manifests[name] = media_type, text
        return digest_of(text)

    def answer(self, path: str, query: Mapping[str, list[str]], authorization: str) -> StoredAnswer:
        if path == "/token":
            if self.user and authorization != f"Basic {base64.b64encode(self.user.encode()).decode()}":
                return StoredAnswer(401)
            is_right = query.get("scope") == ["repository:team/models:pull"]
            return StoredAnswer(body=json.dumps({"token": TOKEN}).encode()) if is_right else StoredAnswer(400)
        if self.has_tokens and authorization != f"Bearer {TOKEN}":
            challenge = f'Bearer realm="{self.url}/token",service="here",scope="repository:team/models:pull"'
            return StoredAnswer(401, headers={"WWW-Authenticate": challenge})
        if found := re.fullmatch(r"/v2/team/models/manifests/(.+)", path):
            media_type, text = self.manifests.get(found[1], ("", b""))
            return StoredAnswer(body=text, headers={"Content-Type": media_type}) if text else StoredAnswer(404)
        if (found := re.fullmatch(r"/v2/team/models/blobs/(.+)", path)) and found[1] in self.blobs:
            self.storage.answers.setdefault(f"/{found[1]}", StoredAnswer(body=self.blobs[found[1]]))
            return StoredAnswer(307, headers={"Location": f"{self.storage.url}/{found[1]}"})
        return StoredAnswer(404)


class Hub(Origin):
    """Files by path of `owner/name`, at `main`: those of `large` are redirected to the storage, as large files are."""

    def __init__(self, storage: Storage) -> None:
        super().__init__()
        self.storage = storage
        self.files: dict[str, bytes] = {}
        self.large: set[str] = set()

    def answer(self, path: str, query: Mapping[str, list[str]], authorization: str) -> StoredAnswer:
        found = re.fullmatch(rf"/owner/name/resolve/(main|{COMMIT})/(.+)", path)
        if found is None or found[2] not in self.files:
            return StoredAnswer(404)
        data = self.files[found[2]]
        if found[2] not in self.large:
            return StoredAnswer(body=data, headers={"X-Repo-Commit": COMMIT, "ETag": '"1d0c"'})
        digest = hashlib.sha256(data).hexdigest()
        self.storage.answers.setdefault(f"/{digest}", StoredAnswer(body=data))
        return StoredAnswer(
            302,
            headers={
                "Location": f"{self.storage.url}/{digest}",
                "X-Repo-Commit": COMMIT,
                "X-Linked-Etag": f'"{digest}"',
                "X-Linked-Size": str(len(data)),
            },
        )


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@contextmanager
def serve(origin: Served) -> Iterator[Served]:
    """Serve it until the end of the block."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            path, authorization = unquote(parts.path), self.headers.get("Authorization", "")
            origin.asked.append(Asked(path, authorization))
            answer = origin.answers.get(path) or origin.answer(path, parse_qs(parts.query), authorization)
            self.send_response(answer.status)
            for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.body)
            origin.sent += len(answer.body)

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - its name

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        origin.port = server.server_port
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield origin
        finally:
            server.shutdown()
