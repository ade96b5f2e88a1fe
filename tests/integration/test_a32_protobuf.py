"""A32: protobuf made to exhaust its reader is refused by size, depth and count, in a child process."""

import json
from pathlib import Path

import pytest

from harness.models.push import push, push_refusal
from harness.models.synthetic import length_delimited_field, relu
from shoal.coordinator.blobs.inspect import ChildInspector, InspectionLimits
from shoal.types.codes import Code, ShoalError
from shoal.types.profile import ModelProfile
from shoal.types.units import Bytes

TIGHT = InspectionLimits(memory_bytes=Bytes(512 * 2**20))


def deep(levels: int) -> bytes:
    """A graph in an attribute of a node of a graph .., `levels` messages in all, in a file of about 3 bytes a level."""
    content = b""
    for level in range(levels):
        content = length_delimited_field((6, 5, 1)[level % 3], content)
    return length_delimited_field(7, content)


def any_in_any(levels: int) -> bytes:
    nested: dict[str, object] = {}
    for _ in range(levels):
        nested = {"@type": "type.googleapis.com/google.protobuf.Any", "value": nested}
    return json.dumps(nested).encode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (deep(30_000), "nested too deep"),
        (deep(99), "nested too deep"),
        (b"\x12\x00" * 5_000_000, "too many protobuf fields"),
        (length_delimited_field(7, b"\x0a\x00" * 5_000_000), "too many nodes"),
        (length_delimited_field(7, b"\x2a\x00" * 5_000_000), "too many protobuf fields"),
        (b"\x0b" * 1000, "not protobuf"),
        (b"\x3a\xff\xff\xff\xff\x07" + b"\0" * 100, "not protobuf"),
        (any_in_any(200), "not protobuf"),
    ],
    ids=["very deep", "deep", "fields", "nodes", "initializers", "groups", "2 GiB claimed", "json"],
)
async def test_a_bomb(tmp_path: Path, content: bytes, why: str) -> None:
    refusal = await push_refusal(tmp_path, content, TIGHT)
    assert refusal.code is Code.MODEL_INVALID
    assert why in refusal.found


async def test_two_gibibytes(tmp_path: Path) -> None:
    """A sparse file: were it read, the child would run out of memory and say so."""
    path = tmp_path / "model"
    with path.open("wb") as sparse:
        sparse.truncate(2**31)
    with pytest.raises(ShoalError) as caught:
        await ChildInspector(TIGHT).inspect(str(path), "sha256:" + "0" * 64)
    assert caught.value.code is Code.MODEL_TOO_LARGE


async def test_an_honest_model_passes_the_same_limits(tmp_path: Path) -> None:
    assert isinstance(await push(tmp_path, relu().SerializeToString(), TIGHT), ModelProfile)
