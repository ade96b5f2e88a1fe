"""Service Artifacts: uploads, downloads and records of models and sample packs."""

from collections.abc import AsyncIterator
from typing import Any, Final

from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.views import model_view, pack_view
from shoal.coordinator.controllers.documents.models import PushResult, unknown_model
from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.controllers.workloads.recordings import provenance_of
from shoal.coordinator.core.catalog.model import ModelRecord
from shoal.coordinator.uncancelled import run_to_completion
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import NODES, Identity
from shoal.types.migration import PackRef
from shoal.types.profile import ModelProfile
from shoal.types.units import Bytes
from shoal.v1 import artifacts_pb2, artifacts_pb2_grpc
from shoal.wire.certificates import identity_of_context
from shoal.wire.limits import CHUNK_BYTES

MAX_SHAPES: Final = 64
"""Inputs whose shapes a push may say."""
MAX_AXES: Final = 16
"""Lengths of one of them."""
MAX_INPUT_NAME: Final = 256
"""Characters of an input's name. Names go to a child process in its arguments."""
Chunks = AsyncIterator[artifacts_pb2.PushChunk]


class ArtifactsService(artifacts_pb2_grpc.ArtifactsServicer):
    def __init__(self, region: RegionalCoordinator, audit: AuditTrail) -> None:
        self._region = region
        self._audit = audit

    async def Fetch(self, request: artifacts_pb2.FetchRequest, context: Any) -> AsyncIterator[artifacts_pb2.FetchChunk]:
        caller = identity_of_context(context)
        if not may_fetch(self._region, caller, request.digest):
            raise ShoalError(unknown_model(request.digest))
        size, chunks = await self._region.models.fetch(request.digest, request.offset)
        yield artifacts_pb2.FetchChunk(size=size)
        async for data in self._region.workloads.fetches.track(caller.name, request.digest, chunks):
            for start in range(0, len(data), CHUNK_BYTES):
                yield artifacts_pb2.FetchChunk(size=size, data=data[start : start + CHUNK_BYTES])

    async def Push(self, request_iterator: Chunks, context: Any) -> artifacts_pb2.PushReply:
        head = await _head(request_iterator)
        actor = identity_of_context(context).uri
        if head.samples_of:
            pack = await self._region.models.receive_pack(
                head.samples_of, Bytes(head.size), head.digest, _data(request_iterator)
            )
            existed = await run_to_completion(self._keep_pack(pack, head.samples_of, actor))
            view = pack_view(self._region.workloads.catalog, pack, head.samples_of)
            return artifacts_pb2.PushReply(pack=view, existed=existed)
        shapes = _shapes_of(head)
        profile = await self._region.models.receive(
            head.name, Bytes(head.size), head.digest, _data(request_iterator), signature=head.signature, shapes=shapes
        )
        return self._reply(await run_to_completion(self._keep(profile, head, actor)), head.name)

    async def Record(self, request_iterator: Chunks, context: Any) -> artifacts_pb2.PushReply:
        head = await _head(request_iterator)
        caller = identity_of_context(context)
        pack = await receive_recording(
            self._region, self._audit, caller, head.recorded_by, head.samples_of, Bytes(head.size), head.digest,
            _data(request_iterator),
        )  # fmt: skip
        return artifacts_pb2.PushReply(pack=pack_view(self._region.workloads.catalog, pack, head.samples_of))

    async def _keep(self, profile: ModelProfile | None, head: artifacts_pb2.PushHead, actor: str) -> PushResult:
        pushed = await self._region.models.keep(
            profile, head.name, head.digest, actor=actor, signature=head.signature,
            has_shapes=bool(head.reference_shapes),
        )  # fmt: skip
        await self._audit.note(actor, "Push", pushed.model.digest, "existed" if pushed.was_known else "stored")
        return pushed

    async def _keep_pack(self, pack: PackRef, model: str, actor: str) -> bool:
        existed = await self._region.models.keep_pack(pack, model, actor=actor)
        await self._audit.note(actor, "Push", pack.digest, f"samples, {'existed' if existed else 'stored'}")
        return existed

    async def Inspect(self, request_iterator: Chunks, context: Any) -> artifacts_pb2.PushReply:
        head = await _head(request_iterator)
        return self._reply(await self._region.models.inspect(Bytes(head.size), head.digest, _data(request_iterator)))

    async def List(self, request: artifacts_pb2.ListModelsRequest, context: Any) -> artifacts_pb2.ListModelsReply:
        catalog = self._region.workloads.catalog
        if request.name:
            digest = catalog.digest_of(request.name)
            if digest is None:
                raise ShoalError(unknown_model(request.name))
            return artifacts_pb2.ListModelsReply(models=[self._view(catalog.models[digest], request.name)])
        views = [self._view(model, name) for model in catalog.models.values() for name in (model.names or ("",))]
        packs = [
            pack_view(catalog, pack, model)
            for _, each in sorted(catalog.packs.items())
            for model, pack in each.read_for.items()
        ]
        return artifacts_pb2.ListModelsReply(
            models=sorted(views, key=lambda view: (view.name, view.digest)), packs=packs
        )

    async def Remove(self, request: artifacts_pb2.RemoveModelRequest, context: Any) -> artifacts_pb2.RemoveModelReply:
        actor = identity_of_context(context).uri
        digest, bytes_removed = await self._region.models.remove(request.name, actor)
        await self._audit.note(actor, "Remove", digest, "removed" if bytes_removed else "renamed")
        return artifacts_pb2.RemoveModelReply(digest=digest, bytes_removed=bytes_removed)

    def _reply(self, pushed: PushResult, name: str = "") -> artifacts_pb2.PushReply:
        """name: of the model's names the one to show; empty: any."""
        return artifacts_pb2.PushReply(model=self._view(pushed.model, name or None), existed=pushed.was_known)

    def _view(self, model: ModelRecord, name: str | None = None) -> artifacts_pb2.Model:
        return model_view(self._region.workloads.catalog, model, self._region.config.name, name)


def may_fetch(region: RegionalCoordinator, caller: Identity, digest: str) -> bool:
    """An operator may fetch any model. A node may fetch only the models that it is to run or keep, and the packs to
    warm them up or verify them with."""
    if caller.role is Role.OPERATOR:
        return True
    desired = region.workloads.desired.get(caller.name)
    if desired is None or caller.role not in NODES:
        return False
    return digest in desired.pins or any(
        digest in (each.model, each.samples) or (each.verification is not None and digest == each.verification.pack)
        for each in desired.assignments
    )


async def receive_recording(
    region: RegionalCoordinator,
    audit: AuditTrail,
    caller: Identity,
    assignment: str,
    model: str,
    size: Bytes,
    digest: str,
    chunks: AsyncIterator[bytes],
) -> PackRef:
    """Stores a replica's recorded answers as its model's reference, if it was asked for them and is the first. Raises
    ShoalError(ROLE_DENIED | OVERLOADED | CONFLICT | MODEL_* | DISK_FULL | STORE_FULL | ..)."""
    by = provenance_of(region.workloads, caller.name, assignment, model, region.clock.wall())
    pack = await region.models.receive_recording(by, size, digest, chunks)

    async def keep() -> None:
        await region.models.keep_pack(pack, model, actor=caller.uri, by=by)
        await audit.note(caller.uri, "Record", pack.digest, f"{model} {assignment}")

    await run_to_completion(keep())
    return pack


async def _head(chunks: Chunks) -> artifacts_pb2.PushHead:
    first = await anext(chunks, None)
    if first is None or first.WhichOneof("part") != "head" or first.head.size <= 0:
        raise refuse(
            Code.MESSAGE_INVALID, "a push without its head", "name, size and digest first", "use `shoal model push`"
        )
    return first.head


def _shapes_of(head: artifacts_pb2.PushHead) -> dict[str, tuple[int, ...]]:
    """The bounds are those of `spec.model.shapes`. Raises ShoalError(INVALID_ARGUMENT)."""
    found = {name: tuple(shape.dims) for name, shape in head.reference_shapes.items()}
    if len(found) > MAX_SHAPES or any(
        len(shape) > MAX_AXES
        or any(length != -1 and not 1 <= length < 2**31 for length in shape)
        or len(name) > MAX_INPUT_NAME
        for name, shape in found.items()
    ):
        raise refuse(
            Code.INVALID_ARGUMENT, f"{len(found)} shapes",
            f"at most {MAX_SHAPES} of {MAX_AXES} lengths, 1 to 2^31 - 1, with names of {MAX_INPUT_NAME}",
            "shoal model push --shape NAME=1x3x48x320",
        )  # fmt: skip
    return found


async def _data(chunks: Chunks) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        if chunk.WhichOneof("part") != "data":
            raise refuse(Code.MESSAGE_INVALID, "a second head", "bytes after the head", "use `shoal model push`")
        yield chunk.data
