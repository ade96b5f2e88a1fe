"""Envoy before another server: the proxy that a gateway is compared with, and TLS for what has none.

Before Shoal's front it has TLS on both sides and gRPC. Before Triton's HTTP port, which has no TLS, it ends the TLS of
clients, as an operator would have it.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from _serving.models import SMALL
from _serving.peers import AbsentError, PeerSettings, child, first_answer, free_port
from _serving.processes import on_core, tree
from _serving.servers import Address, Protocol, Server

_HTTP = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_MANAGER = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
_TLS = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3"
MANY = 100_000


@contextmanager
def running_envoy(settings: PeerSettings, name: str, behind: Server, protocol: Protocol) -> Iterator[Server]:
    """name: of what it makes together with the server behind it, whose port of this protocol it passes on.

    Raises AbsentError.
    """
    program = settings.environments / "envoy" / "bin" / "envoy"
    if not program.exists():
        raise AbsentError(f"not in {settings.environments}: shoal bench serving --install {settings.environments}")
    port, upstream = free_port(), behind.addresses[protocol]
    config, log = (settings.scratch / f"envoy-{port}.{kind}" for kind in ("json", "log"))
    is_http1 = protocol is not Protocol.GRPC
    config.write_text(json.dumps(bootstrap(port, upstream, settings.certificate, settings.key, is_http1=is_http1)))
    command = [str(program), "-c", str(config), "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
    began = time.monotonic()
    with child(on_core(settings.cores, command), log, {}) as process:
        address = Address(f"https://127.0.0.1:{port}", upstream.headers, str(settings.certificate), "localhost")
        server = Server(
            name,
            {protocol: address},
            lambda: {"envoy": [pid for pids in tree(process.pid).values() for pid in pids], **behind.processes()},
        )
        server.start_s = first_answer(server, settings.models[SMALL], began, process, log)
        yield server


def bootstrap(port: int, behind: Address, certificate: Path, key: Path, *, is_http1: bool) -> dict[str, object]:
    """Envoy's configuration: one listener with TLS, one route, one upstream, with TLS if its address says so.

    is_http1: HTTP/1.1 on both sides, else HTTP/2.
    """
    version, alpn = ("http_protocol_options", "http/1.1") if is_http1 else ("http2_protocol_options", "h2")
    host, _, upstream_port = urlsplit(behind.url).netloc.rpartition(":")
    files = {"certificate_chain": {"filename": str(certificate)}, "private_key": {"filename": str(key)}}
    manager = {
        "@type": _MANAGER,
        "stat_prefix": "in",
        "codec_type": "HTTP1" if is_http1 else "HTTP2",
        "stream_idle_timeout": "0s",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "behind", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": {"@type": _ROUTER}}],
    }
    listener = {
        "name": "in",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [
            {
                "transport_socket": {
                    "name": "envoy.transport_sockets.tls",
                    "typed_config": {
                        "@type": f"{_TLS}.DownstreamTlsContext",
                        "common_tls_context": {"tls_certificates": [files], "alpn_protocols": [alpn]},
                    },
                },
                "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}],
            }
        ],
    }
    cluster: dict[str, object] = {
        "name": "behind",
        "type": "STATIC",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": _HTTP,
                "explicit_http_config": {version: {}},
            }
        },
        "circuit_breakers": {
            "thresholds": [{"max_connections": MANY, "max_pending_requests": MANY, "max_requests": MANY}]
        },
        "load_assignment": {
            "cluster_name": "behind",
            "endpoints": [
                {
                    "lb_endpoints": [
                        {
                            "endpoint": {
                                "address": {"socket_address": {"address": host, "port_value": int(upstream_port)}}
                            }
                        }
                    ]
                }
            ],
        },
    }
    if behind.roots:
        cluster["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": f"{_TLS}.UpstreamTlsContext",
                "sni": behind.tls_name,
                "common_tls_context": {
                    "alpn_protocols": [alpn],
                    "validation_context": {"trusted_ca": {"filename": behind.roots}},
                },
            },
        }
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}
