"""An unmodified tritonclient against a whole region: at its gateway, at the agent that runs the models, at one that
does not; with a certificate and with a bearer token. The bits are those of ONNX Runtime in process."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.clients import triton
from harness.clients.oip import GrpcClient, InferenceError, OipClient, RestClient, Tensor
from harness.cluster.stack import DevStack, documents, on_nodes, policy, workload
from harness.crypto.pki import CertificateFiles
from harness.report import record
from harness.wait import until

TENANT = "triton"
FRONTS = ("plain-cpu", "edge-npu", "gateway")


@dataclass(frozen=True, slots=True)
class Scene:
    stack: DevStack
    suite: triton.Suite
    files: CertificateFiles
    bearer: str


@pytest.fixture(scope="module")
def scene(stack: DevStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A workload for each model, of a tenant of its own, all on the plain CPU."""
    suite = triton.suite(tmp_path_factory.mktemp("models"))
    for name, path in suite.models.items():
        stack.push(path.read_bytes(), f"t-{name}")
    tenant = f"apiVersion: shoal/v1\nkind: Tenant\nmetadata: {{name: {TENANT}}}\nspec:\n  quota: {{replicas: 8}}\n"
    workloads = [workload(name, f"t-{name}", "at-plain-cpu", TENANT) for name in suite.models]
    stack.apply(documents(tenant, policy("at-plain-cpu", on_nodes(["plain-cpu"])), *workloads))
    for name in suite.models:
        stack.wait_serving(name)
    files, bearer = stack.tenant(TENANT)
    yield Scene(stack, suite, files, bearer)
    stack.delete_workloads(*suite.models, tenant=TENANT)


@pytest.mark.parametrize("way", FRONTS)
@pytest.mark.parametrize("transport", ["grpc", "http"])
async def test_the_same_bits_as_onnx_runtime(scene: Scene, tmp_path: Path, transport: str, way: str) -> None:
    port = scene.stack.port(way, "data")
    await knows(scene, way)
    asked = triton.cases_of(scene.suite, transport)
    credentials = {"certificate": str(scene.files.certificate), "key": str(scene.files.key)}
    found = triton.ask(
        tmp_path,
        transport,
        f"localhost:{port}",
        asked,
        scene.suite,
        authority=str(scene.files.authority),
        **credentials,
    )
    compared = triton.check_answers(found, asked, scene.suite, transport)
    record("issue 3, point 3", "P", 1, transport=transport, way=way, equal=compared, errors=len(found["errors"]))


@pytest.mark.parametrize("transport", ["grpc", "http"])
async def test_a_bearer_token_does_as_well_as_a_certificate(scene: Scene, tmp_path: Path, transport: str) -> None:
    port = scene.stack.port("gateway", "data")
    await knows(scene, "gateway")
    asked = triton.cases_of(scene.suite, transport)
    found = triton.ask(
        tmp_path,
        transport,
        f"localhost:{port}",
        asked,
        scene.suite,
        authority=str(scene.files.authority),
        bearer=scene.bearer,
    )
    triton.check_answers(found, asked, scene.suite, transport)


@pytest.mark.parametrize("way", ["plain-cpu", "gateway"])
async def test_another_tenant_does_not_find_it(scene: Scene, way: str) -> None:
    """By certificate and by token, over gRPC and REST; and it cannot say that it were the first."""
    stack = scene.stack
    files, bearer = stack.client_files, stack.info.bearer.read_text()
    authority = files.authority.read_bytes()
    await knows(scene, way)
    (name, feed), *_ = scene.suite.feeds["rec"].items()
    x = Tensor(name, "FP32", feed.shape, feed.tobytes())
    port = stack.port(way, "data")
    clients: list[OipClient] = [
        GrpcClient(port, authority, files),
        GrpcClient(port, authority, bearer=bearer),
        RestClient(port, authority, files),
        RestClient(port, authority, bearer=bearer),
    ]
    for client in clients:
        missing, denied = ("NOT_FOUND", "PERMISSION_DENIED") if isinstance(client, GrpcClient) else (404, 403)
        with pytest.raises(InferenceError) as found:
            await client.infer("rec", (x,))
        assert (found.value.status, found.value.code) == (missing, "MODEL_NOT_FOUND")
        with pytest.raises(InferenceError) as found:
            await client.infer("rec", (x,), extra_metadata={"shoal-tenant": TENANT})
        assert (found.value.status, found.value.code) == (denied, "TENANT_DENIED")
        assert "rec" not in {row["name"] for row in await client.index()}
        await client.close()


async def test_nobody_without_certificate_or_token(scene: Scene) -> None:
    stack = scene.stack
    authority = scene.files.authority.read_bytes()
    clients: list[tuple[OipClient, str | int]] = [
        (GrpcClient(stack.port("gateway", "data"), authority), "UNAUTHENTICATED"),
        (RestClient(stack.port("gateway", "data"), authority), 401),
    ]
    for client, status in clients:
        with pytest.raises(InferenceError) as found:
            await client.model("rec")
        assert (found.value.status, found.value.code) == (status, "UNAUTHENTICATED")
        await client.close()


async def knows(scene: Scene, way: str) -> None:
    """Routes and tokens travel to each front by themselves."""
    authority = scene.files.authority.read_bytes()
    client = GrpcClient(scene.stack.port(way, "data"), authority, bearer=scene.bearer)

    async def ready() -> bool:
        return all([await client.model_ready(name) for name in scene.suite.models])

    await until(ready, 60.0, f"{way} to know the tenant's models")
    await client.close()
