"""Two replicas of a federation on one etcd, one of which is killed: its members go on with the other."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cluster.federation import FederationProcesses, replicated_federation
from harness.report import record
from harness.servers.etcd import etcd
from harness.wait import wait_until
from shoal.coordinator.clock import CoordinatorClock

pytestmark = pytest.mark.alone

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
