"""The page's built files, read once. A file is found by its exact name alone, so no path leads anywhere else."""

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Final

PAGE: Final = "index.html"
_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
    "webmanifest": "application/manifest+json",
}
_COMPRESSED_FROM: Final = 512
"""Bytes from which gzip pays."""


@dataclass(frozen=True, slots=True)
class Asset:
    """One file as it is served."""

    content: bytes
    # Compressed; None where that does not pay.
    gzipped: bytes | None
    headers: Mapping[str, str]


def load() -> dict[str, Asset]:
    """By name."""
    folder = resources.files("shoal.coordinator.api.dashboard").joinpath("static")
    names = json.loads(folder.joinpath("build.json").read_text())["files"]
    return {name: _asset(name, folder.joinpath(name).read_bytes()) for name in names}


def _asset(name: str, content: bytes) -> Asset:
    # A built file's name carries a hash of its content, but for the page, which names the others.
    lasting = name != PAGE
    headers = {
        "content-type": _TYPES[name.rpartition(".")[2]],
        "cache-control": "public, max-age=31536000, immutable" if lasting else "no-cache",
    }
    zipped = gzip.compress(content, mtime=0) if len(content) >= _COMPRESSED_FROM else None
    return Asset(content, zipped, headers)
