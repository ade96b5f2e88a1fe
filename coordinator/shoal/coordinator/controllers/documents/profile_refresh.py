"""After an upgrade: the profiles that an older version computed, computed again from the stored bytes."""

import errno
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
"""Until a store that took no profile, or a machine that could not inspect, is tried again. A choice."""
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
            except (ShoalError, OSError) as error:
                if isinstance(error, ShoalError) and error.code is Code.NOT_LEADER:
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
        """Raises StaleRevision, ShoalError(STORE_FULL | STORE_UNAVAILABLE | NOT_LEADER | INTERNAL | ..), OSError."""
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
        """At the shapes that what runs was placed at. None: the model is refused. Raises ShoalError(INTERNAL) and
        OSError where this machine could not inspect it."""
        try:
            path, shapes = self._blobs.path(digest), known.reference_shapes
            profile = await self._inspector.inspect(path, digest, shapes, is_background=True)
        except (ShoalError, OSError) as error:
            if is_passing(error):
                raise
            self._refuse(digest, f"{error}")
            return None
        if not is_newer(profile, known):
            self._refuse(digest, other_profile(profile, known))
            return None
        return profile

    def _refuse(self, digest: str, why: str) -> None:
        if digest in self._catalog().models:
            self._refused.add(digest)
            log.warning("inspection_failed", digest=digest, error=why)

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


def is_passing(error: ShoalError | OSError) -> bool:
    """Whether this machine is at fault, and may not be later. A disk that cannot read a file says EIO each time."""
    return error.code is Code.INTERNAL if isinstance(error, ShoalError) else error.errno != errno.EIO


def other_profile(profile: ModelProfile, known: ModelProfile) -> str:
    """Why a profile that is not `is_newer` replaces none: the first input at another shape, or its version."""
    found, asked = profile.reference_shapes, known.reference_shapes
    for name in sorted({*found, *asked}):
        if found.get(name) != asked.get(name):
            return f"input {name!r:.80} at {found.get(name)!s:.80}, what runs was placed at {asked.get(name)!s:.80}"
    return f"a profile of version {profile.version} after one of {known.version}"
