"""When a node's certificate is due to be renewed, and when to try again."""

from shoal.types import stable_hash
from shoal.types.backoff import delay
from shoal.types.codes import Code
from shoal.types.units import Seconds, Wall

RENEWAL_SHARE = 2 / 3
"""Share of a certificate's life after which it is renewed; the rest is a reserve for failures."""
SPREAD = 0.05
"""Share of its life by which renewals are spread: nodes that joined together do not renew together."""
CA_SWITCH_S = 10.0
"""Seconds over which the nodes of a fleet change to another CA."""
DENIED_CAP_S = 300.0
VALID_CAP_S = 60.0
EXPIRED_CAP_S = 3.0
"""Longest waits between two tries, seconds: after a denial, while the certificate is valid, and once it has expired."""


def due_at(issued: Wall, ends: Wall, node: str) -> Wall:
    """When to renew. `issued` is when the certificate was made, which is later than its not-before date."""
    life = ends - issued
    return Wall(issued + life * (RENEWAL_SHARE - SPREAD * stable_hash.fraction(node)))


def is_offer_expired(offered_ends: Wall, held_ends: Wall, now: Wall) -> bool:
    """Whether an offered certificate has expired while the held one has not.

    Then the issuer's clock is behind. Ours may be behind as well. Ours can be ahead of true time only if it was ahead
    when the held certificate was issued; then that one would have expired too.
    """
    return offered_ends <= now < held_ends


def ca_switch_delay(node: str) -> Seconds:
    """Seconds to wait before changing to another CA."""
    return Seconds(CA_SWITCH_S * stable_hash.fraction(node))


def retry_after(node: str, attempt: int, refused: Code, *, expired: bool) -> Seconds:
    """Seconds before try number `attempt`, counted from 0.

    With an expired certificate the wait is short: a try against an unreachable coordinator costs only one connection,
    and the node should return as soon as the coordinator does.
    """
    cap = DENIED_CAP_S if refused is Code.RENEW_DENIED else EXPIRED_CAP_S if expired else VALID_CAP_S
    return delay(node, attempt, base_s=1.0, cap_s=cap)
