"""A13: fuzzed frames over the wire, at a real region, from a client with a valid certificate. No process dies,
nothing is accepted, every frame is answered in bounded time, and other clients are served meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from harness.attacks.bystander import Attack, AttackCost, run_beside
from harness.clients.oip import GrpcClient, Tensor
from harness.cluster.stack import DevStack, documents, files_of, on_nodes, policy, region, workload
from harness.crypto.pki import CertificateFiles
from harness.report import record
from harness.wait import wait_until
from shoal.agent.dataplane.outcomes import MAX_LOGGED_REFUSALS
from shoal.types.codes import Code
from shoal.wire.enrol import redeem

NAME = "steady"
EVIL = "evil"
X = (Tensor("x", "FP32", (1, 4), bytes(16)),)
KNOWN = frozenset({*Code, "taken", "silence", "closed"})
GRPC_SAYS = ("grpc RESOURCE_EXHAUSTED", "grpc INVALID_ARGUMENT")
"""Of bytes that are no message at all."""
AT = {
    "link": ("coordinator", "link", "coordinator", "coordinator"),
    "receipts": ("coordinator", "link", "coordinator", "coordinator"),
    "mqtt": ("broker", "mqtt", "coordinator", "coordinator"),
    "yaml": ("coordinator", "link", "coordinator", "coordinator"),
    "infer": ("gateway", "data", "gateway", "front"),
    "rest": ("gateway", "data", "gateway", "front"),
}
"""Where each goes: member and use of the address, and whose process it is that others' calls are measured at."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    with region(tmp_path_factory.mktemp("frames"), 1, "mqtt") as found:
        found.apply(documents(policy(NAME, on_nodes(["plain-cpu"])), workload(NAME, "relu", NAME)))
        found.apply(workload("relu", "relu", NAME))
        found.wait_serving(NAME)
        found.wait_serving("relu")
        yield found
        assert [line for line in found.doctor() if EVIL not in line] == []


@pytest.fixture(scope="module")
def evil(stack: DevStack) -> CertificateFiles:
    """A node that an operator let in."""
    with stack.api() as operator:
        token = operator.create_token("agent", EVIL, 300.0).token
    folder = stack.folder / EVIL
    redeem(stack.info.stack.coordinator.addresses["enrol"], token, EVIL).write(folder)
    return CertificateFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")


def state(stack: DevStack) -> dict[str, Any]:
    """All that a frame could change, but for the attacker's own presence."""
    with stack.api() as operator:
        nodes = [view for view in operator.get("nodes").nodes if view.node.name != EVIL]
        return {
            "workloads": [(str(view.workload), view.revision) for view in operator.get("workloads").workloads],
            "policies": str(operator.get("policies")),
            "models": [model.digest for model in operator.models()],
            "placements": [row.assignment.id for row in operator.get("placements").placements],
            "nodes": [(view.node.name, view.liveness, view.epoch, view.quarantined) for view in nodes],
            "attacker's receipts": [
                str(view.receipt)
                for view in operator.get("devices").devices
                if view.node == EVIL and view.HasField("receipt")
            ],
            "workers": stack.workers(),
        }


@asynccontextmanager
async def bystander_call(stack: DevStack, target: str) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """An operator's call at the coordinator, a request of a tenant at the gateway."""
    if target == "coordinator":
        with stack.api() as operator:
            yield partial(asyncio.to_thread, operator.who_am_i)
        return
    files = stack.client_files
    client = GrpcClient(stack.port(target, "data"), files.authority.read_bytes(), files)
    yield partial(client.infer, NAME, X)
    await client.close()


async def attack_beside(stack: DevStack, kind: str, count: int, files: CertificateFiles) -> AttackCost:
    member, use, target, role = AT[kind]
    ((pid, _),) = stack.processes(target, role)
    attack = Attack(kind, f"127.0.0.1:{stack.port(member, use)}", count, files, "harness.attacks.frame_fuzzer")
    async with bystander_call(stack, target) as ask:
        return await run_beside(ask, [pid], [attack], for_s=1000)


async def fuzz(stack: DevStack, kind: str, count: int, evil: CertificateFiles) -> None:
    files = {"yaml": files_of(stack.info.operator), "infer": stack.client_files, "rest": stack.client_files}.get(
        kind, evil
    )
    before, running = state(stack), stack.processes()
    lines = {name: len(log_lines(stack, name)) for name in ("coordinator", "gateway")}
    loop = asyncio.get_running_loop()
    start = loop.time()
    toll = await attack_beside(stack, kind, count, files)
    took_s = loop.time() - start
    (seen,) = toll.attackers
    answers = seen["answers"]
    assert seen["sent"] >= count
    unknown = [each for each in answers if each not in KNOWN and not each.startswith(GRPC_SAYS)]
    assert unknown == [], answers
    assert toll.errors == []
    wait_until(lambda: state(stack) == before, 20, "the region to be as it was")
    assert stack.processes() == running, "nothing died"
    grown = {name: len(log_lines(stack, name)) - lines[name] for name in lines}
    assert max(grown.values()) < 200 + 1.2 * MAX_LOGGED_REFUSALS * took_s, "a flood fills no disk with logs"
    assert toll.growth_bytes < 256 * 2**20
    told = sum(number for code, number in answers.items() if code in set(Code))
    record(
        "A13", "P", seen["sent"], surface=kind, crashes=0, refused_with_a_code=told, taken=answers.get("taken", 0),
        log_lines=max(grown.values()), took_s=round(took_s, 1), **toll.figures(),
    )  # fmt: skip


def log_lines(stack: DevStack, name: str) -> list[str]:
    """Lines, but for those of sessions: each has one when it begins and one when it ends."""
    lines = (stack.control.folder / "logs" / f"{name}.log").read_text().splitlines()
    return [line for line in lines if json.loads(line)["event"] not in ("session_opened", "session_closed")]


@pytest.mark.alone  # whoever else stalls the machine ends links, which begin anew with another epoch
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", AT)
async def test_a13_fuzzed_frames(stack: DevStack, evil: CertificateFiles, kind: str) -> None:
    await fuzz(stack, kind, 800, evil)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", AT)
async def test_a13_a_hundred_thousand_fuzzed_frames(stack: DevStack, evil: CertificateFiles, kind: str) -> None:
    await fuzz(stack, kind, 100_000, evil)
