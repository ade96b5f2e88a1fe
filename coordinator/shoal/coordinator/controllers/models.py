"""Models on the way in and out: bytes verified, inspected in a child process, then recorded.

A refused model leaves no bytes behind.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.catalog import MODELS, Catalog, ModelRecord
from shoal.coordinator.controllers.events import Event
from shoal.coordinator.controllers.truth import Truth
from shoal.coordinator.ports import Blobs, Clock, Inspector, Store
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.profile import ModelProfile
from shoal.types.units import Bytes
from shoal.wire.identity import check_name

_NOBODY: Final = ""


@dataclass(frozen=True, slots=True)
class Pushed:
    """existed: the same bytes were there before."""

    model: ModelRecord
    existed: bool


class ModelsController:
    """catalog, adopt: the region's documents and models are one value, owned by the workloads' controller."""

    def __init__(
        self,
        store: Store,
        truth: Truth,
        blobs: Blobs,
        inspector: Inspector,
        clock: Clock,
        catalog: Callable[[], Catalog],
        adopt: Callable[[Mapping[str, ModelRecord]], None],
    ) -> None:
        self._store = store
        self._truth = truth
        self._blobs = blobs
        self._inspector = inspector
        self._clock = clock
        self._catalog = catalog
        self._adopt = adopt

    async def start(self) -> None:
        found = [records.load(ModelRecord, record.value) for record in await self._store.scan(MODELS)]
        self._adopt({model.digest: model for model in found})

    async def push(self, name: str, size: Bytes, digest: str, chunks: AsyncIterator[bytes], *, actor: str) -> Pushed:
        """name: empty for a model that is only known by its digest.

        Raises ShoalError(NAME_INVALID | MODEL_DIGEST | MODEL_TOO_LARGE | MODEL_INVALID | .. | DISK_FULL | STORE_FULL).
        """
        return await self.keep(await self.receive(name, size, digest, chunks), name, digest, actor=actor)

    async def receive(self, name: str, size: Bytes, digest: str, chunks: AsyncIterator[bytes]) -> ModelProfile | None:
        """The first half of a push, which a caller may cut off: verified bytes and their profile; None: all known."""
        if name:
            check_name(name, "model name")
        if digest in self._catalog().models and await self._blobs.stat(digest) is not None:
            return None
        return await self._taken_in(size, digest, chunks)

    async def keep(self, profile: ModelProfile | None, name: str, digest: str, *, actor: str) -> Pushed:
        """The second half: the model is recorded."""
        if profile is None:
            return Pushed(await self._named(digest, name, actor), existed=True)
        names = (name,) if name else ()
        model = ModelRecord(digest, names, self._clock.wall(), actor, profile)
        try:
            async with self._truth.changing:
                return Pushed(await self._record(model, name, actor), existed=False)
        except BaseException:
            if digest not in self._catalog().models:
                await self._blobs.delete(digest)
            raise

    async def inspect(self, size: Bytes, digest: str, chunks: AsyncIterator[bytes]) -> Pushed:
        """As push, and nothing stays."""
        known = self._catalog().models.get(digest)
        if known is not None:
            return Pushed(known, existed=True)
        profile = await self._taken_in(size, digest, chunks)
        if digest not in self._catalog().models:
            await self._blobs.delete(digest)
        return Pushed(ModelRecord(digest, (), self._clock.wall(), _NOBODY, profile), existed=False)

    async def remove(self, name: str, actor: str) -> tuple[str, bool]:
        """(digest, whether the bytes went too). name: or a digest. Raises ShoalError(MODEL_UNKNOWN | IN_USE)."""
        async with self._truth.changing:
            return await self._remove(name, actor)

    async def fetch(self, digest: str, offset: int) -> tuple[Bytes, AsyncIterator[bytes]]:
        """(size, bytes from offset on). Raises ShoalError(MODEL_UNKNOWN | INVALID_ARGUMENT)."""
        size = await self._blobs.stat(digest) if digest in self._catalog().models else None
        if size is None:
            raise ShoalError(unknown_model(digest))
        if not 0 <= offset <= size:
            raise refuse(Code.INVALID_ARGUMENT, f"offset {offset}", f"0 to {size}", "start at 0")
        return size, self._blobs.read(digest, offset)

    async def _remove(self, name: str, actor: str) -> tuple[str, bool]:
        catalog = self._catalog()
        digest = catalog.digest_of(name)
        if digest is None:
            raise ShoalError(unknown_model(name))
        model = catalog.models[digest]
        names = () if name == digest else tuple(other for other in model.names if other != name)
        if names:
            await self._record(replace(model, names=names), "", actor)
            return digest, False
        if users := catalog.users_of(digest):
            raise refuse(
                Code.IN_USE,
                f"{name!s:.120} runs as {', '.join(users)}",
                "a model that nothing uses",
                "delete those first",
            )
        event = Event("MODEL_REMOVED", digest, name, actor)
        await self._truth.commit({}, deletes=(MODELS + digest,), events=[event])
        self._adopt({key: other for key, other in self._catalog().models.items() if key != digest})
        await self._blobs.delete(digest)
        return digest, True

    async def _taken_in(self, size: Bytes, digest: str, chunks: AsyncIterator[bytes]) -> ModelProfile:
        path = await self._blobs.write(chunks, size=size, digest=digest)
        try:
            return await self._inspector.inspect(path, digest)
        except BaseException:
            if digest not in self._catalog().models:
                await self._blobs.delete(digest)
            raise

    async def _named(self, digest: str, name: str, actor: str) -> ModelRecord:
        async with self._truth.changing:
            known = self._catalog().models.get(digest)
            if known is None:
                raise ShoalError(unknown_model(digest))
            if not name or name in known.names:
                return known
            return await self._record(replace(known, names=tuple(sorted({*known.names, name}))), name, actor)

    async def _record(self, model: ModelRecord, name: str, actor: str) -> ModelRecord:
        """Keeps the model; a name that another model had moves to it."""
        models = dict(self._catalog().models)
        changed = {model.digest: model}
        for other in models.values():
            if name and name in other.names and other.digest != model.digest:
                changed[other.digest] = replace(other, names=tuple(each for each in other.names if each != name))
        event = Event("MODEL_KEPT", model.digest, ", ".join(model.names), actor)
        await self._truth.commit(
            {MODELS + digest: records.dump(each) for digest, each in changed.items()}, events=[event]
        )
        self._adopt({**self._catalog().models, **changed})
        return model


def unknown_model(name: str) -> Refusal:
    return Refusal(Code.MODEL_UNKNOWN, f"{name!r:.120}", "a pushed model", "see `shoal model ls`")
