"""Sizes and timings that both ends of a connection must agree on."""

from dataclasses import dataclass, replace
from typing import Final

INFER_BYTES: Final = 64 * 2**20
"""Largest inference request or response, expanded (the default cap of Triton's HTTP front end)."""
PACK_BYTES: Final = 64 * 2**20
"""Largest pack of samples: the file, and all its arrays together."""
LINK_BYTES: Final = 4 * 2**20
"""Largest message on an agent's link or the operator API."""
ENROL_BYTES: Final = 32 * 2**10
CHUNK_BYTES: Final = 256 * 2**10
"""Artifacts travel in chunks of this size."""

KEEPALIVE_S: Final = 2.0
KEEPALIVE_TIMEOUT_S: Final = 3.0
"""Half-open connections are found by pings, never by the kernel's timeout. A server has the callers' beats besides."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Of a caller. connect_s: for TCP, TLS and HTTP/2 together, six round trips. ping_s: of silence before a ping.
    The connection is given up when what was sent did not arrive within `lost_s` (as the peer's kernel sees it), or a
    ping was not answered within `stuck_s` (by the peer itself). idle: also without calls; else one that broke in
    silence is found by the next call."""

    connect_s: float
    ping_s: float
    lost_s: float
    stuck_s: float
    idle: bool


HANDSHAKE_S: Final = 10.0
"""Until TLS and HTTP/2 are agreed on; gRPC's own default is two minutes."""

LINK: Final = Patience(connect_s=HANDSHAKE_S, ping_s=1.0, lost_s=1.9, stuck_s=1.9, idle=True)
"""A half-open link is found within 3 s. A caller that gives up while the coordinator still works on its handshake makes
it work in vain: where thousands call at once, for all of them and for ever."""
PEER: Final = Patience(connect_s=2.0, ping_s=0.3, lost_s=0.6, stuck_s=1.0, idle=False)
"""Between coordinators, whose messages are small: within 1 s a way that breaks is found, within 2 s a peer that is
stopped."""
ROAD: Final = replace(PEER, stuck_s=30.0)
"""Of requests between fronts: on a narrow road a ping waits behind megabytes, for as long as they take, and grpc counts
nothing but its answer. A road that breaks is found by what its end does not acknowledge; a peer that is stopped, whose
kernel acknowledges, by signs of life on a connection of its own."""
WIDE: Final = replace(ROAD, lost_s=30.0)
"""Of large requests, on a connection of their own: they fill a narrow road until it drops what they send, and again as
it is sent again, so that nothing is acknowledged for longer than a road that broke takes to be found. That it broke,
signs of life tell here too."""
LIFE: Final = replace(PEER, stuck_s=0.6, idle=True)
LIFE_AFAR: Final = replace(LIFE, lost_s=1.5, stuck_s=1.5)
"""Of the connection that carries nothing but pings, inside a region and to another: they wait for what the road itself
holds, never for what a sender does."""
BULK: Final = Patience(connect_s=5.0, ping_s=10.0, lost_s=20.0, stuck_s=30.0, idle=False)
"""Of operators, and of whoever moves much over a line that may be slow: a ping waits behind all that is on its way."""

LINK_CONNECTIONS: Final = 10_000
"""At a coordinator: of agents, operators and whoever tries."""
ENROL_CONNECTIONS: Final = 1024
ENROL_STREAMS: Final = 16
"""On one connection."""
DATA_CONNECTIONS: Final = 4096
"""At each gRPC port of a front."""

Options = tuple[tuple[str, int | str], ...]


def server_options(
    max_bytes: int,
    connections: int = LINK_CONNECTIONS,
    *,
    answers: int | None = None,
    stuck_s: float = KEEPALIVE_TIMEOUT_S,
) -> Options:
    """connections: at most, of one port; more are closed before TLS costs anything. answers: most bytes of one; as of
    what comes in, unless given. stuck_s: as of Patience."""
    return (
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", max_bytes if answers is None else answers),
        ("grpc.so_reuseport", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(stuck_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(stuck_s * 1000)),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
    )


def enrol_options() -> Options:
    """Of the server where strangers call: whatever one does there, its connection ends within 15 s. What it answers is
    its own: a directory of a thousand regions, to one that joins."""
    return (
        *server_options(ENROL_BYTES, ENROL_CONNECTIONS, answers=LINK_BYTES),
        ("grpc.max_concurrent_streams", ENROL_STREAMS),
        ("grpc.max_connection_age_ms", 10_000),
        ("grpc.max_connection_age_grace_ms", 5_000),
    )


def channel_options(max_bytes: int, *, server_name: str | None = None, patience: Patience = BULK) -> Options:
    """server_name: the DNS name that the server's certificate must carry, when it is not the address dialled."""
    options: Options = (
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", max_bytes),
        ("grpc.keepalive_time_ms", int(patience.ping_s * 1000)),
        # grpc makes TCP_USER_TIMEOUT of this one; its pings have the next one, a minute if it is left out.
        ("grpc.keepalive_timeout_ms", int(patience.lost_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(patience.stuck_s * 1000)),
        ("grpc.keepalive_permit_without_calls", int(patience.idle)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name, how long one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", int(patience.connect_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    )
    if server_name is not None:
        options = (*options, ("grpc.ssl_target_name_override", server_name))
    return options
