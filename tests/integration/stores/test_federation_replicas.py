"""Two replicas of a federation on one etcd, one of which is killed: its members go on with the other, and so does the
rotation of its CA."""

import signal
from collections.abc import Callable
from pathlib import Path

from harness.cluster.coordinator import operator
from harness.cluster.federation import FederationProcesses, replicated_federation
from harness.report import record
from harness.servers.etcd import etcd
from harness.wait import wait_until
from shoal.coordinator.clock import CoordinatorClock
from shoal.types.device import Role
from shoal.v1 import operator_pb2

HEARD_S = 5.0
"""An advertisement is told every two seconds; a replica that is gone refuses at once."""


def all_heard_since(federation: FederationProcesses, moment: float) -> Callable[[], bool]:
    """Whether every region has told the federation since, and knows the others as before."""

    def are_all_heard() -> bool:
        for region in federation.regions:
            view = federation.federation_view(region)
            if view is None or view.heard_at <= moment or not all(member.advertises for member in view.members):
                return False
        return True

    return are_all_heard


def test_f42_one_replica_of_the_federation_is_killed(tmp_path: Path) -> None:
    clock = CoordinatorClock()
    with etcd(tmp_path / "etcd") as store, replicated_federation(tmp_path, store, "alpha", "beta") as federation:
        first, second = federation.replicas
        federation.join("alpha")
        token = federation.token("beta")
        first.end(signal.SIGKILL)
        federation.join("beta", token)  # where the first one does not answer, at the second, which knows its token
        first.start(flags=federation.flags)
        federation.wait_all_known()
        took = []
        for replica in (first, second):  # each answers alone once, whichever the regions spoke with
            replica.end(signal.SIGKILL)
            began, wall = clock.now(), clock.wall()
            wait_until(all_heard_since(federation, wall), 20.0, "every region is heard by the other replica")
            took.append(clock.now() - began)
            replica.start(flags=federation.flags)
        assert max(took) <= HEARD_S
        for region in federation.regions:
            view = federation.federation_view(region)
            assert view is not None
            assert not view.HasField("reason")
        record("F42", "P", len(took), replicas=2, store="etcd", heard_again_s=[round(each, 2) for each in took])


def test_f42_a_replica_that_began_a_rotation_is_killed_and_the_other_one_ends_it(tmp_path: Path) -> None:
    clock = CoordinatorClock()
    with etcd(tmp_path / "etcd") as store, replicated_federation(tmp_path, store, "alpha", "beta") as federation:
        first, second = federation.replicas
        for region in federation.regions:
            federation.join(region)
        federation.wait_all_known()

        def authority_at(address: str) -> operator_pb2.GetAuthorityReply:
            own = first.certificate(Role.OPERATOR, "op")  # of the CA that issues now; its files are the first one's
            return operator(address, own).GetAuthority(operator_pb2.GetAuthorityRequest(), timeout=10.0)

        began = clock.now()
        before = [root.fingerprint for root in authority_at(second.link).roots]
        federation.operator().RotateAuthority(operator_pb2.RotateAuthorityRequest(), timeout=10.0)
        first.end(signal.SIGKILL)
        wait_until(
            lambda: [root.state for root in authority_at(second.link).roots] == ["retired", "issuing"],
            60.0, "the other replica to end the rotation",
        )  # fmt: skip
        took_s = clock.now() - began
        first.start(flags=federation.flags)
        for replica, other in ((first, second), (second, first)):
            found = authority_at(replica.link)
            assert [root.fingerprint for root in found.roots][:1] == before
            assert found.stage == "idle"
            other.end(signal.SIGKILL)
            wait_until(all_heard_since(federation, clock.wall()), 20.0, "every region is heard by this replica")
            other.start(flags=federation.flags)
        record("F42", "P", 1, what="rotation of the federation's CA", replicas=2, store="etcd", took_s=round(took_s, 1))
