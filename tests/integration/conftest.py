"""What the tests of several folders stand on, and which of them go to one worker of pytest-xdist."""

from collections.abc import Iterator
from pathlib import PurePath, PurePosixPath

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from harness.cluster.coordinator import CoordinatorServer
from harness.cluster.stack import DevStack, documents, on_nodes, policy, region, workload

SHARING = ("mqtt", "stack", "faults", "federation")
"""Folders each of whose tests stand on one region, which their conftest.py sets up."""
FIRST = ("test_pages.py", *SHARING, "test_demo.py", "test_backend_models.py", "test_forty_shops.py")
"""Groups of tests that take minutes, in the order in which they begin. The others take one at most."""


def group_of(path: PurePath) -> str:
    """Name of the folder, else the module's path."""
    return path.parent.name if path.parent.name in SHARING else str(path)


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """To one worker goes a folder that shares a region, else a module."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(PurePosixPath(nodeid.partition("::")[0]))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups:
    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long groups begin early, so that no worker has one left when the other has nothing."""

    def begins(item: pytest.Item) -> int:
        name = PurePath(group_of(item.path)).name
        return FIRST.index(name) if name in FIRST else len(FIRST)

    items.sort(key=begins)


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorServer]:
    """A coordinator's process, for all tests of a module; it ends well."""
    running = CoordinatorServer(tmp_path_factory.mktemp("coordinator"))
    running.start()
    yield running
    assert running.end() == 0, "the process must outlive every attack"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    """A region with a workload in two replicas on two nodes, for all tests of a module."""
    with region(tmp_path_factory.mktemp("pair"), 2) as found:
        found.apply(documents(policy("two", on_nodes(("plain-cpu", "edge-npu"), 2)), workload("pair", "relu", "two")))
        found.wait_serving("pair", 2)
        yield found
