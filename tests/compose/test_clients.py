"""An unmodified tritonclient at the published ports of datacenter's gateway: the bits of ONNX Runtime in process."""

from pathlib import Path

import pytest

from harness.clients import triton
from harness.cluster.compose import Compose
from harness.cluster.stack import documents, on_nodes, policy, workload
from harness.report import record

pytestmark = [pytest.mark.compose, pytest.mark.alone, pytest.mark.timeout(300)]

REGION, NODE = "datacenter", "datacenter-cpu"


@pytest.fixture(scope="module")
def suite(compose: Compose, tmp_path_factory: pytest.TempPathFactory) -> triton.Suite:
    """A workload for each model, of the default tenant, on this machine's own processor."""
    found = triton.suite(tmp_path_factory.mktemp("models"))
    with compose.api(REGION) as api:
        for name, path in found.models.items():
            api.push(path, f"t-{name}")
    workloads = [workload(name, f"t-{name}", "here") for name in found.models]
    compose.apply(documents(policy("here", on_nodes([NODE])), *workloads), REGION)
    for name in found.models:
        compose.placements(name, REGION, replicas=1)
    return found


@pytest.mark.parametrize("credential", ["certificate", "bearer"])
@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_the_same_bits_as_onnx_runtime(
    compose: Compose, suite: triton.Suite, tmp_path: Path, transport: str, credential: str
) -> None:
    files = compose.client_files(REGION)
    asked = triton.cases_of(suite, transport)
    if credential == "certificate":
        given = {"certificate": str(files.certificate), "key": str(files.key)}
    else:
        given = {"bearer": (compose.home / REGION / "client" / "bearer").read_text().strip()}
    address = f"localhost:{compose.port('data', REGION)}"
    found = triton.ask(tmp_path, transport, address, asked, suite, authority=str(files.authority), **given)
    compared = triton.check_answers(found, asked, suite, transport)
    record("issue 7, point 1", "C", 1, transport=transport, credential=credential, equal=compared)
