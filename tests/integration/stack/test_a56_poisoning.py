"""A56: a tenant crashes its own workers on purpose, to have a model blocked. Another tenant's replicas of that model
are replaced after a node loss."""

import struct
from collections.abc import Iterator

import pytest

from harness.clients.oip import GrpcClient, InferenceError, Tensor
from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack, documents, policy, region, workload
from harness.crypto.pki import CertificateFiles
from harness.models import engine_cases
from harness.report import record
from harness.wait import until, wait_until
from shoal.agent.clock import SystemClock
from shoal.types.codes import Code

FLEET = (("one", ""), ("two", ""), ("three", ""))
LOST_AFTER_S = 4.0
SOON = f"  partition: {{lost_after: {LOST_AFTER_S:g}s}}\n"
MOST_REQUESTS = 30
TENANT = "apiVersion: shoal/v1\nkind: Tenant\nmetadata: {{name: {name}}}\n"


@pytest.fixture
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    """Three like machines, so that what is poisoned on one is poisoned on all."""
    with region(tmp_path_factory.mktemp("three"), len(FLEET), fleet=FLEET) as found:
        found.push(engine_cases.divide(), "divide")
        yield found


def dividing(least: int, by: int, count: int) -> tuple[Tensor, Tensor]:
    """The least integer over -1 ends a worker by SIGFPE. count: of elements, so that no two requests are alike."""
    return (
        Tensor("x", "INT32", (count,), struct.pack(f"<{count}i", *[least] * count)),
        Tensor("d", "INT32", (count,), struct.pack(f"<{count}i", *[by] * count)),
    )


def client_of(stack: DevStack, files: CertificateFiles) -> GrpcClient:
    return GrpcClient(stack.port("gateway", "data"), files.authority.read_bytes(), files)


def poisonings(stack: DevStack) -> list[str]:
    """Of the region, whose events are about the model; a node's are about its replica."""
    return [each.message for each in stack.events() if each.code == Code.POISONED and each.subject.startswith("sha256")]


def host_of(stack: DevStack, name: str) -> str:
    """Where its one replica serves; empty while there is none."""
    found = [row.node for row in stack.placements(name) if row.observed.phase == "ready"]
    return found[0] if len(found) == 1 else ""


async def test_a56_a_model_that_one_tenant_crashed_is_replaced_for_another_after_a_node_loss(three: DevStack) -> None:
    stack, clock = three, SystemClock()
    parts = [TENANT.format(name=name) for name in ("shop", "bank")]
    parts += [workload(f"of-{name}", "divide", "soon", name) for name in ("shop", "bank")]
    stack.apply(documents(policy("soon", SOON), *parts))
    wait_until(lambda: host_of(stack, "of-shop") and host_of(stack, "of-bank"), WAIT_TIMEOUT_S, "both to serve")
    (shop, _), (bank, _) = stack.tenant("shop"), stack.tenant("bank")
    attacker, client = client_of(stack, shop), client_of(stack, bank)
    codes: list[str] = []
    try:
        for count in range(1, MOST_REQUESTS):
            try:
                await attacker.infer("of-shop", dividing(-(2**31), -1, count), timeout=10.0)
            except InferenceError as failed:
                codes.append(failed.code)
            if poisonings(stack):
                break
            await until(lambda: host_of(stack, "of-shop") or poisonings(stack), WAIT_TIMEOUT_S, "its next replica")
        told = wait_until(lambda: poisonings(stack), WAIT_TIMEOUT_S, f"the poisoning: {codes}")
        assert all(each.endswith(" for shop") for each in told), told
        assert Code.WORKER_CRASHED in codes, "a real crash, not a refusal"
        assert struct.unpack("<i", (await client.infer("of-bank", dividing(6, 3, 1))).outputs[0].raw) == (2,)
        home = host_of(stack, "of-bank")
        at = clock.now()
        stack.kill(home)
        again = wait_until(
            lambda: node if (node := host_of(stack, "of-bank")) not in ("", home) else "",
            WAIT_TIMEOUT_S,
            "a new replica",
        )
        took_s = clock.now() - at

        async def answers() -> bool:
            try:
                found = await client.infer("of-bank", dividing(8, 4, 2))
            except InferenceError:
                return False
            return struct.unpack("<2i", found.outputs[0].raw) == (2, 2)

        await until(answers, WAIT_TIMEOUT_S, "its answers")
        assert host_of(stack, "of-shop") == ""
    finally:
        await attacker.close()
        await client.close()
    record("A56", "P", 1, requests=len(codes), replaced_s=round(took_s, 1), from_node=home, to_node=again)
