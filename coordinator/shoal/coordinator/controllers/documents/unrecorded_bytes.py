"""Deletes bytes that no record names: of a coordinator that ended, or was replaced, during a push or a removal."""

from collections.abc import Awaitable, Callable
from typing import Final

from shoal.coordinator.ports import Blobs, Clock
from shoal.types.units import Elapsed, Seconds

DELETE_AFTER_S: Final = Seconds(24 * 3600.0)
"""Bytes are deleted when a leader has found no record of them for so long: time to replace a store that was restored
from too old a copy. A choice."""
LOOK_EVERY_S: Final = Seconds(3600.0)


class UnrecordedBytes:
    """To run while this coordinator leads."""

    def __init__(
        self,
        blobs: Blobs,
        clock: Clock,
        is_recorded: Callable[[str], bool],
        delete: Callable[[str], Awaitable[None]],
    ) -> None:
        """is_recorded: by digest, as far as this coordinator knows. delete: asks the store as well."""
        self._blobs = blobs
        self._clock = clock
        self._is_recorded = is_recorded
        self._delete = delete
        # By digest: since when no record of it has been found.
        self._since = dict[str, Elapsed]()

    async def run(self) -> None:
        while True:
            await self.look()
            await self._clock.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Raises ShoalError, OSError."""
        now = self._clock.now()
        unrecorded = [digest for digest in await self._blobs.digests() if not self._is_recorded(digest)]
        self._since = {digest: self._since.get(digest, now) for digest in unrecorded}
        for digest, since in self._since.items():
            if now - since >= DELETE_AFTER_S:
                await self._delete(digest)
