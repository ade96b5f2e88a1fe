"""Every panel of every dashboard: a real Prometheus that reads a federation at work is asked its query, and answers."""

import asyncio
import contextlib
import math
from collections.abc import Iterator
from typing import Final

import pytest
from integration.monitoring.federation import NODES, ask, cause_denials

from harness.clients.oip import GrpcClient, Tensor, step_request
from harness.cluster.delegation import delete_delegated, in_regions, wait_delegated
from harness.cluster.stack import DevStack, InferenceLoad, documents, on_nodes, policy, workload
from harness.models import speech
from harness.servers.prometheus import Prometheus, Query, queries
from harness.wait import wait_until
from shoal.agent.clock import SystemClock
from shoal.devstack.layout import TRADE_DOCUMENT

pytestmark = [pytest.mark.alone, pytest.mark.long]

RATE: Final = "5s"
"""Grafana's `$__rate_interval`: at least four scrapes."""
MOVED_WITHIN_S: Final = 60.0
ANSWERED_WITHIN_S: Final = 45.0
SIGNALS: Final = TRADE_DOCUMENT.format(region="home").replace(
    "spec: {", "spec: {price: 0.30 USD/h, carbon: 250 gCO2/kWh, "
)
BOUND: Final = f"""  require: {{where: "node.name in {list(NODES)}", latency: {{p95: 5s}}}}
"""


@contextlib.contextmanager
def at_work(stack: DevStack, prometheus: Prometheus) -> Iterator[None]:
    """A workload at home that moves, one that another region runs, one that waits, one with sessions; a viewer that
    asks for more than it may, a hot device, a region that does not answer when it is asked."""
    with stack.api() as api:
        api.push(speech.DETECTOR, "vad")
    stack.apply(documents(SIGNALS, policy("here", BOUND), workload("here", "relu", "here")))
    stack.apply(documents(policy("streams", on_nodes(NODES[:1])), speech.WORKLOAD))
    stack.apply(documents(policy("nowhere", on_nodes(["nobody"])), workload("nowhere", "relu", "nowhere")))
    stack.apply(in_regions("away", "home-2"))
    (placed,) = stack.wait_serving("here")
    wait_delegated(stack, "away")
    stack.wait_serving("vad")
    gateway, files = stack.port("gateway", "data"), stack.client_files
    with (
        InferenceLoad(gateway, files, "here", clients=2, rate=20.0),
        InferenceLoad(gateway, files, "away", clients=1, rate=20.0),
    ):
        asyncio.run(speak(stack))
        cause_denials(stack)
        assert ask(stack, "nowhere", 1.0)
        stack.control.break_member("home-2-cloud-gpu", "heat")
        with stack.api() as api:
            moved = api.migrate("default", "here", NODES[1 - NODES.index(placed.node)])

            def over() -> bool:
                (one,) = api.get("migrations", moved.id).migrations
                return one.stage == "done"

            wait_until(over, MOVED_WITHIN_S, "the move to be over")
        stack.control.break_member("home-2-coordinator", "pause")
        stack.apply(in_regions("later", "home-2"))
        missing = "shoal_coordinator_bids_missing_total > 0"
        wait_until(lambda: prometheus.query(missing), ANSWERED_WITHIN_S, "an answer that does not come", every_s=0.5)
        stack.control.break_member("home-2-coordinator", "resume")
        yield
        stack.control.break_member("home-2-cloud-gpu", "heal")
    delete_delegated(stack, "here", "away", "later", "nowhere", "vad")


async def speak(stack: DevStack) -> None:
    """A few steps of a session that goes on."""
    client = GrpcClient(stack.port("gateway", "data"), stack.client_files.authority.read_bytes(), stack.client_files)
    for number, frame in enumerate(speech.frames(0)[:5]):
        inputs = (Tensor("input", "FP32", (1, len(frame)), frame.tobytes()),)
        await client.send(step_request("vad", inputs, 1, start=number == 0), timeout=MOVED_WITHIN_S)
    await client.close()


def test_every_panel_gets_data(stack: DevStack, prometheus: Prometheus) -> None:
    """From the first scrape on, as a time series over the time that it would show."""
    clock = SystemClock()
    began = clock.wall()
    asked = queries()

    def empty() -> list[Query]:
        now = clock.wall()
        span = f"{math.ceil(now - began)}s"
        return [
            each
            for each in asked
            if not any(
                math.isfinite(float(value))
                for series in prometheus.query_range(each.expand(rate=RATE, span=span), began, now)
                for _, value in series["values"]
            )
        ]

    with at_work(stack, prometheus):
        left = asked
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not empty(), ANSWERED_WITHIN_S, "data for every panel", every_s=1.0)
        left = empty()
    assert not left, "\n".join(f"{each.dashboard}: {each.panel} ({each.legend}): {each.expr}" for each in left)
    assert len(asked) >= 50
    assert len({each.dashboard for each in asked}) == 4
