"""Models on a hub that serves Git repositories as Hugging Face's does.

Source: huggingface_hub (`constants.py`, `file_download.py`): the URL of a file, HF_ENDPOINT and HF_TOKEN, and the
headers that name the commit, and size and SHA-256 of a file that is kept in Git's large file storage.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import quote, unquote

from shoal.cli.downloads import ExpectedFile, WebRequest, check_digest, check_size, is_inner_path, open_url, save
from shoal.cli.render.output import note
from shoal.types.codes import Code, refuse

SCHEME: Final = "hf://"
FORM: Final = "hf://OWNER/NAME[@REVISION]/FILE.onnx"
_ENDPOINT: Final = "https://huggingface.co"
_NAME: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,95})"
_REFERENCE: Final = re.compile(rf"hf://({_NAME})/({_NAME})(?:@([^/@\s]+))?/(.+)")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubReference:
    """Names a file of a repository."""

    # OWNER/NAME.
    repository: str
    # A branch, a tag or a commit.
    revision: str
    # Path within the repository.
    file: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.repository}@{quote(self.revision, safe='')}/{self.file}"


def parse_reference(text: str) -> HubReference:
    """Raises ShoalError(USAGE)."""
    found = _REFERENCE.fullmatch(text)
    if found is None or not is_inner_path(found[4]):
        raise refuse(Code.USAGE, f"{text:.200}", FORM, "correct the name")
    return HubReference(f"{found[1]}/{found[2]}", unquote(found[3] or "main"), found[4])


class HubSource:
    """The files of one repository, all of the commit that the first of them came from."""

    def __init__(self, reference: HubReference, folder: Path) -> None:
        """folder: where files are written."""
        self._reference = reference
        self._folder = folder
        self._fetched = 0

    def model(self, digest: str) -> Path:
        """The model. digest: that the file must have; empty: what the hub says, or else any. Raises ShoalError."""
        return self._fetch(self._reference, digest)

    def fetch_beside(self, locations: Sequence[str]) -> None:
        """External data, beside the model."""
        folder = PurePosixPath(self._reference.file).parent
        for location in locations:
            if is_inner_path(location):
                self._fetch(replace(self._reference, file=(folder / location).as_posix()), "")

    def _fetch(self, reference: HubReference, digest: str) -> Path:
        endpoint = (os.environ.get("HF_ENDPOINT") or _ENDPOINT).rstrip("/")
        token = os.environ.get("HF_TOKEN", "").strip()
        url = f"{endpoint}/{reference.repository}/resolve/{quote(reference.revision, safe='')}/{quote(reference.file)}"
        request = WebRequest(url, lambda host: bool(digest), f"Bearer {token}" if token else "")
        with open_url(request) as answer:
            if answer.status != 200:
                raise answer.refusal("correct the name; a private or gated model needs HF_TOKEN")
            said = answer.origin_headers
            commit, size = said.get("X-Repo-Commit", ""), said.get("X-Linked-Size", "")
            known = said.get("X-Linked-Etag", "").strip('W/"')
            expected = ExpectedFile(
                reference.file,
                int(size) if size.isdecimal() and len(size) < 20 else None,
                f"sha256:{known}" if _SHA256.fullmatch(known) else digest,
            )
            if digest:
                check_digest(str(reference), expected.digest, digest)
            self._fetched += expected.size or 0
            check_size(reference.repository, self._fetched)
            path = self._folder / reference.file
            path.parent.mkdir(parents=True, exist_ok=True)
            found = save(answer, path, expected)
        if _COMMIT.fullmatch(commit):
            self._reference = replace(self._reference, revision=commit)
        note(f"{replace(reference, revision=self._reference.revision)} is {found}")
        return path
