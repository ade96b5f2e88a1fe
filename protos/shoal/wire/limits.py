"""Size limits and timings that both ends of a connection must agree on."""

from dataclasses import replace
from typing import Final

from shoal.http2.keepalive import Keepalive

INFER_BYTES: Final = 64 * 2**20
"""Largest inference request or response, expanded (the default limit of Triton's HTTP front end)."""
MODEL_BYTES: Final = 2**31 - 1
"""Largest model, as one file: protobuf itself ends below 2 GiB."""
LINK_BYTES: Final = 4 * 2**20
"""Largest message on an agent's link or the operator API."""
ENROL_BYTES: Final = 32 * 2**10
CHUNK_BYTES: Final = 256 * 2**10
"""Artifacts are sent in chunks of this size."""

KEEPALIVE_S: Final = 2.0
KEEPALIVE_TIMEOUT_S: Final = 3.0
"""Half-open connections are found by pings, because the kernel's timeout takes too long. Servers also see their
callers' heartbeats."""


HANDSHAKE_S: Final = 10.0
"""Limit for TLS and HTTP/2 negotiation; gRPC's own default is two minutes."""

LINK: Final = Keepalive(
    connect_timeout_s=HANDSHAKE_S, ping_interval_s=1.0, user_timeout_s=1.9, ping_timeout_s=1.9, without_calls=True
)
"""A half-open link is found within 3 s. If a caller gives up while the coordinator still works on its handshake, that
work is wasted. With thousands of concurrent callers that would repeat for all of them without end."""
PEER: Final = Keepalive(
    connect_timeout_s=2.0, ping_interval_s=0.3, user_timeout_s=0.6, ping_timeout_s=1.0, without_calls=False
)
"""Between coordinators, whose messages are small: finds a broken connection within 1 s, a stopped peer within 2 s."""
FORWARD: Final = replace(PEER, ping_timeout_s=30.0)
"""For requests between fronts. On a slow link a ping waits behind megabytes of data for as long as they take, and grpc
counts only the ping's answer. A broken connection is found by missing TCP acknowledgements. A stopped peer, whose
kernel still acknowledges, is found by liveness pings on a separate connection."""
FORWARD_LARGE: Final = replace(FORWARD, user_timeout_s=30.0)
"""For large requests, on a connection of their own. They can fill a slow link until it drops data, also on
retransmission. Acknowledgements are then missing for longer than the detection of a broken connection takes. Liveness
pings find a broken connection here too."""
LIVENESS: Final = replace(PEER, ping_timeout_s=0.6, without_calls=True)
LIVENESS_REMOTE: Final = replace(LIVENESS, user_timeout_s=1.5, ping_timeout_s=1.5)
"""LIVENESS and this one are for connections that carry only pings, inside a region and to another region. Such pings
wait for what the network path itself queues, never for the sender's data."""
BULK: Final = Keepalive(
    connect_timeout_s=5.0, ping_interval_s=10.0, user_timeout_s=20.0, ping_timeout_s=30.0, without_calls=False
)
"""For operators, and for large transfers over a link that may be slow: a ping waits behind all data in flight."""

LINK_CONNECTIONS: Final = 10_000
"""Limit at a coordinator, for agents, operators and unauthenticated callers together."""
ENROL_CONNECTIONS: Final = 1024
ENROL_STREAMS: Final = 16
"""Limit on one connection."""
DATA_CONNECTIONS: Final = 4096
"""Limit at the data port of a front."""

Options = tuple[tuple[str, int | str], ...]


def server_options(
    max_bytes: int,
    connections: int = LINK_CONNECTIONS,
    *,
    max_answer_bytes: int | None = None,
    ping_timeout_s: float = KEEPALIVE_TIMEOUT_S,
) -> Options:
    """gRPC options of a server.

    connections: limit of one port; further ones are closed before TLS costs anything. max_answer_bytes: largest
    response; None: `max_bytes`. ping_timeout_s: as Keepalive.ping_timeout_s.
    """
    return (
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", max_bytes if max_answer_bytes is None else max_answer_bytes),
        ("grpc.so_reuseport", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(ping_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(ping_timeout_s * 1000)),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
    )


def enrol_options() -> Options:
    """gRPC options of the server that accepts unauthenticated callers: every connection ends within 15 s. Its responses
    may be larger than its requests, because one that joins gets a directory of a thousand regions."""
    return (
        *server_options(ENROL_BYTES, ENROL_CONNECTIONS, max_answer_bytes=LINK_BYTES),
        ("grpc.max_concurrent_streams", ENROL_STREAMS),
        ("grpc.max_connection_age_ms", 10_000),
        ("grpc.max_connection_age_grace_ms", 5_000),
    )


def channel_options(max_bytes: int, *, server_name: str | None = None, keepalive: Keepalive = BULK) -> Options:
    """server_name: the DNS name that the server's certificate must carry, when it is not the address dialled."""
    options: Options = (
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", max_bytes),
        ("grpc.keepalive_time_ms", int(keepalive.ping_interval_s * 1000)),
        # grpc sets TCP_USER_TIMEOUT from this one; the next one limits its pings and is a minute if left out.
        ("grpc.keepalive_timeout_ms", int(keepalive.user_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(keepalive.ping_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", int(keepalive.without_calls)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name, this limits one attempt to connect.
        ("grpc.min_reconnect_backoff_ms", int(keepalive.connect_timeout_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    )
    if server_name is not None:
        options = (*options, ("grpc.ssl_target_name_override", server_name))
    return options
