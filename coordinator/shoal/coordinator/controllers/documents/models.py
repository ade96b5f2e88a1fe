"""Push, keep, fetch and remove models: signature and bytes verified, inspected in a child process, then recorded.

A refused model leaves no bytes behind, unless the store cannot tell that no record names them, or another coordinator
was elected meanwhile, which may be about to record them. A leader deletes such bytes a day later.
"""

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

import structlog

from shoal.coordinator import codec
from shoal.coordinator.controllers.documents.profile_refresh import ProfileRefresh, is_newer, other_profile
from shoal.coordinator.controllers.documents.publishers import verify_bundle
from shoal.coordinator.controllers.documents.unrecorded_bytes import UnrecordedBytes
from shoal.coordinator.controllers.log.context import RegionContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.core.catalog.model import MODELS, PACKS, Catalog, ModelRecord, PackRecord, Provenance
from shoal.coordinator.core.catalog.publishers import (
    NEWEST,
    NewestVersion,
    check_signature,
    expiry_refusal,
    newer_version,
    publisher_keys,
    rollback_refusal,
)
from shoal.coordinator.core.workloads.model import Reference
from shoal.coordinator.ports import Blobs, Inspector
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.identity import check_name
from shoal.types.migration import PACK_BYTES, PackRef
from shoal.types.profile import PROFILE_VERSION, ModelProfile
from shoal.types.signature import VerifiedSignature
from shoal.types.units import Bytes, show_bytes

_NOBODY: Final = ""

log: Final = structlog.get_logger("shoal.coordinator")


@dataclass(frozen=True, slots=True)
class PushResult:
    """The model, and whether the same bytes were already known."""

    model: ModelRecord
    # True if the same bytes had been pushed here before.
    was_known: bool


class ModelsController:
    """Owns models and packs. The catalog holds documents and models in one value, which the workloads controller owns;
    `catalog` reads it and `adopt` replaces it. The Region document of the region's name declares publishers' keys.
    """

    def __init__(
        self,
        context: RegionContext,
        blobs: Blobs,
        inspector: Inspector,
        catalog: Callable[[], Catalog],
        adopt: Callable[[Catalog], None],
    ) -> None:
        self._store = context.store
        self._fence = context.fence
        self._blobs = blobs
        self._inspector = inspector
        self._clock = context.clock
        self._catalog = catalog
        self._adopt = adopt
        self._region = context.name
        self._recorders = set[str]()
        """Assignments whose recordings are under way."""
        self.profiles = ProfileRefresh(context, blobs, inspector, catalog, adopt)
        """To run in the background after a start."""
        self.unrecorded = UnrecordedBytes(blobs, context.clock, self._is_recorded, self._delete_unrecorded)
        """To run in the background, too."""

    async def start(self) -> None:
        found = [codec.load(ModelRecord, record.value) for record in await self._store.scan(MODELS)]
        lines = [codec.load(NewestVersion, record.value) for record in await self._store.scan(NEWEST)]
        models = {model.digest: model for model in found}
        packs = [codec.load(PackRecord, record.value) for record in await self._store.scan(PACKS)]
        newest = {each.line: each for each in lines}
        known = {each.digest: each for each in packs}
        self._adopt(self._catalog().with_changes(models=models, newest=newest, packs=known))

    async def push(
        self, name: str, size: Bytes, digest: str, chunks: AsyncIterator[bytes], *, actor: str, signature: bytes = b""
    ) -> PushResult:
        """name: empty for a model that is only known by its digest. signature: an OpenSSF bundle; empty for none.

        Raises ShoalError(NAME_INVALID | MODEL_DIGEST | MODEL_TOO_LARGE | MODEL_INVALID | SIGNATURE_INVALID |
        SIGNATURE_EXPIRED | MODEL_ROLLBACK | .. | DISK_FULL | STORE_FULL).
        """
        profile = await self.receive(name, size, digest, chunks, signature=signature)
        return await self.keep(profile, name, digest, actor=actor, signature=signature)

    async def receive(
        self,
        name: str,
        size: Bytes,
        digest: str,
        chunks: AsyncIterator[bytes],
        *,
        signature: bytes = b"",
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> ModelProfile | None:
        """The first half of a push, which a caller may abort: verifies the bytes and returns their profile. None: the
        model is known already, and no older version computed its profile. shapes: by input, those that its costs are
        counted at and it is warmed up with.
        """
        if name:
            check_name(name, "model name")
        if signature:
            self._check_signature(signature, digest)
        if digest in self._catalog().models and await self._blobs.stat(digest) is not None:
            profile = self._catalog().models[digest].profile
            if shapes and not self._is_counted_at(digest, shapes):
                self._check_unused(digest)
            elif profile.version >= PROFILE_VERSION:
                return None
            else:
                return await self._inspect_again(size, digest, chunks, profile)
        return await self._ingest(size, digest, chunks, shapes)

    async def _inspect_again(
        self, size: Bytes, digest: str, chunks: AsyncIterator[bytes], known: ModelProfile
    ) -> ModelProfile | None:
        """At the shapes that what runs was placed at. None: today's rules refuse it, and the model is as it was."""
        try:
            profile = await self._ingest(size, digest, chunks, known.reference_shapes)
        except ShoalError as error:
            if error.code is Code.MODEL_DIGEST:
                raise
            log.warning("inspection_failed", digest=digest, error=str(error))
            return None
        if not is_newer(profile, known):  # `keep` lets it replace none
            log.warning("inspection_failed", digest=digest, error=other_profile(profile, known))
        return profile

    def _is_counted_at(self, digest: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        known = self._catalog().models[digest].profile.reference_shapes
        return all(
            len(known.get(name, ())) == len(shape)
            and all(length in (-1, now) for length, now in zip(shape, known.get(name, ()), strict=True))
            for name, shape in shapes.items()
        )

    def _check_unused(self, digest: str) -> None:
        """What runs was placed at the shapes that are known. Raises ShoalError(IN_USE)."""
        if users := self._catalog().users_of(digest):
            raise refuse(
                Code.IN_USE, f"it runs as {', '.join(users)}, counted at other shapes", "a model that nothing uses",
                "spec.model.shapes of the workload, or delete those first",
            )  # fmt: skip

    async def receive_pack(self, model: str, size: Bytes, digest: str, chunks: AsyncIterator[bytes]) -> PackRef:
        """Verifies and inspects samples for a pushed model (name or digest); the result goes to `keep_pack`.

        Raises ShoalError(MODEL_UNKNOWN | MODEL_DIGEST | MODEL_TOO_LARGE | MODEL_INVALID | DISK_FULL).
        """
        profile = self._profile(model)
        if size > PACK_BYTES:
            raise refuse(
                Code.MODEL_TOO_LARGE, f"{show_bytes(size)} of samples", f"at most {show_bytes(Bytes(PACK_BYTES))}",
                "fewer or smaller samples",
            )  # fmt: skip
        known = self._catalog().packs.get(digest)
        if known is not None and profile.digest in known.read_for and await self._blobs.stat(digest) is not None:
            return known.read_for[profile.digest]
        path = await self._blobs.write(chunks, size=size, digest=digest)
        try:
            return await self._inspector.inspect_pack(path, digest, profile)
        except BaseException:
            await self._delete_unrecorded(digest)
            raise

    async def receive_recording(
        self, by: Provenance, size: Bytes, digest: str, chunks: AsyncIterator[bytes]
    ) -> PackRef:
        """`receive_pack` for what a replica recorded: one upload at a time of each, because room is kept for all that
        it declares, however slowly it comes. Raises ShoalError(OVERLOADED) besides.
        """
        if by.assignment in self._recorders:
            raise refuse(
                Code.OVERLOADED, f"{by.assignment} is sending a recording already", "one at a time",
                "try again when it has ended",
            )  # fmt: skip
        self._recorders.add(by.assignment)
        try:
            return await self.receive_pack(by.model, size, digest, chunks)
        finally:
            self._recorders.discard(by.assignment)

    async def keep_pack(self, pack: PackRef, model: str, *, actor: str, by: Provenance | None = None) -> bool:
        """Records a pack; returns True if it was known before. by: the replica whose answers it holds; the pack becomes
        the model's reference. The first recording counts, a later one is a CONFLICT.

        Raises ShoalError(MODEL_UNKNOWN | CONFLICT | MODEL_INVALID | STORE_FULL | ..).
        """
        try:
            async with self._fence.documents_lock:
                return await self._keep_pack(pack, self._profile(model).digest, actor, by)
        finally:
            await self._delete_unrecorded(pack.digest)  # if recording failed

    async def _keep_pack(self, pack: PackRef, model: str, actor: str, by: Provenance | None) -> bool:
        catalog = self._catalog()
        known = catalog.packs.get(pack.digest) or PackRecord(pack.digest, self._clock.wall(), actor, {})
        after = replace(known, read_for={**known.read_for, model: pack})
        event = LogEvent("SAMPLES_KEPT", pack.digest, f"{pack.count} for {model}", actor)
        if by is not None:
            held = catalog.references.get((by.model, by.samples))
            if held is not None and held.by == by.assignment:
                return True
            event = _recording_event(pack, by, held, actor)
            after = replace(after, recorded=(*known.recorded, by))
        if after == known:
            return True
        await self._check_bytes(pack.digest)
        await self._fence.commit({PACKS + pack.digest: codec.dump(after)}, events=[event])
        self._adopt(self._catalog().with_changes(packs={**self._catalog().packs, pack.digest: after}))
        return False

    def _profile(self, model: str) -> ModelProfile:
        catalog = self._catalog()
        digest = catalog.digest_of(model)
        if digest is None:
            raise ShoalError(unknown_model(model))
        return catalog.models[digest].profile

    async def _delete_unrecorded(self, digest: str) -> None:
        """Deletes bytes that no record names. Takes the lock, so that it does not race with another push of the same
        bytes.
        """
        async with self._fence.documents_lock:
            if not self._is_recorded(digest):
                await self._delete_bytes(digest)

    def _is_recorded(self, digest: str) -> bool:
        return digest in self._catalog().models or digest in self._catalog().packs

    async def _delete_bytes(self, digest: str) -> None:
        """Deletes bytes that no record of the store names, as long as this coordinator leads. What it remembers does
        not suffice: all coordinators of the region share the bytes, so one that stood still might delete what the next
        leader has recorded. Needs the lock.
        """

        async def is_unrecorded() -> bool:
            try:
                if any([await self._store.read(kind + digest) for kind in (MODELS, PACKS)]):
                    return False
                if await self._fence.is_current():
                    return True
                why = "another coordinator leads"
            except ShoalError as error:  # a commit without an answer may have been made
                why = str(error)
            log.warning("model_bytes_kept", digest=digest, error=why)
            return False

        await self._blobs.delete(digest, is_unrecorded)

    async def _check_bytes(self, digest: str) -> None:
        """Another push of the same bytes may have failed after their inspection and deleted them.

        Raises ShoalError(MODEL_UNKNOWN).
        """
        if await self._blobs.stat(digest) is None:
            raise refuse(
                Code.MODEL_UNKNOWN, f"the bytes of {digest} went while they were pushed", "bytes that stay",
                "push them again",
            )  # fmt: skip

    async def push_guest(self, region: str, size: Bytes, digest: str, chunks: AsyncIterator[bytes]) -> None:
        """A push of bytes that another region lends for its guest workload. Reads no bytes if the model is here
        already. Raises ShoalError as `push` does, and as `chunks` does.
        """
        if digest in self._catalog().models:
            return
        profile = await self.receive("", size, digest, chunks)
        await self.keep(profile, "", digest, actor=f"region {region}", guest_of=region)

    async def keep(
        self,
        profile: ModelProfile | None,
        name: str,
        digest: str,
        *,
        actor: str,
        signature: bytes = b"",
        guest_of: str = "",
        has_shapes: bool = False,
    ) -> PushResult:
        """The second half of a push: records the model. A guest model that is pushed here becomes this region's own.

        has_shapes: whether the profile is at shapes that were given, and replaces another one.
        """
        try:
            async with self._fence.documents_lock:
                signed = self._check_signature(signature, digest) if signature else None
                known = self._catalog().models.get(digest)
                if known is None and profile is None:
                    raise ShoalError(unknown_model(digest))
                if known is None:
                    assert profile is not None
                    await self._check_bytes(digest)
                    model = ModelRecord(digest, (), self._clock.wall(), actor, profile, guest_of=guest_of)
                else:
                    model = known if guest_of else replace(known, guest_of="")
                if profile is not None and model.profile != profile:
                    if has_shapes and profile.reference_shapes != model.profile.reference_shapes:
                        self._check_unused(digest)
                    if has_shapes or is_newer(profile, model.profile):
                        model = replace(model, profile=profile)
                if name and name not in model.names:
                    model = replace(model, names=tuple(sorted({*model.names, name})))
                if signed is not None:
                    model = self._with_signature(model, signature, signed)
                if model != known:
                    await self._record(model, name, actor, signed)
                return PushResult(model, was_known=known is not None and not known.guest_of)
        except BaseException:
            await self._delete_unrecorded(digest)
            raise

    async def inspect(self, size: Bytes, digest: str, chunks: AsyncIterator[bytes]) -> PushResult:
        """Inspects like `push` and stores nothing."""
        known = self._catalog().models.get(digest)
        if known is not None:
            return PushResult(known, was_known=True)
        profile = await self._ingest(size, digest, chunks)
        await self._delete_unrecorded(digest)
        return PushResult(ModelRecord(digest, (), self._clock.wall(), _NOBODY, profile), was_known=False)

    async def allow_rollback(self, model: str, version: int, actor: str) -> tuple[str, ...]:
        """Allows an older signed version until a version newer than the newest is pushed. model: its name as signed or
        as pushed, or a digest. Returns the lines (key and model) that it was allowed for.

        Raises ShoalError(MODEL_UNKNOWN | INVALID_ARGUMENT).
        """
        async with self._fence.documents_lock:
            lines = self._lines(model)
            if not lines:
                raise refuse(
                    Code.MODEL_UNKNOWN,
                    f"no signed version of {model!r:.120}",
                    "a model that was pushed with a signature",
                    "see SIGNED BY of `shoal model ls`",
                )
            changed = [
                replace(each, allowed=tuple(sorted({*each.allowed, version})))
                for each in lines
                if 0 <= version < each.version
            ]
            if not changed:
                raise refuse(
                    Code.INVALID_ARGUMENT,
                    f"version {version}",
                    f"one older than {max(each.version for each in lines)}, the newest that was seen",
                    "newer ones need no leave",
                )
            event = LogEvent("ROLLBACK_ALLOWED", model, f"version {version}", actor)
            await self._fence.commit({each.store_key: codec.dump(each) for each in changed}, events=[event])
            newest = {**self._catalog().newest, **{each.line: each for each in changed}}
            self._adopt(self._catalog().with_changes(newest=newest))
            return tuple(each.line for each in changed)

    async def remove(self, name: str, actor: str) -> tuple[str, bool]:
        """Returns (digest, whether the bytes were deleted too). name: a name or a digest. Raises
        ShoalError(MODEL_UNKNOWN | IN_USE).
        """
        async with self._fence.documents_lock:
            return await self._remove(name, actor)

    async def fetch(self, digest: str, offset: int) -> tuple[Bytes, AsyncIterator[bytes]]:
        """(size, bytes from offset on). Raises ShoalError(MODEL_UNKNOWN | INVALID_ARGUMENT)."""
        known = digest in self._catalog().models or digest in self._catalog().packs
        size = await self._blobs.stat(digest) if known else None
        if size is None:
            raise ShoalError(unknown_model(digest))
        if not 0 <= offset <= size:
            raise refuse(Code.INVALID_ARGUMENT, f"offset {offset}", f"0 to {size}", "start at 0")
        return size, self._blobs.read(digest, offset)

    async def _remove(self, name: str, actor: str) -> tuple[str, bool]:
        catalog = self._catalog()
        if name in catalog.packs:
            await self._remove_pack(name, actor)
            return name, True
        digest = name if name in catalog.models else catalog.digest_of(name)
        if digest is None:
            raise ShoalError(unknown_model(name))
        model = catalog.models[digest]
        names = () if name == digest else tuple(other for other in model.names if other != name)
        if names:
            await self._record(replace(model, names=names), "", actor, None)
            return digest, False
        if users := catalog.users_of(digest):
            raise refuse(
                Code.IN_USE,
                f"{name!s:.120} runs as {', '.join(users)}",
                "a model that nothing uses",
                "delete those first",
            )
        models = {key: other for key, other in catalog.models.items() if key != digest}
        read = {key: _pack_for_models(pack, models) for key, pack in catalog.packs.items()}
        gone = [key for key, pack in read.items() if not pack.read_for]
        packs = {key: pack for key, pack in read.items() if pack.read_for}
        await self._fence.commit(
            {PACKS + key: codec.dump(pack) for key, pack in packs.items() if pack != catalog.packs[key]},
            deletes=(MODELS + digest, *(PACKS + key for key in gone)),
            events=[
                *(LogEvent("SAMPLES_REMOVED", key, "", actor) for key in gone),
                LogEvent("MODEL_REMOVED", digest, name, actor),
            ],
        )
        self._adopt(self._catalog().with_changes(models=models, packs=packs))
        for each in (*gone, digest):
            await self._delete_bytes(each)
        return digest, True

    async def _remove_pack(self, digest: str, actor: str) -> None:
        if users := self._catalog().users_of(digest):
            raise refuse(
                Code.IN_USE, f"{digest} are the samples of {', '.join(users)}", "samples that nothing uses",
                "apply those without them first",
            )  # fmt: skip
        await self._fence.commit({}, deletes=(PACKS + digest,), events=[LogEvent("SAMPLES_REMOVED", digest, "", actor)])
        left = {key: other for key, other in self._catalog().packs.items() if key != digest}
        self._adopt(self._catalog().with_changes(packs=left))
        await self._delete_bytes(digest)

    async def _ingest(
        self, size: Bytes, digest: str, chunks: AsyncIterator[bytes],
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> ModelProfile:  # fmt: skip
        path = await self._blobs.write(chunks, size=size, digest=digest)
        try:
            return await self._inspector.inspect(path, digest, shapes)
        except BaseException:
            await self._delete_unrecorded(digest)
            raise

    def _check_signature(self, signature: bytes, digest: str) -> VerifiedSignature:
        """The verified statement. Raises ShoalError(SIGNATURE_INVALID | SIGNATURE_EXPIRED | MODEL_ROLLBACK)."""
        catalog = self._catalog()
        keys = publisher_keys(catalog.region(self._region))
        judged = check_signature(signature, digest, keys, verify_bundle)
        if judged.statement is None:
            assert judged.refusal is not None
            raise ShoalError(judged.refusal)
        refusal = expiry_refusal(judged, keys, self._clock.wall())
        known = catalog.models.get(digest)
        if refusal is None and (known is None or signature not in known.signatures):
            refusal = rollback_refusal(judged.statement, catalog.newest.get(judged.statement.lineage))
        if refusal is not None:
            raise ShoalError(refusal)
        return judged.statement

    def _with_signature(self, model: ModelRecord, signature: bytes, signed: VerifiedSignature) -> ModelRecord:
        """The model with this signature. Drops an earlier one by the same key, and those that no longer verify."""
        keys = publisher_keys(self._catalog().region(self._region))
        others = [
            check_signature(bundle, model.digest, keys, verify_bundle)
            for bundle in model.signatures
            if bundle != signature
        ]
        kept = [
            each.bundle
            for each in others
            if each.statement is not None and each.statement.fingerprint != signed.fingerprint
        ]
        return replace(model, signatures=(*kept, signature))

    def _lines(self, model: str) -> list[NewestVersion]:
        """The newest versions recorded for a model by any of its names."""
        catalog = self._catalog()
        found = {each.line: each for each in catalog.newest.values() if each.line.partition("/")[2] == model}
        digest = catalog.digest_of(model)
        record = catalog.models[digest] if digest is not None else None
        for judged in catalog.signature_checks(self._region, record, verify_bundle) if record is not None else ():
            if judged.statement is not None and (newest := catalog.newest.get(judged.statement.lineage)) is not None:
                found[newest.line] = newest
        return list(found.values())

    async def _record(self, model: ModelRecord, name: str, actor: str, signed: VerifiedSignature | None) -> None:
        """Stores the model; a name that another model had moves to it. signed: the statement of its new signature; None
        for none.
        """
        models = dict(self._catalog().models)
        changed = {model.digest: model}
        for other in models.values():
            if name and name in other.names and other.digest != model.digest:
                changed[other.digest] = replace(other, names=tuple(each for each in other.names if each != name))
        puts = {MODELS + digest: codec.dump(each) for digest, each in changed.items()}
        newest = self._catalog().newest
        if signed is not None and (after := newer_version(signed, newest.get(signed.lineage))) is not None:
            puts[after.store_key] = codec.dump(after)
            newest = {**newest, after.line: after}
        event = LogEvent("MODEL_KEPT", model.digest, ", ".join(model.names), actor)
        await self._fence.commit(puts, events=[event])
        self._adopt(self._catalog().with_changes(models={**models, **changed}, newest=newest))


def _pack_for_models(pack: PackRecord, models: Collection[str]) -> PackRecord:
    """The pack reduced to those models."""
    return replace(
        pack,
        read_for={model: found for model, found in pack.read_for.items() if model in models},
        recorded=tuple(each for each in pack.recorded if each.model in models),
    )


def _recording_event(pack: PackRef, by: Provenance, held: Reference | None, actor: str) -> LogEvent:
    """held: the reference in force. Raises ShoalError(CONFLICT | MODEL_INVALID)."""
    if held is not None:
        raise refuse(
            Code.CONFLICT, f"{by.model} has a reference: {held.pack.digest}", "a model without one",
            "what was first recorded counts; `shoal model rm` drops it",
        )  # fmt: skip
    if not pack.answers:
        raise refuse(Code.MODEL_INVALID, "a recording without answers", "every output of the model", "update the agent")
    told = f"{pack.count} answers of {by.model} by {by}"
    return LogEvent("REFERENCE_RECORDED", pack.digest, told, actor, by.node, by.workload)


def unknown_model(name: str) -> Refusal:
    return Refusal(Code.MODEL_UNKNOWN, f"no model {name!r:.120}", "a pushed model", "see `shoal model ls`")
