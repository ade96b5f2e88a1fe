"""Adds a model as the coordinator does: stored by digest, then inspected in a child process."""

from collections.abc import AsyncIterator
from pathlib import Path

from harness.models.synthetic import digest_of
from shoal.coordinator.blobs.directory import DirectoryBlobs
from shoal.coordinator.blobs.inspect import ChildInspector, InspectionLimits
from shoal.types.codes import Refusal, ShoalError
from shoal.types.profile import ModelProfile
from shoal.types.units import Bytes


async def chunks_of(content: bytes, size: int = 2**16) -> AsyncIterator[bytes]:
    for at in range(0, len(content), size):
        yield content[at : at + size]


async def push(folder: Path, content: bytes, limits: InspectionLimits | None = None) -> ModelProfile | Refusal:
    """The result for a model of these bytes."""
    blobs, digest = DirectoryBlobs(folder, Bytes(2**31)), digest_of(content)
    try:
        path = await blobs.write(chunks_of(content), size=Bytes(len(content)), digest=digest)
        return await ChildInspector(limits).inspect(path, digest)
    except ShoalError as error:
        Path(blobs.path(digest)).unlink(missing_ok=True)
        return error.refusal


async def push_refusal(folder: Path, content: bytes, limits: InspectionLimits | None = None) -> Refusal:
    """Why a model of these bytes is refused; a refusal without a reason fails the test."""
    found = await push(folder, content, limits)
    assert isinstance(found, Refusal), f"it came in: {found}"
    assert found.found
    assert found.remedy
    return found
