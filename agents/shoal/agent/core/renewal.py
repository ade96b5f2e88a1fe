"""When a node's certificate is due to be renewed, and when to try again."""

import hashlib

from shoal.agent.core.backoff import delay
from shoal.types.codes import Code
from shoal.types.units import Seconds, Wall

SHARE = 2 / 3
"""Of a certificate's life; the rest is for what may go wrong."""
SPREAD = 0.05
"""Of its life: nodes that joined together do not renew together."""
FOLLOW_S = 10.0
"""Within which a fleet's nodes turn to another CA, one after another."""
ANSWERED_CAP_S = 300.0
VALID_CAP_S = 60.0
LATE_CAP_S = 3.0
"""The longest waits between two tries: after a refusal, while the certificate is good, and once it has ended."""


def due_at(issued: Wall, ends: Wall, node: str) -> Wall:
    """issued: when it was made, which is later than the date that it begins with."""
    life = ends - issued
    return Wall(issued + life * (SHARE - SPREAD * _share(node)))


def is_past(offered_ends: Wall, held_ends: Wall, now: Wall) -> bool:
    """Whether a certificate that is offered has ended already, while the one that is held has not.

    Who issued it has a clock that is behind. Ours may be behind as well, but is ahead of the truth only where it was so
    when the one that is held was issued; and then that one has ended too."""
    return offered_ends <= now < held_ends


def follow_after(node: str) -> Seconds:
    """Seconds to wait before turning to another CA."""
    return Seconds(FOLLOW_S * _share(node))


def retry_after(node: str, attempt: int, refused: Code, *, ended: bool) -> Seconds:
    """Seconds before try number `attempt`, from 0. A coordinator that is out of reach costs one connection to find out
    so, and whoever comes back to it with an ended certificate shall not wait."""
    cap = ANSWERED_CAP_S if refused is Code.RENEW_DENIED else LATE_CAP_S if ended else VALID_CAP_S
    return delay(node, attempt, base_s=1.0, cap_s=cap)


def _share(node: str) -> float:
    return int.from_bytes(hashlib.sha256(node.encode()).digest()[:8], "big") / 2**64
