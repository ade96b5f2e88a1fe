"""A29: a model whose external data names a path, a link or a device. No file outside the model's own folder is read."""

import os
from pathlib import Path

import pytest
from onnx import TensorProto

from harness.models.push import push, push_refusal
from harness.models.synthetic import FLOAT, relu, with_constant
from shoal.types.codes import Code
from shoal.types.profile import ModelProfile


def pointing_at(location: str) -> bytes:
    made = TensorProto(name="w", data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    made.external_data.add(key="location", value=location)
    return with_constant(made)


@pytest.mark.parametrize(
    "location",
    [
        "../secret",
        "a/../../secret",
        "/etc/hostname",
        "link",
        "folder/inside",
        "hard",
        "fifo",
        "device",
        "sec\0ret",
        "plain",
    ],
)
async def test_external_data_of_any_kind_is_refused(tmp_path: Path, location: str) -> None:
    """The bait lies beside the model in the store itself; a FIFO that was opened would hang the child."""
    folder, secret = tmp_path / "models", tmp_path / "secret"
    folder.mkdir()
    secret.write_bytes(b"\0" * 16)
    (folder / "plain").write_bytes(b"\0" * 16)
    (folder / "link").symlink_to(secret)
    (folder / "folder").symlink_to(tmp_path)
    (folder / "hard").hardlink_to(secret)
    (folder / "device").symlink_to("/dev/zero")
    os.mkfifo(folder / "fifo")
    assert (await push_refusal(folder, pointing_at(location))).code is Code.MODEL_PATH
    assert isinstance(await push(folder, relu().SerializeToString()), ModelProfile)
