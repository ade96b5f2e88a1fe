"""The coordinator's clock and names: the only place that reads either."""

import asyncio
import secrets
import time

from shoal.types.units import Elapsed, Seconds, Wall


class SystemClock:
    """Elapsed is the machine's monotonic clock; it is compared within one run of the process only."""

    def now(self) -> Elapsed:
        return Elapsed(time.monotonic())

    def wall(self) -> Wall:
        return Wall(time.time())

    async def sleep(self, seconds: Seconds) -> None:
        await asyncio.sleep(seconds)


class SystemIds:
    """Names and secrets from the kernel's randomness."""

    def name(self, kind: str) -> str:
        return f"{kind}-{secrets.token_hex(6)}"

    def secret(self) -> str:
        """160 bits, base64url."""
        return secrets.token_urlsafe(20)
