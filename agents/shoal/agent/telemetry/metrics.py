"""Serves the Prometheus metrics of one agent over mTLS."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from shoal.agent.supervisor import NodeSnapshot
from shoal.host import metrics_page
from shoal.host.metrics_page import WsgiApp
from shoal.types.address import HostPort
from shoal.types.codes import Code, refuse


def serve(address: HostPort, snapshot: Callable[[], NodeSnapshot], guard: metrics_page.MetricsAccess) -> int:
    """Serve in a separate thread until the process ends. Returns the bound port. Raises ShoalError(CONFLICT)."""

    @cache
    def page() -> WsgiApp:
        # With the first scrape: the library brings an HTTP server, 3 MB that a node without a monitor does without.
        from shoal.agent.telemetry.page import make_page

        return make_page(snapshot)

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        return page()(environ, start_response)

    try:
        return metrics_page.serve(answer, address.host, address.port, guard)
    except OSError as cause:
        raise refuse(
            Code.CONFLICT, f"{address}: {cause.strerror}", "a free port", "choose another --metrics"
        ) from cause
