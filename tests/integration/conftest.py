"""What the tests of several folders stand on."""

from collections.abc import Iterator

import pytest

from harness.coordinator import Coordinator
from harness.stack import Stack, documents, on_nodes, policy, region, workload


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator's process, for all tests of a module; it ends well."""
    running = Coordinator(tmp_path_factory.mktemp("coordinator"))
    running.start()
    yield running
    assert running.end() == 0, "the process must outlive every attack"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A region with a workload in two replicas on two nodes, for all tests of a module."""
    with region(tmp_path_factory.mktemp("pair"), 2) as found:
        found.apply(documents(policy("two", on_nodes(("plain-cpu", "edge-npu"), 2)), workload("pair", "relu", "two")))
        found.serves("pair", 2)
        yield found
