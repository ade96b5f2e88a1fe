"""Whether a client asks again, and when. Pure."""

from dataclasses import dataclass
from typing import Final

from shoal.types import stable_hash
from shoal.types.backoff import delay
from shoal.types.codes import Refusal
from shoal.types.units import Seconds

RETRIES: Final = 3
"""How often a call is repeated, where the program does not say."""
BASE_S: Final = 0.05
CAP_S: Final = 1.0
SPREAD: Final = 0.25
"""Seconds before a call is repeated that never arrived: from the first to the second value, doubled each time."""


@dataclass(frozen=True, slots=True)
class FailedCall:
    """refusal: how it ended. retry_after_s: when the server says that it may be repeated; None where it does not.
    was_sent: False if the server has certainly not begun to answer."""

    refusal: Refusal
    retry_after_s: float | None = None
    was_sent: bool = True


def retry_delay_s(
    failed: FailedCall, attempt: int, retries: int, left_s: float, *, is_step: bool, client: str
) -> Seconds | None:
    """Seconds until the call is repeated; None: it is not.

    Only what the server says may be repeated is, and what never reached it.

    - attempt: number of this one, counted from 0; at most `retries` follow the first.
    - left_s: until the caller's deadline, by which the next attempt must begin.
    - is_step: it is a step of a session, which a server may have taken although its answer was refused.
    - client: a name that no other client has, so that clients that failed together do not come back together. A time
      that the server says is taken up to a quarter longer.
    """
    if attempt >= retries or (failed.was_sent and (failed.retry_after_s is None or is_step)):
        return None
    if failed.retry_after_s is None:
        wait_s = float(delay(client, attempt, base_s=BASE_S, cap_s=CAP_S))
    elif failed.retry_after_s < left_s:
        longest = min((1 + SPREAD) * failed.retry_after_s, left_s)
        wait_s = failed.retry_after_s + (longest - failed.retry_after_s) * stable_hash.fraction(client, str(attempt))
    else:
        wait_s = left_s
    return Seconds(wait_s) if wait_s < left_s else None
