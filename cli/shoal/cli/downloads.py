"""Downloads over HTTP: sizes are refused before the first byte, redirects are counted, credentials stay with the origin
that they are for, and digests are verified as the bytes arrive."""

import hashlib
import ipaddress
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

from shoal.cli.render.progress import bytes_progress
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import show_bytes
from shoal.wire.limits import CHUNK_BYTES, MODEL_BYTES

CONNECT_S: Final = 30.0
"""Seconds without a byte after which a download is given up."""
REDIRECTS: Final = 5
"""Redirects of one download that are followed: hubs and registries use one or two."""
_REDIRECT: Final = (301, 302, 303, 307, 308)

IsPlainAllowed = Callable[[str], bool]
"""Whether this host may be asked without TLS."""


@dataclass(frozen=True, slots=True)
class WebRequest:
    """What is asked for, and of whom."""

    url: str
    # Whether a host may answer without TLS, e.g. because a digest is known.
    is_plain_allowed: IsPlainAllowed
    # The header Authorization, for the URL's own origin alone.
    authorization: str = ""
    # The header Accept.
    accept: str = "*/*"


@dataclass(frozen=True, slots=True)
class WebAnswer:
    """The last answer of a chain of redirects."""

    # Where it came from.
    url: str
    # HTTP's.
    status: int
    # Its own.
    headers: Message
    # Headers of the last answer of the origin that was asked first.
    origin_headers: Message
    # Not read yet.
    body: HTTPResponse | urllib.error.HTTPError

    def refusal(self, remedy: str) -> ShoalError:
        """What an answer without success means."""
        code = Code.SOURCE_DENIED if self.status in (401, 403) else Code.SOURCE_UNREACHABLE
        return refuse(code, f"{self.url}: status {self.status}", "a model that can be fetched", remedy)


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """What is known of a file before it is downloaded."""

    # For people.
    name: str
    # None where nobody said.
    size: int | None = None
    # sha256:HEX; empty where nobody said.
    digest: str = ""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The standard one takes credentials along to any host."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None: ...


@contextmanager
def open_url(request: WebRequest) -> Iterator[WebAnswer]:
    """Ask, and follow redirects; an answer of any status is yielded. Raises ShoalError(SOURCE_UNREACHABLE |
    SOURCE_DENIED)."""
    opener = urllib.request.build_opener(_NoRedirects)
    url, origin_headers = request.url, Message()
    for _ in range(REDIRECTS + 1):
        _check_url(url, request.is_plain_allowed)
        asked = urllib.request.Request(url, headers={"Accept": request.accept, "User-Agent": "shoal"})
        is_origin = _origin(url) == _origin(request.url)
        if request.authorization and is_origin and is_confidential(url):
            asked.add_unredirected_header("Authorization", request.authorization)
        with closing(_open(opener, asked)) as answer:
            headers = answer.headers
            if is_origin:
                origin_headers = headers
            if answer.status not in _REDIRECT or "Location" not in headers:
                yield WebAnswer(url, answer.status or 0, headers, origin_headers, answer)
                return
            url = urljoin(url, headers["Location"])
    raise refuse(
        Code.SOURCE_UNREACHABLE, f"{request.url}: more than {REDIRECTS} redirects", "an answer", "correct the URL"
    )


def _open(
    opener: urllib.request.OpenerDirector, asked: urllib.request.Request
) -> HTTPResponse | urllib.error.HTTPError:
    try:
        answer: HTTPResponse = opener.open(asked, timeout=CONNECT_S)
        return answer
    except urllib.error.HTTPError as error:
        return error  # an answer too
    except (OSError, HTTPException, ValueError) as cause:
        raise _unreachable(asked.full_url, cause) from cause


def save(answer: WebAnswer, path: Path, expected: ExpectedFile) -> str:
    """Write the answer's bytes to `path`; its digest, sha256:HEX.

    Raises ShoalError(MODEL_TOO_LARGE | MODEL_DIGEST | SOURCE_UNREACHABLE | SOURCE_DENIED).
    """
    if answer.status != 200:
        raise answer.refusal("correct the URL")
    declared = answer.headers.get("Content-Length", "")
    size = int(declared) if declared.isdecimal() and len(declared) < 20 else expected.size
    check_size(answer.url, max(size or 0, expected.size or 0))
    if expected.size is not None and size != expected.size:
        raise refuse(
            Code.MODEL_DIGEST, f"{answer.url}: {size} bytes", f"{expected.size} bytes, as its source says",
            "get the model again, from who publishes it",
        )  # fmt: skip
    digest, done = hashlib.sha256(), 0
    try:
        with path.open("wb") as file, bytes_progress(f"download {expected.name}", size or 0) as progress:
            while data := answer.body.read(CHUNK_BYTES):
                done += len(data)
                check_size(answer.url, done)
                digest.update(data)
                file.write(data)
                progress(done, max(size or 0, done))
    except (OSError, HTTPException) as cause:
        raise _unreachable(answer.url, cause) from cause
    if size is not None and done != size:
        raise refuse(Code.SOURCE_UNREACHABLE, f"{answer.url}: {done} bytes", f"{size} bytes, as it said", "try again")
    found = f"sha256:{digest.hexdigest()}"
    if expected.digest:
        check_digest(expected.name, found, expected.digest)
    return found


def read_json(answer: WebAnswer, limit: int) -> tuple[Mapping[str, Any], str]:
    """(a JSON object, the digest of its text). limit: bytes. Raises ShoalError(SOURCE_UNREACHABLE)."""
    try:
        text = answer.body.read(limit + 1)
        found = json.loads(text) if len(text) <= limit else None
    except (OSError, HTTPException, ValueError, RecursionError) as cause:
        raise _unreachable(answer.url, cause) from cause
    if not isinstance(found, dict):
        raise refuse(
            Code.SOURCE_UNREACHABLE, f"{answer.url}: {show_bytes(len(text))} that are no JSON object",
            f"a JSON object of at most {show_bytes(limit)}", "correct the URL",
        )  # fmt: skip
    return found, f"sha256:{hashlib.sha256(text).hexdigest()}"


def check_size(what: str, size: int) -> None:
    """Raises ShoalError(MODEL_TOO_LARGE)."""
    if size > MODEL_BYTES:
        raise refuse(Code.MODEL_TOO_LARGE, f"{what}: {show_bytes(size)}", f"at most {show_bytes(MODEL_BYTES)}",
                     "split the model")  # fmt: skip


def check_digest(name: str, found: str, wanted: str) -> None:
    """Raises ShoalError(MODEL_DIGEST)."""
    if found != wanted:
        raise refuse(Code.MODEL_DIGEST, f"{name} is {found}", wanted, "get the model again, from who publishes it")


def is_inner_path(title: str) -> bool:
    """Whether a path names a file below a folder, on any system, and in no other way than by plain names."""
    parts = title.split("/")
    return len(title) <= 1024 and title.isprintable() and "\\" not in title and ":" not in title and all(
        part not in ("", ".", "..") and len(part.encode()) <= 255 for part in parts
    )  # fmt: skip


def is_loopback(host: str) -> bool:
    """Whether a host name or address is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_confidential(url: str) -> bool:
    """Whether credentials may be sent there."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))


def _check_url(url: str, is_plain_allowed: IsPlainAllowed) -> None:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as cause:
        raise _unreachable(url, cause) from cause
    if parts.scheme not in ("http", "https") or not host:
        raise refuse(Code.SOURCE_DENIED, f"{url:.200}", "an https URL", "correct the URL")
    if parts.scheme == "http" and not is_plain_allowed(host):
        raise refuse(Code.SOURCE_DENIED, f"{url} without TLS", "https, or a digest that it has", "--digest sha256:..")


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port


def _unreachable(url: str, cause: Exception) -> ShoalError:
    why = getattr(cause, "reason", None) or cause
    remedy = "trust its authority (SSL_CERT_FILE)" if isinstance(why, ssl.SSLError) else "correct the URL"
    return refuse(Code.SOURCE_UNREACHABLE, f"{url}: {why}", "a model that can be fetched", remedy)
