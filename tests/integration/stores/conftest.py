"""Three members of etcd and three coordinators of one region, for all tests that leave them as they were."""

from collections.abc import Iterator

import pytest

from harness.cluster.coordinators import CoordinatorCluster
from harness.servers.etcd import Etcd, etcd


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with etcd(tmp_path_factory.mktemp("etcd"), members=3) as found:
        yield found


@pytest.fixture(scope="package")
def coordinators(cluster: Etcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorCluster]:
    found = CoordinatorCluster(tmp_path_factory.mktemp("trio"), cluster)
    try:
        found.start()
        yield found
    finally:
        found.stop()
