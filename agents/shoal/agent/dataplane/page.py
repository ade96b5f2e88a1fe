"""Prometheus metrics of one front. Imported with the first scrape, as `metrics_page.late_page` says."""

from collections.abc import Callable

from prometheus_client import make_wsgi_app

from shoal.agent import metrics
from shoal.host.metrics import page_of
from shoal.host.metrics_page import WsgiApp
from shoal.types.metric import MetricReadings


def make_page(read: Callable[[], MetricReadings]) -> WsgiApp:
    """The page of what `read` gives at each scrape."""
    return make_wsgi_app(page_of(metrics.FRONT, read))
