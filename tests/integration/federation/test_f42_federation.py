"""F42: the federation is killed, and cut off, under load; agreements are renewed from region to region. Scaled to
seconds: the whole minute is `-m long`. And its own CA is followed by another."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cluster.delegation import (
    FAR,
    HOME,
    NEAR,
    agreements,
    delete_delegated,
    gateway_load,
    in_regions,
    is_renewed,
    knows_all_regions,
    wait_all_acquainted,
    wait_delegated,
)
from harness.cluster.federation import advertise_in_place_of
from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack
from harness.report import record
from harness.wait import wait_until
from shoal.agent.clock import SystemClock
from shoal.client import RegionClient
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.identity.authority import FileAuthority
from shoal.devstack.control import CONTEXT
from shoal.devstack.layout import FEDERATION, ca_folder
from shoal.types.codes import Code, ShoalError

SERVICE = "federation-1"
SERVERS = ("coordinator", FEDERATION)


def codes(stack: DevStack, after: int, name: str) -> list[str]:
    return [event.code for event in stack.events(after) if event.workload.name == name]


@contextmanager
def without_federation(stack: DevStack, fault: str) -> Iterator[None]:
    if fault == "kill":
        stack.kill(SERVICE)
    else:
        stack.control.break_member(SERVICE, fault)
    try:
        yield
    finally:
        stack.control.break_member(SERVICE, "resume" if fault == "kill" else "heal")


@pytest.mark.parametrize(
    ("fault", "down_s"),
    [
        ("kill", 4.0),
        pytest.param("kill", 60.0, marks=pytest.mark.long),
        pytest.param("cut", 60.0, marks=pytest.mark.long),
    ],
)
def test_f42_federation_gone_under_load(neighbourhood: DevStack, fault: str, down_s: float) -> None:
    """What runs elsewhere runs on and is renewed region to region; regions that know each other trade on."""
    stack, clock = neighbourhood, SystemClock()
    stack.apply(in_regions("away", NEAR))
    agreed = wait_delegated(stack, "away")
    before = stack.events()[-1].sequence
    with gateway_load(stack, "away") as load:
        began = clock.now()
        with without_federation(stack, fault):
            stack.apply(in_regions("meanwhile", FAR))
            assert wait_delegated(stack, "meanwhile").counterpart == FAR
            alone_s = clock.now() - began
            load.wait_for(20, after_s=max(0.0, down_s - alone_s))
            assert not knows_all_regions(stack, HOME), "the federation was away"
            wait_until(lambda: is_renewed(stack, "away"), WAIT_TIMEOUT_S, "the agreement to be renewed")
        back = clock.now()
        wait_until(lambda: knows_all_regions(stack, HOME), WAIT_TIMEOUT_S, "home to hear the federation")
        stack.apply(in_regions("after", NEAR))
        wait_delegated(stack, "after")
        resumed_s = clock.now() - back
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert [view.agreement for view in agreements(stack, "away")] == [agreed.agreement]
    assert codes(stack, before, "away") == [], "nothing happened to it"
    record(
        "F42", "P", 1, fault=fault, outage_s=round(back - began, 1), sent=verdict.sent, lost=verdict.lost_count,
        slowest_s=round(verdict.slowest_s, 3), traded_alone_s=round(alone_s, 2), traded_again_s=round(resumed_s, 2),
    )  # fmt: skip
    delete_delegated(stack, "away", "meanwhile", "after")
    wait_all_acquainted(stack)


def test_f42_a_ca_that_follows_waits_for_the_federation(neighbourhood: DevStack) -> None:
    """Without it, whatever the region then says to the federation would be refused, that it leaves too."""
    stack = neighbourhood
    with stack.api() as api:
        with without_federation(stack, "kill"):
            api.rotate()
            wait_until(
                lambda: [each.uri for each in api.authority().laggards] == ["shoal://home/federation/federation"],
                WAIT_TIMEOUT_S, "the rotation to wait for the federation alone",
            )  # fmt: skip
            assert api.authority().stage == "trust"
        wait_until(lambda: api.authority().stage != "trust", WAIT_TIMEOUT_S, "the rotation to go on")
    wait_all_acquainted(stack)
    stack.apply(in_regions("followed", NEAR))
    wait_delegated(stack, "followed")
    delete_delegated(stack, "followed")


def authority_of(stack: DevStack, region: str) -> FileAuthority:
    """The CA of a region, or of the federation."""
    replicas = [each for each in stack.info.stack.members if each.region == region and each.role in SERVERS]
    folder = ca_folder(stack.info.folder, replicas) / "ca"
    return FileAuthority.open(folder, region, wall=CoordinatorClock().wall(), may_create=False)


def wait_trusts(stack: DevStack, region: str, fingerprint: str, after: int) -> None:
    """Wait until the region wrote, after this event, that it trusts this CA of its federation and no other."""

    def changes() -> list[str]:
        with stack.api(region) as api:
            return [event.message for event in api.events(after) if event.code == "FEDERATION_CA_CHANGED"]

    wait_until(
        lambda: changes()[-1:] == [f"trusts {fingerprint[:16]}"],
        WAIT_TIMEOUT_S,
        f"{region} to trust the new CA alone",
    )


def test_f42_the_federations_ca_is_followed_by_another_under_load(neighbourhood: DevStack, tmp_path: Path) -> None:
    """A region whose coordinator is killed meanwhile is waited for, and misses nothing."""
    stack, clock = neighbourhood, SystemClock()
    regions = stack.info.stack.regions
    context = f"{CONTEXT}-federation"
    operator = stack.contexts.get(context)
    outdated = replace(operator, folder=str(shutil.copytree(operator.folder, tmp_path / "outdated")))
    far = next(each.name for each in stack.info.stack.members if (each.region, each.role) == (FAR, "coordinator"))
    before = {}
    for region in regions:
        with stack.api(region) as api:
            before[region] = max((event.sequence for event in api.events()), default=0)

    stack.apply(in_regions("away", NEAR))
    agreed = wait_delegated(stack, "away")
    with gateway_load(stack, "away") as load:
        load.wait_for(20)
        began = clock.now()
        stack.kill(far)
        link = stack.info.stack.federation[0].addresses["link"]
        advertise_in_place_of(authority_of(stack, FAR), authority_of(stack, FEDERATION), link)
        begun = stack.shoal("ca", "rotate", "--wait", "0s", "--context", context)
        assert begun.returncode == 0, begun.stderr
        assert "waits for" in begun.stdout
        stack.control.break_member(far, "resume")
        done = stack.shoal("ca", "rotate", "--wait", "60s", "--context", context)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith("done: "), done.stdout
        took_s = clock.now() - began
        wait_until(lambda: is_renewed(stack, "away"), WAIT_TIMEOUT_S, "the agreement to be renewed")
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert [view.agreement for view in agreements(stack, "away")] == [agreed.agreement]

    with RegionClient(operator) as api:
        found = api.authority()
    assert sorted(root.state for root in found.roots) == ["issuing", "retired"]
    (issuing,) = [root.fingerprint for root in found.roots if root.state == "issuing"]
    for region in regions:
        wait_trusts(stack, region, issuing, before[region])
    with RegionClient(outdated) as api, pytest.raises(ShoalError) as refused:
        api.authority()
    assert refused.value.code in (Code.CERT_UNTRUSTED, Code.COORDINATOR_UNREACHABLE), "the old CA vouches for nobody"
    wait_all_acquainted(stack)
    stack.apply(in_regions("followed", NEAR))
    wait_delegated(stack, "followed")
    record(
        "F42", "P", 1, what="rotation of the federation's CA", sent=verdict.sent, lost=verdict.lost_count,
        took_s=round(took_s, 1), slowest_s=round(verdict.slowest_s, 3),
    )  # fmt: skip
    delete_delegated(stack, "away", "followed")
