"""One region whose members are machines of their own, for all tests that leave it whole."""

from collections.abc import Iterator

import pytest
from integration.faults.clocks import PAIR, SKEW_S

from harness.cluster.netns_stack import NetnsStack, netns_region
from harness.cluster.stack import documents, on_nodes, policy, workload


@pytest.fixture(scope="package")
def island(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetnsStack]:
    """Three agents; `pair` runs in two replicas on two of them, `third` is free for a replacement."""
    ahead_s = {PAIR[0]: -SKEW_S, PAIR[1]: SKEW_S}
    with netns_region(tmp_path_factory.mktemp("apart"), 3, ahead_s) as found:
        found.apply(documents(policy("two", on_nodes(PAIR, 2)), workload("pair", "relu", "two")))
        found.wait_serving("pair", 2)
        yield found


@pytest.fixture
def region(island: NetnsStack) -> Iterator[NetnsStack]:
    """Whole before and after, whatever a test that failed has left of networks and clocks."""
    island.wait_steady()
    right = {name: clock.ahead_s for name, clock in island.clocks.items()}
    yield island
    island.net.heal()
    for name, clock in island.clocks.items():
        clock.jump(right[name])
    island.wait_steady()
