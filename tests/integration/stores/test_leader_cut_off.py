"""F08 where nobody stands still: the leader is cut off from etcd alone, and goes on being reached by all others."""

from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from harness.cluster.coordinator import CoordinatorServer
from harness.cluster.coordinators import CoordinatorCluster, who_am_i
from harness.faults.tcp_proxy import tcp_proxy_in_thread
from harness.ports import free_ports
from harness.report import record
from harness.servers.etcd import etcd
from harness.wait import wait_until
from shoal.coordinator.clock import CoordinatorClock

STEPS_DOWN_S = 10.0


class Pair(CoordinatorCluster):
    """The first one reaches etcd by `ways`, HOST:PORT,.. of proxies."""

    ways = ""

    def start_one(self, coordinator: CoordinatorServer) -> None:
        if coordinator.process is not None:
            return
        links = ",".join(each.link for each in self.members)
        flags = (*self.cluster.flags, "--shared-dir", str(self.shared), "--links", links)
        coordinator.start(flags=(*flags, *(("--etcd-endpoints", self.ways) if coordinator is self.members[0] else ())))


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(120)
def test_f08_a_leader_that_is_cut_off_from_etcd_alone_hears_of_the_next_one_and_lets_go(tmp_path: Path) -> None:
    clock = CoordinatorClock()
    with etcd(tmp_path / "etcd") as cluster, ExitStack() as opened:
        ways = [opened.enter_context(tcp_proxy_in_thread(each.client_port)) for each in cluster.members]
        pair = Pair(tmp_path, cluster, count=2)
        pair.ways = ",".join(f"127.0.0.1:{way.port}" for way in ways)
        first, second = pair.members
        first.link, second.link = (f"127.0.0.1:{port}" for port in free_ports(2))
        try:
            pair.start_one(first)
            pair.start()  # the second one too
            assert pair.leader() is first
            term = pair.term(first)
            for way in ways:
                way.is_stalled = True
            began = clock.now()
            wait_until(lambda: not who_am_i(second, pair.admin).follows, STEPS_DOWN_S, "the second one leads")
            elected_s = clock.now() - began
            assert pair.term(second) == term + 1

            def has_let_go() -> bool:
                try:
                    return who_am_i(first, pair.admin).follows
                except grpc.RpcError:  # it answers nobody while it cannot read
                    return True

            wait_until(has_let_go, STEPS_DOWN_S, "the first one leads no more")
            let_go_s = clock.now() - began
            for way in ways:
                way.is_stalled = False
            wait_until(lambda: who_am_i(first, pair.admin).follows, 30.0, "the first one follows")
        finally:
            pair.stop()
    assert let_go_s <= STEPS_DOWN_S
    record("F08", "P", 1, fault="cut off from etcd alone", elected_s=round(elected_s, 2), let_go_s=round(let_go_s, 2))
