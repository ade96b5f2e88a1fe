"""Alert rules made to fire by what they are about, on real processes: killed, paused, cut off, too slow, forged, backed
up badly, without a disk or a store.

On a shorter clock than the rules' own (conftest.py): what they ask for, and their bounds, are as written.
"""

import asyncio
import itertools
import math
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import grpc
import pytest
from integration.coordinator.test_restart import admin, apply, refusal
from integration.monitoring.conftest import DISK, SLOW
from integration.monitoring.test_dashboards import NODES, ask, denied

from harness.clock import ManualClock
from harness.coordinator import Coordinator, operator
from harness.crafted import SLOW_FLOPS, slow
from harness.disk import fill, slowed
from harness.oip import Tensor
from harness.prometheus import Prometheus, rules
from harness.stack import PATIENCE_S, Load, Stack, documents, on_nodes, policy, workload
from harness.trades import delegated, forget, in_regions
from harness.wait import wait_until
from shoal.agent.clock import SystemClock
from shoal.coordinator.api.backup import Backups
from shoal.coordinator.controllers.region import NoMeter
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.main.backups import Schedule
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.devstack.layout import FEDERATION, TRADING
from shoal.types.agreement import ReportContent
from shoal.types.chain import LedgerEntry
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall
from shoal.v1 import federation_pb2_grpc, operator_pb2
from shoal.wire import said
from shoal.wire.identity import dns_of
from shoal.wire.limits import LINK_BYTES, channel_options

pytestmark = [pytest.mark.alone, pytest.mark.long]

QUIET_S: Final = 10.0
FIRES_WITHIN_S: Final = 120.0
STALLED_S: Final = 0.5
SLOW_NODE: Final = "small-cpu"
SLOW_S: Final = 2.0
"""What it takes for an answer; the bound is 1 s."""
SLOW_FLUSH_S: Final = 1.0
"""The bound is 0.5 s."""
STALE: Final = TRADING.format(region="home").replace(
    "spec: {", "spec: {carbon: {source: ./none, fallback: 9 gCO2/kWh}, "
)


@dataclass
class Watch:
    """fired: what was seen to fire so far."""

    prometheus: Prometheus
    fired: set[str] = field(default_factory=set)

    def until(self, *names: str, meanwhile: Callable[[], object] = lambda: None, **labels: str) -> None:
        """Each of these, with these labels, fired since this was called. meanwhile: done before each look."""
        seen = set[str]()

        def all_of_them() -> bool:
            meanwhile()
            seen.update(self.prometheus.firing(**labels))
            return seen >= {*names}

        wait_until(all_of_them, FIRES_WITHIN_S, f"{', '.join(names)} to fire", every_s=0.5)
        self.fired |= seen


@pytest.fixture(scope="module")
def watch(stack: Stack, prometheus: Prometheus) -> Iterator[Watch]:
    """With a workload on one node of `home`, and one that may be on either."""
    either = f'  require: {{where: "node.name in {list(NODES)}"}}\n'
    stack.apply(documents(policy("one", on_nodes(NODES[:1])), workload("one", "relu", "one")))
    stack.apply(documents(policy("either", either), workload("either", "relu", "either")))
    stack.serves("one")
    stack.serves("either")
    yield Watch(prometheus)
    stack.forget("one", "either", "nowhere")


def pass_(seconds: float) -> None:
    clock = SystemClock()
    until = clock.now() + seconds
    wait_until(lambda: clock.now() >= until, seconds + PATIENCE_S, f"{seconds:g} s to pass")


def killed_with(stack: Stack) -> str:
    """How a request of `one` ends whose only worker is stopped when it comes in, and then killed."""
    stack.serves("one")
    stack.control.hurt(f"{NODES[0]}/worker", "pause")
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(ask, stack, "one")
        pass_(STALLED_S)
        stack.control.hurt(f"{NODES[0]}/worker", "kill")
        return answer.result()


def test_nothing_fires_while_all_is_well(stack: Stack, watch: Watch) -> None:
    wait_until(lambda: not watch.prometheus.firing(), FIRES_WITHIN_S, "what other tests did to be over", every_s=1.0)
    with Load(stack.port("gateway", "grpc"), stack.client_files, "one", clients=1, rate=20.0):
        pass_(QUIET_S)
    assert watch.prometheus.firing() == set()


def test_requests_that_are_lost_and_a_worker_that_dies_again_and_again(stack: Stack, watch: Watch) -> None:
    ended = [killed_with(stack) for _ in range(4)]
    assert "" not in ended
    watch.until("ShoalRequestsLost", "ShoalAssignmentRestarts")
    stack.serves("one")


def test_a_workload_that_no_node_may_have_and_its_requests(stack: Stack, watch: Watch) -> None:
    stack.apply(documents(policy("nowhere", on_nodes(["nobody"])), workload("nowhere", "relu", "nowhere")))
    wait_until(lambda: ask(stack, "nowhere", 1.0) == "MODEL_NOT_READY", PATIENCE_S, "its name to be known")
    watch.until("ShoalWorkloadWaits", "ShoalRequestsRefused", meanwhile=lambda: ask(stack, "nowhere", 1.0))
    stack.forget("nowhere")


def test_requests_to_a_device_that_is_too_slow_for_them(stack: Stack, watch: Watch) -> None:
    """A model that its profile, on this stack's clock, says will take `SLOW_S`."""
    with stack.api() as api:
        rates = next(each.receipt.rates for each in api.get("devices").devices if each.node == SLOW_NODE)
    flops = SLOW_S / stack.info.stack.time_scale * max(rates.conv_flops.values())
    stack.push(slow(math.ceil(math.sqrt(flops / SLOW_FLOPS))).SerializeToString(), "slow")
    stack.apply(documents(policy("late", on_nodes([SLOW_NODE])), workload("late", "slow", "late")))
    stack.serves("late")
    with Load(stack.port("gateway", "grpc"), stack.client_files, "late", clients=1, inputs=point):
        watch.until("ShoalRequestsSlow", workload="late")
    stack.forget("late")


def point(asked: int) -> tuple[Tensor, ...]:
    return (Tensor("x", "FP32", (1, 4, 1, 1), struct.pack("<4f", *[asked] * 4)),)


def test_nodes_that_are_dead_cut_off_or_deaf(stack: Stack, watch: Watch) -> None:
    hurt = stack.control.hurt
    hurt("home-2-cloud-gpu", "kill")
    hurt("home-2-plain-cpu", "cut")
    hurt("cloud-gpu/front", "pause")
    try:
        watch.until("ShoalTargetDown", "ShoalNodeLost", "ShoalAgentCutOff", "ShoalFrontNotReady")
    finally:
        hurt("cloud-gpu/front", "resume")
        hurt("home-2-plain-cpu", "heal")
        hurt("home-2-cloud-gpu", "resume")
    stack.serves("either")


def test_moves_that_are_taken_back(stack: Stack, watch: Watch) -> None:
    def moved() -> None:
        (row,) = stack.serves("either")
        with stack.api() as api:
            begun = api.migrate("default", "either", NODES[1 - NODES.index(row.node)])
            api.cancel_migration(begun.id)

            def over() -> bool:
                (one,) = api.get("migrations", begun.id).migrations
                return one.stage == "aborted"

            wait_until(over, PATIENCE_S, "the move to be taken back")

    watch.until("ShoalMigrationsFail", meanwhile=moved)


def test_who_may_not_and_a_signal_that_is_not_there(stack: Stack, watch: Watch) -> None:
    stack.apply(STALE)
    watch.until("ShoalCallsDenied", "ShoalSignalStale", meanwhile=lambda: denied(stack, 10))
    stack.apply(TRADING.format(region="home"))


def test_backups_that_are_old_or_fail(stack: Stack, keeper: Coordinator, watch: Watch) -> None:
    keeper.end()
    old = keeper.folder / "old"
    wall = SystemClock().wall() - 4 * 3600

    async def made_then() -> None:
        store = await SqliteStore.open(keeper.data / "store")
        clock = ManualClock(wall=wall)
        backups = Backups("region", keeper.region, "sqlite", store, clock, dict, b"")
        await Schedule(old, 3600.0, 3, backups, clock, NoMeter()).make()
        await store.close()

    asyncio.run(made_then())
    keeper.start(flags=("--archive-dir", str(old), "--archive-every", str(24 * 3600)))
    watch.until("ShoalBackupOld")
    keeper.end()
    keeper.start(flags=("--archive-dir", str(keeper.log / "no-folder"), "--archive-every", "60"))
    watch.until("ShoalBackupFails")


def test_a_disk_that_is_slow(keeper: Coordinator, watch: Watch) -> None:
    numbers = itertools.count()
    with slowed(keeper.folder / SLOW, flush_s=SLOW_FLUSH_S, write_s=0.0):
        watch.until("ShoalStoreSlow", meanwhile=lambda: apply(keeper, f"slow-{next(numbers)}"), instance=keeper.metrics)


def test_a_disk_that_is_full(keeper: Coordinator, watch: Watch) -> None:
    """What is applied is refused; a log is handed out, and the store cannot say to whom."""
    stub, numbers = operator(keeper.link, admin(keeper)), itertools.count()
    hog = keeper.folder / DISK / "hog"

    def acts() -> None:
        refusal(lambda: apply(keeper, f"more-{next(numbers)}"))
        assert list(stub.Logs(operator_pb2.LogsRequest(lines=1), timeout=10))

    fill(hog)
    try:
        watch.until("ShoalStoreUnwritable", "ShoalAuditDropped", meanwhile=acts, instance=keeper.metrics)
    finally:
        hog.unlink()

    def over() -> bool:
        return "ShoalStoreUnwritable" not in watch.prometheus.firing(instance=keeper.metrics)

    wait_until(over, FIRES_WITHIN_S, "it to be over though nobody writes", every_s=0.5)


def test_a_store_without_a_majority_that_nobody_writes_to(stack: Stack, watch: Watch) -> None:
    lost = [member.name for member in stack.info.stack.etcd][:2]
    for name in lost:
        stack.control.hurt(name, "kill")
    try:
        for member in stack.info.stack.members:
            if member.role in ("coordinator", FEDERATION):
                watch.until("ShoalStoreUnwritable", instance=member.addresses["metrics"])
    finally:
        for name in lost:
            stack.control.hurt(name, "resume")
    wait_until(lambda: "ShoalStoreUnwritable" not in watch.prometheus.firing(), FIRES_WITHIN_S, "it to be over")
    stack.serves("either")


def test_a_ledger_that_does_not_follow(stack: Stack, watch: Watch) -> None:
    """`home-2` shows another entry than the one that comes next in its ledger."""
    stack.apply(in_regions("away", "home-2"))
    delegated(stack, "away")
    authority = FileAuthority.open(
        stack.control.folder / "home-2-coordinator" / "ca", "home-2", wall=SystemClock().wall(), may_create=False
    )
    own = authority.enrol_self(Role.COORDINATOR, "coordinator", lifetime_s=Seconds(600.0), wall=SystemClock().wall())
    says = said.Signer("home-2", own.certificate_pem, own.key_pem)
    ca = stack.contexts.get(f"dev-{FEDERATION}").ca.read_bytes()
    name = dns_of(FEDERATION, Role.FEDERATION, str(Role.FEDERATION))
    address = stack.info.stack.federation[0].addresses["link"]
    credentials = grpc.ssl_channel_credentials(ca, own.key_pem, own.certificate_pem)
    with grpc.secure_channel(address, credentials, channel_options(LINK_BYTES, server_name=name)) as channel:
        federation = federation_pb2_grpc.FederationStub(channel)

        def next_sequence() -> int:
            report = says.say(ReportContent((), ()), FEDERATION)
            return int(federation.Report(report, timeout=10.0).next_sequence)

        wait_until(lambda: next_sequence() > 1, PATIENCE_S, "the federation to have copies", every_s=0.2)
        forged = LedgerEntry(next_sequence(), Wall(1.0), "granted", "g", "home", "w", "", "", "", "0" * 64)
        with pytest.raises(grpc.RpcError):
            federation.Report(says.say(ReportContent((), (forged,)), FEDERATION), timeout=10.0)
    watch.until("ShoalLedgerBroken")
    forget(stack, "away")


def test_all_rules_fired(watch: Watch) -> None:
    """Last: by then all tests above have run."""
    assert watch.fired >= {rule["alert"] for rule in rules()}
