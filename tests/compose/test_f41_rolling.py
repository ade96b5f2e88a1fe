"""F41: two versions of the software work together. Under load, containers of another version replace those that run,
one after another, and back."""

from collections.abc import Iterator
from functools import partial

import pytest

from harness.cluster.compose import AWAY, NODES, STEADY, WAIT_TIMEOUT_S, Compose, docker
from harness.report import record
from harness.wait import wait_until

pytestmark = [pytest.mark.compose, pytest.mark.alone, pytest.mark.timeout(600)]

NEXT = "next"
NEXT_VERSION = "0.9.9"
ORDER = (
    "etcd-3", "federation", "cloud-coordinator", "edge-coordinator", "edge-broker", "edge-gateway", "edge-gateway-2",
    "edge-npu", "edge-gpu", "edge-arm",
)  # fmt: skip
"""Control planes first. What is left of the other regions stays as it is: they are mixed all the while."""
IMAGES = ("etcd", "mosquitto", "agent", "coordinator")


@pytest.fixture(scope="module")
def images() -> Iterator[None]:
    """Of the next version: the same programs, which say another version, since no other one is published."""
    for image in IMAGES:
        dockerfile = f"FROM shoal/{image}:latest\n"
        if image in ("agent", "coordinator"):
            metadata = f"/opt/shoal/lib/python3*/site-packages/shoal_orchestrator_{image}-*.dist-info/METADATA"
            dockerfile += f"USER root\nRUN sed -i 's/^Version: .*/Version: {NEXT_VERSION}/' {metadata}\nUSER shoal\n"
        docker("build", "--quiet", "--tag", f"shoal/{image}:{NEXT}", "-", stdin=dockerfile, timeout=300.0)
    yield
    docker("image", "rm", *(f"shoal/{image}:{NEXT}" for image in IMAGES))


def versions(compose: Compose) -> dict[str, str]:
    """Of edge's parts, as they say."""
    with compose.api() as api:
        return {name: view.node.agent_version for name, view in compose.nodes().items()} | {
            "edge-coordinator": api.who_am_i().version
        }


def replace(compose: Compose, service: str, tag: str) -> None:
    """Returns when what took its place does its work."""
    before = compose.container(service)["Id"]
    node = {name: view for name, view in compose.nodes().items() if name == service}
    compose.compose("up", "-d", "--no-build", "--no-deps", service, tag=tag)
    assert compose.container(service)["Id"] != before, f"{service} was left as it was"
    wait_until(lambda: compose.are_back(node), WAIT_TIMEOUT_S, f"{service} in a session of its own", every_s=0.1)
    for region, nodes in (("edge", NODES["edge"]), ("cloud", NODES["cloud"])):
        wait_until(partial(compose.is_measured, region, nodes), WAIT_TIMEOUT_S, service, every_s=0.2)
    compose.placements(STEADY, replicas=2)
    wait_until(
        lambda: compose.ask(STEADY) and compose.ask(STEADY, second=True), WAIT_TIMEOUT_S, "both gateways to answer"
    )


def test_f41_rolling_upgrade_and_downgrade_under_load(hurt: Compose, images: None) -> None:
    old = set(versions(hurt).values())
    with hurt.load(STEADY) as home, hurt.load(AWAY) as away:
        began = home.now()
        for service in ORDER:
            replace(hurt, service, NEXT)
        upgraded_s = home.now() - began
        assert set(versions(hurt).values()) == {NEXT_VERSION}
        for service in reversed(ORDER):
            replace(hurt, service, "latest")
        downgraded_s = home.now() - began - upgraded_s
        for load in (home, away):
            load.wait_for(20)
    assert set(versions(hurt).values()) == old
    for load in (home, away):
        verdict = load.verdict()
        assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    record(
        "F41",
        "C",
        1,
        containers=len(ORDER),
        upgraded_s=round(upgraded_s, 1),
        downgraded_s=round(downgraded_s, 1),
        sent=home.verdict().sent + away.verdict().sent,
        lost=0,
        asked_again=len(home.failed_attempts) + len(away.failed_attempts),
        slowest_s=round(max(home.verdict().slowest_s, away.verdict().slowest_s), 2),
    )
