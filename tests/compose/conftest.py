"""The federation in containers, once for all tests that leave it as they found it."""

from collections.abc import Iterator

import pytest

from harness.cluster.compose import AWAY, NODES, STEADY, WAIT_TIMEOUT_S, Compose, federation
from harness.cluster.delegation import in_regions
from harness.cluster.stack import documents, on_nodes, policy, workload
from harness.models.synthetic import relu
from harness.wait import wait_until


@pytest.fixture(scope="session")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    with federation(tmp_path_factory.mktemp("compose") / "home") as found:
        yield found


@pytest.fixture(scope="session")
def fleet(compose: Compose, tmp_path_factory: pytest.TempPathFactory) -> Compose:
    """With the model `relu` and two workloads of it: one in edge, on two of its three agents, one that cloud runs."""
    path = tmp_path_factory.mktemp("models") / "relu.onnx"
    path.write_bytes(relu().SerializeToString())
    pushed = compose.shoal("model", "push", str(path), "--name", "relu")
    assert pushed.returncode == 0, pushed.stderr
    at_home = documents(policy(STEADY, on_nodes(NODES["edge"], 2)), workload(STEADY, "relu", STEADY))
    compose.apply(documents(at_home, in_regions(AWAY, "cloud")))
    compose.placements(STEADY, replicas=2)
    wait_until(lambda: compose.ask(AWAY), WAIT_TIMEOUT_S, "an answer from another region", every_s=0.2)
    return compose


@pytest.fixture
def hurt(fleet: Compose) -> Iterator[Compose]:
    """To be hurt. Afterwards everything runs and serves again, and the invariants hold in every region."""
    yield fleet
    fleet.placements(STEADY, replicas=2)
    wait_until(lambda: fleet.ask(AWAY), WAIT_TIMEOUT_S, "an answer from another region", every_s=0.2)
    fleet.wait_healthy()
