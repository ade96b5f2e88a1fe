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
from integration.monitoring.federation import DISK, NODES, SLOW, ask, cause_denials

from harness.clients.oip import Tensor
from harness.cluster.coordinator import CoordinatorServer, operator, refusal_code
from harness.cluster.delegation import delete_delegated, in_regions, wait_delegated
from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack, InferenceLoad, documents, on_nodes, policy, workload
from harness.fakes.clock import ManualClock
from harness.faults.disk import disk_latency, fill_disk
from harness.models.synthetic import SLOW_FLOPS, slow
from harness.servers.prometheus import Prometheus, rules
from harness.wait import wait_until
from shoal.agent.clock import SystemClock
from shoal.coordinator.api.backup import Backups
from shoal.coordinator.controllers.region.region import NoMeter
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.main.backups import BackupSchedule
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.devstack.layout import FEDERATION, TRADE_DOCUMENT
from shoal.types.agreement import ReportContent
from shoal.types.chain import LedgerEntry
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall
from shoal.v1 import federation_pb2_grpc, operator_pb2
from shoal.wire import signed_envelope
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
STALE: Final = TRADE_DOCUMENT.format(region="home").replace(
    "spec: {", "spec: {carbon: {source: ./none, fallback: 9 gCO2/kWh}, "
)


@dataclass
class AlertWatch:
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
def watch(stack: DevStack, prometheus: Prometheus) -> Iterator[AlertWatch]:
    """With a workload on one node of `home`, and one that may be on either."""
    either = f'  require: {{where: "node.name in {list(NODES)}"}}\n'
    stack.apply(documents(policy("one", on_nodes(NODES[:1])), workload("one", "relu", "one")))
    stack.apply(documents(policy("either", either), workload("either", "relu", "either")))
    stack.wait_serving("one")
    stack.wait_serving("either")
    yield AlertWatch(prometheus)
    stack.delete_workloads("one", "either", "nowhere")


def pass_(seconds: float) -> None:
    clock = SystemClock()
    until = clock.now() + seconds
    wait_until(lambda: clock.now() >= until, seconds + WAIT_TIMEOUT_S, f"{seconds:g} s to pass")


def code_when_killed(stack: DevStack) -> str:
    """How a request of `one` ends whose only worker is stopped when it comes in, and then killed."""
    stack.wait_serving("one")
    stack.control.break_member(f"{NODES[0]}/worker", "pause")
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(ask, stack, "one")
        pass_(STALLED_S)
        stack.control.break_member(f"{NODES[0]}/worker", "kill")
        return answer.result()


def test_nothing_fires_while_all_is_well(stack: DevStack, watch: AlertWatch) -> None:
    wait_until(lambda: not watch.prometheus.firing(), FIRES_WITHIN_S, "what other tests did to be over", every_s=1.0)
    with InferenceLoad(stack.port("gateway", "data"), stack.client_files, "one", clients=1, rate=20.0):
        pass_(QUIET_S)
    assert watch.prometheus.firing() == set()


def test_requests_that_are_lost_and_a_worker_that_dies_again_and_again(stack: DevStack, watch: AlertWatch) -> None:
    ended = [code_when_killed(stack) for _ in range(4)]
    assert "" not in ended
    watch.until("ShoalRequestsLost", "ShoalAssignmentRestarts")
    stack.wait_serving("one")


def test_a_workload_that_no_node_may_have_and_its_requests(stack: DevStack, watch: AlertWatch) -> None:
    stack.apply(documents(policy("nowhere", on_nodes(["nobody"])), workload("nowhere", "relu", "nowhere")))
    wait_until(lambda: ask(stack, "nowhere", 1.0) == "MODEL_NOT_READY", WAIT_TIMEOUT_S, "its name to be known")
    watch.until("ShoalWorkloadWaits", "ShoalRequestsRefused", meanwhile=lambda: ask(stack, "nowhere", 1.0))
    stack.delete_workloads("nowhere")


def test_requests_to_a_device_that_is_too_slow_for_them(stack: DevStack, watch: AlertWatch) -> None:
    """A model that its profile, on this stack's clock, says will take `SLOW_S`."""
    with stack.api() as api:
        rates = next(each.receipt.rates for each in api.get("devices").devices if each.node == SLOW_NODE)
    flops = SLOW_S / stack.info.stack.time_scale * max(rates.conv_flops.values())
    stack.push(slow(math.ceil(math.sqrt(flops / SLOW_FLOPS))).SerializeToString(), "slow")
    stack.apply(documents(policy("late", on_nodes([SLOW_NODE])), workload("late", "slow", "late")))
    stack.wait_serving("late")
    with InferenceLoad(stack.port("gateway", "data"), stack.client_files, "late", clients=1, inputs=point):
        watch.until("ShoalRequestsSlow", workload="late")
    stack.delete_workloads("late")


def point(asked: int) -> tuple[Tensor, ...]:
    return (Tensor("x", "FP32", (1, 4, 1, 1), struct.pack("<4f", *[asked] * 4)),)


def test_nodes_that_are_dead_cut_off_or_deaf(stack: DevStack, watch: AlertWatch) -> None:
    hurt = stack.control.break_member
    hurt("home-2-cloud-gpu", "kill")
    hurt("home-2-plain-cpu", "cut")
    hurt("cloud-gpu/front", "pause")
    try:
        watch.until("ShoalTargetDown", "ShoalNodeLost", "ShoalAgentCutOff", "ShoalFrontNotReady")
    finally:
        hurt("cloud-gpu/front", "resume")
        hurt("home-2-plain-cpu", "heal")
        hurt("home-2-cloud-gpu", "resume")
    stack.wait_serving("either")


def test_moves_that_are_taken_back(stack: DevStack, watch: AlertWatch) -> None:
    def migrate_and_cancel() -> None:
        (row,) = stack.wait_serving("either")
        with stack.api() as api:
            begun = api.migrate("default", "either", NODES[1 - NODES.index(row.node)])
            api.cancel_migration(begun.id)

            def over() -> bool:
                (one,) = api.get("migrations", begun.id).migrations
                return one.stage == "aborted"

            wait_until(over, WAIT_TIMEOUT_S, "the move to be taken back")

    watch.until("ShoalMigrationsFail", meanwhile=migrate_and_cancel)


def test_who_may_not_and_a_signal_that_is_not_there(stack: DevStack, watch: AlertWatch) -> None:
    stack.apply(STALE)
    watch.until("ShoalCallsDenied", "ShoalSignalStale", meanwhile=lambda: cause_denials(stack, 10))
    stack.apply(TRADE_DOCUMENT.format(region="home"))


def test_backups_that_are_old_or_fail(
    stack: DevStack, small_disk_coordinator: CoordinatorServer, watch: AlertWatch
) -> None:
    small_disk_coordinator.end()
    old = small_disk_coordinator.folder / "old"
    wall = SystemClock().wall() - 4 * 3600

    async def make_old_backup() -> None:
        store = await SqliteStore.open(small_disk_coordinator.data / "store")
        clock = ManualClock(wall=wall)
        backups = Backups("region", small_disk_coordinator.region, "sqlite", store, clock, dict, b"")
        await BackupSchedule(old, 3600.0, 3, backups, clock, NoMeter()).make()
        await store.close()

    asyncio.run(make_old_backup())
    small_disk_coordinator.start(flags=("--archive-dir", str(old), "--archive-every", str(24 * 3600)))
    watch.until("ShoalBackupOld")
    small_disk_coordinator.end()
    small_disk_coordinator.start(
        flags=("--archive-dir", str(small_disk_coordinator.log / "no-folder"), "--archive-every", "60")
    )
    watch.until("ShoalBackupFails")


def test_a_disk_that_is_slow(small_disk_coordinator: CoordinatorServer, watch: AlertWatch) -> None:
    numbers = itertools.count()
    with disk_latency(small_disk_coordinator.folder / SLOW, flush_s=SLOW_FLUSH_S, write_s=0.0):
        watch.until(
            "ShoalStoreSlow",
            meanwhile=lambda: small_disk_coordinator.apply_policy(f"slow-{next(numbers)}"),
            instance=small_disk_coordinator.metrics,
        )


def test_a_disk_that_is_full(small_disk_coordinator: CoordinatorServer, watch: AlertWatch) -> None:
    """What is applied is refused; a log is handed out, and the store cannot say to whom."""
    stub, numbers = operator(small_disk_coordinator.link, small_disk_coordinator.admin()), itertools.count()
    hog = small_disk_coordinator.folder / DISK / "hog"

    def acts() -> None:
        refusal_code(lambda: small_disk_coordinator.apply_policy(f"more-{next(numbers)}"))
        assert list(stub.Logs(operator_pb2.LogsRequest(lines=1), timeout=10))

    fill_disk(hog)
    try:
        watch.until(
            "ShoalStoreUnwritable", "ShoalAuditDropped", meanwhile=acts, instance=small_disk_coordinator.metrics
        )
    finally:
        hog.unlink()

    def over() -> bool:
        return "ShoalStoreUnwritable" not in watch.prometheus.firing(instance=small_disk_coordinator.metrics)

    wait_until(over, FIRES_WITHIN_S, "it to be over though nobody writes", every_s=0.5)


def test_a_store_without_a_majority_that_nobody_writes_to(stack: DevStack, watch: AlertWatch) -> None:
    lost = [member.name for member in stack.info.stack.etcd][:2]
    for name in lost:
        stack.control.break_member(name, "kill")
    try:
        for member in stack.info.stack.members:
            if member.role in ("coordinator", FEDERATION):
                watch.until("ShoalStoreUnwritable", instance=member.addresses["metrics"])
    finally:
        for name in lost:
            stack.control.break_member(name, "resume")
    wait_until(lambda: "ShoalStoreUnwritable" not in watch.prometheus.firing(), FIRES_WITHIN_S, "it to be over")
    stack.wait_serving("either")


def test_a_ledger_that_does_not_follow(stack: DevStack, watch: AlertWatch) -> None:
    """`home-2` shows another entry than the one that comes next in its ledger."""
    stack.apply(in_regions("away", "home-2"))
    wait_delegated(stack, "away")
    authority = FileAuthority.open(
        stack.control.folder / "home-2-coordinator" / "ca", "home-2", wall=SystemClock().wall(), may_create=False
    )
    own = authority.enrol_self(Role.COORDINATOR, "coordinator", lifetime_s=Seconds(600.0), wall=SystemClock().wall())
    says = signed_envelope.RegionSigner("home-2", own.certificate_pem, own.key_pem)
    ca = stack.contexts.get(f"dev-{FEDERATION}").ca.read_bytes()
    name = dns_of(FEDERATION, Role.FEDERATION, str(Role.FEDERATION))
    address = stack.info.stack.federation[0].addresses["link"]
    credentials = grpc.ssl_channel_credentials(ca, own.key_pem, own.certificate_pem)
    with grpc.secure_channel(address, credentials, channel_options(LINK_BYTES, server_name=name)) as channel:
        federation = federation_pb2_grpc.FederationStub(channel)

        def next_sequence() -> int:
            report = says.sign(ReportContent((), ()), FEDERATION)
            return int(federation.Report(report, timeout=10.0).next_sequence)

        wait_until(lambda: next_sequence() > 1, WAIT_TIMEOUT_S, "the federation to have copies", every_s=0.2)
        forged = LedgerEntry(next_sequence(), Wall(1.0), "granted", "g", "home", "w", "", "", "", "0" * 64)
        with pytest.raises(grpc.RpcError):
            federation.Report(says.sign(ReportContent((), (forged,)), FEDERATION), timeout=10.0)
    watch.until("ShoalLedgerBroken")
    delete_delegated(stack, "away")


def test_all_rules_fired(watch: AlertWatch) -> None:
    """Last: by then all tests above have run."""
    assert watch.fired >= {rule["alert"] for rule in rules()}
