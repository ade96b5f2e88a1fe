"""The coordinator's clock and id source. Lint forbids all other modules to read a clock."""

import asyncio
import secrets
import time

from shoal.types.units import Elapsed, Seconds, Wall


class CoordinatorClock:
    """ports.Clock. Elapsed is the machine's monotonic clock; compare its values only within one run of the process."""

    def now(self) -> Elapsed:
        return Elapsed(time.monotonic())

    def wall(self) -> Wall:
        return Wall(time.time())

    async def sleep(self, seconds: Seconds) -> None:
        await asyncio.sleep(seconds)


class SystemIds:
    """ports.IdSource from the kernel's random source."""

    def name(self, kind: str) -> str:
        return f"{kind}-{secrets.token_hex(6)}"

    def secret(self) -> str:
        """160 bits, base64url."""
        return secrets.token_urlsafe(20)
