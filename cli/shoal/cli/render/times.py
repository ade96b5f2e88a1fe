"""Times that the region's messages carry: seconds since 1970, 0 where there is none."""

from datetime import UTC, datetime
from typing import Final

_LATEST: Final = datetime.max.replace(tzinfo=UTC).timestamp()


def utc_time(stamp: float) -> datetime | None:
    """The time; None where there is none, and of what is no time, such as NaN: some of these a node has told."""
    return datetime.fromtimestamp(stamp, UTC) if 0.0 < stamp < _LATEST else None


def rfc3339(stamp: float) -> str | None:
    """To the millisecond, in UTC; None as above."""
    at = utc_time(stamp)
    return at.isoformat(timespec="milliseconds") if at is not None else None
