"""Serves the Prometheus metrics of one agent over mTLS."""

from collections.abc import Callable

from shoal.agent.supervisor import NodeSnapshot
from shoal.host import metrics_page
from shoal.host.metrics_page import WsgiApp, late_page
from shoal.types.address import HostPort
from shoal.types.codes import Code, refuse


def serve(address: HostPort, snapshot: Callable[[], NodeSnapshot], guard: metrics_page.MetricsAccess) -> int:
    """Serve in a separate thread until the process ends. Returns the bound port. Raises ShoalError(CONFLICT)."""

    def make() -> WsgiApp:
        from shoal.agent.telemetry.page import make_page

        return make_page(snapshot)

    try:
        return metrics_page.serve(late_page(make), address.host, address.port, guard)
    except OSError as cause:
        raise refuse(
            Code.CONFLICT, f"{address}: {cause.strerror}", "a free port", "choose another --metrics"
        ) from cause
