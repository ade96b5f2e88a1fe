"""A tenant's quota over a whole region: entries share rate and concurrency and follow where its clients call, and a
budget bounds what is placed."""

import asyncio
import json
from collections.abc import Iterator
from functools import partial

import pytest

from harness.attacks.tenant_flood import INPUTS
from harness.clients.http2_rest import Http2RestClient
from harness.clients.oip import NOTHING, GrpcClient, InferenceError, Metadata, Response, RestClient
from harness.cluster.stack import DevStack, documents, on_nodes, policy, workload
from harness.models import synthetic
from harness.report import record
from harness.wait import until, wait_until
from shoal.types.codes import Code
from shoal.v1 import operator_pb2

TENANT = "limited"
RATE = 40.0
ENTRIES = {"gateway", "plain-cpu", "edge-npu"}
THRIFTY = "thrifty"


@pytest.fixture(scope="module")
def quota_region(stack: DevStack) -> Iterator[DevStack]:
    stack.push(synthetic.relu().SerializeToString(), "t-limited")
    tenant = (
        f"apiVersion: shoal/v1\nkind: Tenant\nmetadata: {{name: {TENANT}}}\n"
        f"spec: {{quota: {{rate: {RATE:g}/s, concurrency: 12}}, weight: 2}}\n"
    )
    where = policy("limited-at", on_nodes(["plain-cpu"]))
    stack.apply(documents(tenant, where, workload("relu", "t-limited", "limited-at", TENANT)))
    stack.wait_serving("relu")
    yield stack
    stack.delete_workloads("relu", tenant=TENANT)


def quota(stack: DevStack) -> operator_pb2.TenantView:
    with stack.api() as api:
        (view,) = api.get("tenants", TENANT).documents
    return view.tenant_quota


async def until_admitted(
    client: RestClient | Http2RestClient, verb: str, body: bytes, metadata: Metadata = NOTHING
) -> Response:
    """The response once the rate of a front has room: a front begins without any, and with a third of the quota."""

    async def ask() -> Response | None:
        response = await client.request("POST", f"/v2/models/relu/{verb}", body, metadata)
        return None if Code.TENANT_RATE.encode() in response.body else response

    response = await until(ask, 20.0, "the rate to have room")
    assert response is not None
    return response


@pytest.mark.parametrize("way", ["gateway", "plain-cpu", "edge-npu"])
async def test_values_by_name_run_as_an_infer_request_does_and_are_charged_alike(
    quota_region: DevStack, way: str
) -> None:
    """Triton's generate extension at a gateway, at the front of the replica, and at one that forwards to it."""
    files, _ = quota_region.tenant(TENANT)

    def admitted_count() -> int:
        return next(entry.use.admitted for entry in quota(quota_region).entries if entry.node == way)

    before = admitted_count()
    body = b'{"id": "r-1", "x": [-1, 2, -3, 4, 5, -6, 7, -8]}'
    expected = {"model_name": "relu", "model_version": "1", "id": "r-1", "y": [0, 2, 0, 4, 5, 0, 7, 0]}
    for client_of in (RestClient, Http2RestClient):
        client = client_of(quota_region.port(way, "data"), files.authority.read_bytes(), files)
        await until(partial(client.model_ready, "relu"), 60.0, f"{way} to know the tenant's model")
        assert (await until_admitted(client, "generate", body)).json() == expected
        stream = await until_admitted(client, "generate_stream", body)
        assert json.loads(stream.body.removeprefix(b"data: ")) == expected
        late = await until_admitted(client, "generate_stream", body, {"shoal-deadline-ms": "0"})
        assert Code.DEADLINE_EXCEEDED.encode() in late.body
        await client.close()
    await until(lambda: admitted_count() >= before + 4, 20, "each of them to be charged")


async def test_the_region_holds_the_rate_and_gives_it_to_where_the_clients_are(quota_region: DevStack) -> None:
    """All clients call the gateway. It gets its share and the others' too, and never more than the quota."""
    shown = quota(quota_region)
    assert (shown.rate, shown.concurrency, shown.weight) == (RATE, 12, 2.0)
    assert {entry.node for entry in shown.entries} == ENTRIES
    assert sum(entry.limit.rate for entry in shown.entries) == pytest.approx(RATE)
    assert sum(entry.limit.concurrency for entry in shown.entries) == 12
    files, _ = quota_region.tenant(TENANT)
    client = GrpcClient(quota_region.port("gateway", "data"), files.authority.read_bytes(), files)
    loop, codes = asyncio.get_running_loop(), list[tuple[float, str]]()
    is_over = asyncio.Event()

    async def ask() -> None:
        while not is_over.is_set():
            try:
                await client.infer("relu", INPUTS["relu"], timeout=10)
                codes.append((loop.time(), "answered"))
            except InferenceError as error:
                codes.append((loop.time(), error.code))
                await asyncio.sleep(min(0.05, float(error.retry_after_ms) / 1e3))  # noqa: TID251 - a client's pace

    def gateway_share() -> float:
        return next(entry.limit.rate for entry in quota(quota_region).entries if entry.node == "gateway")

    clients = [asyncio.create_task(ask()) for _ in range(4)]
    try:
        asked_at = loop.time()
        await until(lambda: gateway_share() > 0.9 * RATE, 40, "the gateway's share follows demand", every_s=0.5)
        begin = loop.time()
        await until(lambda: loop.time() > begin + 5.0, 10, "five seconds of it")
    finally:
        is_over.set()
        await asyncio.gather(*clients)
        await client.close()
    assert {code for _, code in codes} == {"answered", Code.TENANT_RATE}
    since = [at for at, code in codes if code == "answered" and at >= begin]
    asked = sum(at >= begin for at, _ in codes)
    took = max(since) - begin
    figures = {"rate": RATE, "answered_per_s": round(len(since) / took, 1), "followed_s": round(begin - asked_at, 1)}
    record("A52", "P", 1, **figures)
    assert 0.7 * min(RATE * took, asked) <= len(since) <= RATE * took + RATE + len(ENTRIES)
    listed = quota_region.shoal("get", "tenants", TENANT, "-o", "wide").stdout
    assert "40/s" in listed
    assert "gateway:" in listed
    described = quota_region.shoal("describe", "tenant", TENANT, "-o", "yaml").stdout
    assert "over_rate" in described
    assert any(entry.use.over_rate for entry in quota(quota_region).entries)


def test_a51_a_budget_bounds_what_is_placed_and_a_killed_coordinator_knows_it(stack: DevStack) -> None:
    """Three names at once, on a device of 0.08 USD/h; the budget covers two of them."""
    stack.push(synthetic.relu().SerializeToString(), "t-thrifty")
    budget = (
        f"apiVersion: shoal/v1\nkind: Tenant\nmetadata: {{name: {THRIFTY}}}\nspec: {{quota: {{cost: 0.2 USD/h}}}}\n"
    )
    where = policy("thrifty-at", on_nodes(["plain-cpu"]))
    names = ["thrifty-1", "thrifty-2", "thrifty-3"]
    stack.apply(documents(budget, where, *(workload(name, "t-thrifty", "thrifty-at", THRIFTY) for name in names)))

    def serving() -> set[str]:
        """Workloads of the tenant that serve; nothing of it is beyond the budget."""
        views = [stack.workload(name, THRIFTY) for name in names]
        refused = [view for view in views if view.reason.code == Code.QUOTA]
        assert len(refused) >= len(names) - 2 or not any(view.ready for view in views)
        return {view.workload.name for view in views if view.ready}

    wait_until(lambda: len(serving()) == 2, 60, "two of them to serve")
    before = serving()
    (refused,) = (view for view in (stack.workload(name, THRIFTY) for name in names) if not view.ready)
    assert "thrifty would cost 0.24 USD/h" in refused.reason.found
    stack.kill("coordinator")
    names.append("thrifty-4")
    stack.control.break_member("coordinator", "resume")
    wait_until(stack.are_nodes_current, 60, "the coordinator to be back")
    stack.apply(workload(names[-1], "t-thrifty", "thrifty-at", THRIFTY))
    wait_until(
        lambda: stack.workload(names[-1], THRIFTY).reason.code == Code.QUOTA,
        60,
        "the fourth to be refused with figures",
    )
    assert serving() == before
    assert "0.16 of 0.2 USD/h" in stack.shoal("get", "tenants", THRIFTY).stdout
    described = stack.shoal("describe", "tenant", THRIFTY, "-o", "yaml").stdout
    assert "used: 0.16" in described
    assert "QUOTA" in stack.shoal("explain", refused.workload.name, "--tenant", THRIFTY).stdout
    stack.delete_workloads(*names, tenant=THRIFTY)
