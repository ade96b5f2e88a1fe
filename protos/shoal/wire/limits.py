"""Sizes and timings that both ends of a connection must agree on."""

from typing import Final

INFER_BYTES: Final = 64 * 2**20
"""Largest inference request or response, expanded (the default cap of Triton's HTTP front end)."""
LINK_BYTES: Final = 4 * 2**20
"""Largest message on an agent's link or the operator API."""
ENROL_BYTES: Final = 32 * 2**10
CHUNK_BYTES: Final = 256 * 2**10
"""Artifacts travel in chunks of this size."""

KEEPALIVE_S: Final = 2.0
KEEPALIVE_TIMEOUT_S: Final = 3.0
"""Half-open connections are found by pings, never by the kernel's timeout."""

Options = tuple[tuple[str, int | str], ...]


def server_options(max_bytes: int) -> Options:
    return (
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", max_bytes),
        ("grpc.so_reuseport", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.http2.max_ping_strikes", 0),
    )


def channel_options(max_bytes: int, *, server_name: str | None = None) -> Options:
    """server_name: the DNS name that the server's certificate must carry, when it is not the address dialled."""
    options: Options = (
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", max_bytes),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    )
    if server_name is not None:
        options = (*options, ("grpc.ssl_target_name_override", server_name))
    return options
