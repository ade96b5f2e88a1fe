"""After an upgrade: the profiles that an older version computed, computed again from the stored bytes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import structlog

from shoal.coordinator import codec
from shoal.coordinator.controllers.log.context import RegionContext
from shoal.coordinator.core.catalog.model import MODELS, Catalog
from shoal.coordinator.ports import Blobs, Inspector, StaleRevision
from shoal.types.codes import Code, ShoalError
from shoal.types.profile import PROFILE_VERSION, ModelProfile
from shoal.types.units import Seconds

_RETRY_S: Final = Seconds(600.0)
"""Until a store that took no profile is tried again. A choice."""
_LEAST_PAUSE_S: Final = Seconds(1.0)
"""Between two models, so that what fails at once is not logged a thousand times a second. A choice."""

log: Final = structlog.get_logger("shoal.coordinator")


class ProfileRefresh:
    """Inspects one model after the other, where it is stored and with the lowest priority. After each it pauses for as
    long as that took, so that a leader has more than half of each core while its agents come back.
    """

    def __init__(
        self,
        context: RegionContext,
        blobs: Blobs,
        inspector: Inspector,
        catalog: Callable[[], Catalog],
        adopt: Callable[[Catalog], None],
    ) -> None:
        self._fence = context.fence
        self._clock = context.clock
        self._blobs = blobs
        self._inspector = inspector
        self._catalog = catalog
        self._adopt = adopt
        self._refused = set[str]()
        """Models that stay as they were: today's rules refuse them, or their bytes are gone."""
        self._refreshed = 0

    async def run(self) -> None:
        """Until each model has a profile of this version, is refused, or another coordinator leads."""
        while self._waiting():
            try:
                await self._refresh_all()
            except StaleRevision:
                return
            except ShoalError as error:
                if error.code is Code.NOT_LEADER:
                    return
                log.warning("profiles_not_recorded", left=len(self._waiting()), retry_s=_RETRY_S, error=str(error))
                await self._clock.sleep(_RETRY_S)
                continue
            log.info("profiles_refreshed", refreshed=self._refreshed, refused=len(self._refused))

    def _waiting(self) -> list[str]:
        """Digests of the models that are still to be inspected."""
        models = self._catalog().models.values()
        return sorted(
            each.digest
            for each in models
            if each.profile.version < PROFILE_VERSION and each.digest not in self._refused
        )

    async def _refresh_all(self) -> None:
        """Raises StaleRevision, ShoalError(STORE_FULL | STORE_UNAVAILABLE | NOT_LEADER | ..)."""
        for digest in self._waiting():
            known = self._catalog().models.get(digest)
            if known is None or known.profile.version >= PROFILE_VERSION:
                continue  # removed, or pushed again, meanwhile
            began = self._clock.now()
            profile = await self._inspect(digest, known.profile)
            if profile is not None:
                await self._record(profile)
            await self._clock.sleep(Seconds(max(self._clock.now() - began, _LEAST_PAUSE_S)))

    async def _inspect(self, digest: str, known: ModelProfile) -> ModelProfile | None:
        """At the shapes that what runs was placed at. None: the model is refused."""
        try:
            path, shapes = self._blobs.path(digest), known.reference_shapes
            profile = await self._inspector.inspect(path, digest, shapes, is_background=True)
        except (ShoalError, OSError) as error:
            if digest in self._catalog().models:
                self._refused.add(digest)
                log.warning("inspection_failed", digest=digest, error=str(error))
            return None
        if not is_newer(profile, known):
            self._refused.add(digest)
            return None
        return profile

    async def _record(self, profile: ModelProfile) -> None:
        """Without an event: nobody pushed anything, and a thousand of them would displace what people look for."""
        async with self._fence.documents_lock:
            models = self._catalog().models
            now = models.get(profile.digest)
            if now is None or not is_newer(profile, now.profile):
                return
            after = replace(now, profile=profile)
            await self._fence.commit({MODELS + now.digest: codec.dump(after)})
            self._adopt(self._catalog().with_changes(models={**models, now.digest: after}))
            self._refreshed += 1


def is_newer(profile: ModelProfile, known: ModelProfile) -> bool:
    """Of a newer version, at the same shapes."""
    return profile.reference_shapes == known.reference_shapes and profile.version > known.version
