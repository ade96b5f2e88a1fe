"""A31: archives (path traversal, links, bombs). None is opened, so nothing in one can escape or expand."""

import gzip
import io
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.models.push import push_refusal
from harness.models.synthetic import relu
from shoal.types.codes import Code

CONTENT = relu().SerializeToString()


def zip_of(*entries: tuple[str, bytes]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # duplicate names
        for name, content in entries:
            archive.writestr(name, content)
    return held.getvalue()


def tar_with_symlink() -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        link = tarfile.TarInfo("model.onnx")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/shadow"
        archive.addfile(link)
    return held.getvalue()


@pytest.mark.parametrize(
    "make",
    [
        lambda: zip_of(("../../../tmp/slipped", b"x"), ("model.onnx", CONTENT)),
        lambda: zip_of(("model.onnx", CONTENT), ("model.onnx", b"other")),
        lambda: zip_of(("model.onnx", b"\0" * 2**26)),
        tar_with_symlink,
        lambda: gzip.compress(b"\0" * 2**26),
        lambda: gzip.compress(tar_with_symlink()),
    ],
    ids=["slip", "duplicate", "bomb", "link", "gzip bomb", "tar.gz"],
)
async def test_an_archive(tmp_path: Path, make: Callable[[], bytes]) -> None:
    refusal = await push_refusal(tmp_path / "models", make())
    assert refusal.code is Code.MODEL_ARCHIVE
    assert [path.name for path in (tmp_path / "models").rglob("*")] == ["incoming"]
    assert [path.name for path in tmp_path.iterdir()] == ["models"]
