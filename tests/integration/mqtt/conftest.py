"""A region of real processes whose links Mosquitto carries, with one workload; for all tests of this folder."""

from collections.abc import Iterator

import pytest
from integration.mqtt.region import NAME

from harness.cluster.stack import DevStack, documents, on_nodes, policy, region, workload


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    with region(tmp_path_factory.mktemp("mqtt"), 1, "mqtt") as found:
        found.apply(documents(policy(NAME, on_nodes(["plain-cpu"])), workload(NAME, "relu", NAME)))
        found.wait_serving(NAME)
        yield found
