"""An unmodified tritonclient against real fronts and workers: the same bits as ONNX Runtime in process.

Over gRPC and HTTP, binary and JSON, plain and compressed, at the agent that has the workers and through a gateway that
has none.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.clients import triton
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority
from shoal.agent.clock import SystemClock
from shoal.types.device import Role
from shoal.types.route import Route
from shoal.types.workload import WorkloadKey


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> triton.Suite:
    return triton.suite(tmp_path_factory.mktemp("models"))


@pytest.fixture
async def region(tmp_path: Path, suite: triton.Suite) -> AsyncIterator[tuple[Authority, DataPlaneNode, DataPlaneNode]]:
    """An agent with a worker for each model, and a gateway."""
    authority = Authority(tmp_path / "ca", "west", SystemClock().wall())
    agent = DataPlaneNode("n1", authority, tmp_path / "n1")
    gateway = DataPlaneNode("g1", authority, tmp_path / "g1", Role.GATEWAY)
    try:
        await asyncio.gather(agent.start(), gateway.start())
        for name, path in suite.models.items():
            await agent.load(f"a-{name}", WorkloadKey("acme", name), path)
        await agent.configure()
        await gateway.configure(
            Route(key, 1, (agent.endpoint(assignment, at=gateway),)) for assignment, key in agent.models.items()
        )
        yield authority, agent, gateway
    finally:
        await gateway.stop()
        await agent.stop()


@pytest.mark.parametrize("way", ["agent", "gateway"])
@pytest.mark.parametrize("transport", ["grpc", "http"])
async def test_same_bits_metadata_and_errors(
    region: tuple[Authority, DataPlaneNode, DataPlaneNode],
    suite: triton.Suite,
    transport: str,
    way: str,
    tmp_path: Path,
) -> None:
    authority, agent, gateway = region
    config = (agent if way == "agent" else gateway).front.config
    tenant = authority.issue(Role.TENANT, "acme")
    asked = triton.cases_of(suite, transport)
    found = await asyncio.to_thread(
        triton.ask,
        tmp_path / "asked",
        transport,
        f"localhost:{config.port}",
        asked,
        suite,
        authority=str(tenant.authority),
        certificate=str(tenant.certificate),
        key=str(tenant.key),
    )
    triton.check_answers(found, asked, suite, transport)
