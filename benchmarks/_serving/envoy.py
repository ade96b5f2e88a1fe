"""Envoy before Shoal's front, TLS on both sides: the proxy that a gateway is compared with."""

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
def running_envoy(settings: PeerSettings, front: Server) -> Iterator[Server]:
    """Raises AbsentError."""
    program = settings.environments / "envoy" / "bin" / "envoy"
    if not program.exists():
        raise AbsentError(f"not in {settings.environments}: shoal bench serving --install {settings.environments}")
    port, behind = free_port(), front.addresses[Protocol.GRPC]
    config, log = settings.scratch / "envoy.json", settings.scratch / "envoy.log"
    config.write_text(json.dumps(bootstrap(port, behind, settings.certificate, settings.key)))
    command = [str(program), "-c", str(config), "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
    began = time.monotonic()
    with child(on_core(settings.cores, command), log, {}) as process:
        address = Address(f"https://127.0.0.1:{port}", behind.headers, str(settings.certificate), "localhost")
        server = Server(
            "envoy to shoal front, TLS",
            {Protocol.GRPC: address},
            lambda: {"envoy": [pid for pids in tree(process.pid).values() for pid in pids], **front.processes()},
        )
        server.start_s = first_answer(server, settings.models[SMALL], began, process, log)
        yield server


def bootstrap(port: int, behind: Address, certificate: Path, key: Path) -> dict[str, object]:
    """Envoy's configuration: one listener, one route, one upstream."""
    host, _, upstream_port = urlsplit(behind.url).netloc.rpartition(":")
    files = {"certificate_chain": {"filename": str(certificate)}, "private_key": {"filename": str(key)}}
    manager = {
        "@type": _MANAGER,
        "stat_prefix": "in",
        "codec_type": "HTTP2",
        "stream_idle_timeout": "0s",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "front", "timeout": "0s"}}],
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
                        "common_tls_context": {"tls_certificates": [files], "alpn_protocols": ["h2"]},
                    },
                },
                "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}],
            }
        ],
    }
    cluster = {
        "name": "front",
        "type": "STATIC",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": _HTTP,
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "circuit_breakers": {
            "thresholds": [{"max_connections": MANY, "max_pending_requests": MANY, "max_requests": MANY}]
        },
        "transport_socket": {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": f"{_TLS}.UpstreamTlsContext",
                "sni": behind.tls_name,
                "common_tls_context": {
                    "alpn_protocols": ["h2"],
                    "validation_context": {"trusted_ca": {"filename": behind.roots}},
                },
            },
        },
        "load_assignment": {
            "cluster_name": "front",
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
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}
