"""How a caller finds out that its peer, or the way to it, is gone."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Keepalive settings of a caller. All times are in seconds."""

    # Limit for TCP, TLS and HTTP/2 together, which take six round trips.
    connect_timeout_s: float
    # Silence before a ping is sent.
    ping_interval_s: float
    # The connection is given up when the peer's kernel has not acknowledged sent data for this long (TCP_USER_TIMEOUT).
    user_timeout_s: float
    # The connection is given up when the peer itself has not answered a ping for this long.
    ping_timeout_s: float
    # True: pings are sent without calls too. False: a connection that broke silently is found by the next call.
    without_calls: bool
