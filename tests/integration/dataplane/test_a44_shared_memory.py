"""A44: shared memory as an attacker's way in, over gRPC and REST at a real front. What is not the tenant's is refused,
the front lives, and nobody learns another tenant's names."""

import asyncio
import json
import os
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.clients.oip import NOTHING, GrpcClient, InferenceError, Metadata, RestClient, infer_request
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority
from harness.models.synthetic import relu
from harness.report import record
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.core.shared_memory import REGIONS_PER_TENANT, SharedMemoryGrant
from shoal.agent.dataplane.shared_regions import FOLDER
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.route import Route
from shoal.types.workload import WorkloadKey

RUN = f"shoal-a44-{os.getpid()}-"
ATTACKER, VICTIM = f"{RUN}mallory-", f"{RUN}bob-"
GRANTS = (SharedMemoryGrant("mallory", ATTACKER), SharedMemoryGrant("bob", VICTIM))
CANARY = "bobs-secret-region"
ROW = struct.pack("<4f", -1, 2, -3, 4)
ANSWER = struct.pack("<4f", 0, 2, 0, 4)
WIDTH = len(ROW)
LARGE = 2**20
"""Bytes of the region that is shrunk: as many as are copied at once."""


@pytest.fixture
def files() -> Iterator[dict[str, Path]]:
    """One of each tenant, and one that is nobody's."""
    made = {"own": FOLDER / f"{ATTACKER}own", "bobs": FOLDER / f"{VICTIM}own", "nobodys": FOLDER / f"{RUN}nobody"}
    for each in made.values():
        each.write_bytes(ROW * 8)
    yield made
    for path in FOLDER.glob(f"{RUN}*"):
        path.unlink()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[DataPlaneNode]:
    authority = Authority(tmp_path / "ca", "west", SystemClock().wall())
    model = tmp_path / "relu.onnx"
    model.write_bytes(relu().SerializeToString())
    made = DataPlaneNode("n1", authority, tmp_path / "n1", shared_memory=GRANTS)
    try:
        await made.start()
        for tenant in ("mallory", "bob", "other"):
            await made.load(f"a-{tenant}", WorkloadKey(tenant, "relu"), model)
        await made.configure()
        yield made
    finally:
        await made.stop()


class Caller:
    """One tenant over one of the transports."""

    def __init__(self, node: DataPlaneNode, tenant: str, transport: str) -> None:
        files = node.authority.issue(Role.TENANT, tenant)
        self.transport = transport
        self.grpc: GrpcClient = node.grpc_client(files)
        self.rest: RestClient = node.rest_client(files)

    async def register(self, name: str, key: str, offset: int = 0, size: int = WIDTH) -> None:
        if self.transport == "grpc":
            asked = oip.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=offset, byte_size=size)
            await self.grpc.call("SystemSharedMemoryRegister", asked.SerializeToString())
        else:
            body = json.dumps({"key": key, "offset": offset, "byte_size": size}).encode()
            await self.rest.checked_request("POST", f"/v2/systemsharedmemory/region/{name}/register", body)

    async def unregister(self, name: str = "") -> None:
        if self.transport == "grpc":
            asked = oip.SystemSharedMemoryUnregisterRequest(name=name)
            await self.grpc.call("SystemSharedMemoryUnregister", asked.SerializeToString())
        else:
            path = f"region/{name}/unregister" if name else "unregister"
            await self.rest.checked_request("POST", f"/v2/systemsharedmemory/{path}")

    async def status(self, name: str = "") -> str:
        if self.transport == "grpc":
            asked = oip.SystemSharedMemoryStatusRequest(name=name)
            return str(await self.grpc.call("SystemSharedMemoryStatus", asked.SerializeToString()))
        path = f"region/{name}/status" if name else "status"
        return (await self.rest.checked_request("GET", f"/v2/systemsharedmemory/{path}")).body.decode()

    async def infer(
        self,
        region: str,
        offset: Any = 0,
        size: Any = WIDTH,
        *,
        rows: int = 1,
        answer: bool = False,
        said: Metadata = NOTHING,
    ) -> bytes:
        """The input, or with `answer` the output, in a region; returns the output's contents."""
        wanted = {"shared_memory_region": region, "shared_memory_byte_size": size, "shared_memory_offset": offset}
        if self.transport == "rest":
            one: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [rows, 4]}
            one |= {"data": struct.unpack("<4f", ROW)} if answer else {"parameters": wanted}
            outputs = [{"name": "y", "parameters": wanted}] if answer else []
            document = {"inputs": [one], **({"outputs": outputs} if outputs else {})}
            found = await self.rest.checked_request(
                "POST", "/v2/models/relu/infer", json.dumps(document).encode(), said
            )
            data = found.json()["outputs"][0].get("data")
            return b"" if data is None else struct.pack(f"<{rows * 4}f", *data)
        message = infer_request("relu", ())
        message.inputs.add(name="x", datatype="FP32", shape=[rows, 4])
        parameters = message.inputs[0].parameters
        if answer:
            message.raw_input_contents.append(ROW)
            message.outputs.add(name="y")
            parameters = message.outputs[0].parameters
        parameters["shared_memory_region"].string_param = region
        for name, value in wanted.items():
            if isinstance(value, int):
                field = "int64_param" if value < 2**63 else "uint64_param"
                setattr(parameters[name], field, value)
        raw = await self.grpc.call("ModelInfer", message.SerializeToString(), said)
        (found_,) = oip.ModelInferResponse.FromString(raw).raw_output_contents
        return found_

    async def close(self) -> None:
        await self.grpc.close()


@pytest.fixture(params=["grpc", "rest"])
async def mallory(node: DataPlaneNode, request: pytest.FixtureRequest) -> AsyncIterator[Caller]:
    made = Caller(node, "mallory", request.param)
    yield made
    await made.close()


@pytest.fixture
async def bob(node: DataPlaneNode, files: dict[str, Path]) -> AsyncIterator[Caller]:
    """With a region of his own."""
    made = Caller(node, "bob", "grpc")
    await made.register(CANARY, files["bobs"].name)
    yield made
    await made.close()


async def refusal_of(asked: Any) -> InferenceError:
    with pytest.raises(InferenceError) as refused:
        await asked
    return refused.value


async def test_a44_what_is_not_the_tenants_is_refused(
    node: DataPlaneNode, mallory: Caller, bob: Caller, files: dict[str, Path]
) -> None:
    (FOLDER / f"{ATTACKER}link").symlink_to(files["bobs"])
    os.link(files["bobs"], FOLDER / f"{ATTACKER}hard")
    own, pid = files["own"].name, node.front.pid
    keys = [
        "", "/", "..", f"../shm/{own}", f"/../dev/shm/{own}", f"//{own}", f"{FOLDER}/{own}", "../../etc/passwd",
        files["bobs"].name, f"/{files['bobs'].name}", files["nobodys"].name, f"{ATTACKER}link", f"{ATTACKER}hard",
        f"{ATTACKER}missing", f"{own}/..", f"{own}\0", f"sem.{own}", "psm_0a1b2c3d",
        "triton_python_backend_shm_region_1",
    ]  # fmt: skip
    refused = [await refusal_of(mallory.register("r", key)) for key in keys]
    spans = [
        (0, 0), (0, 129), (128, 1), (127, 2), (2**63 - 1, 2), (2**63, 2**63), (2**64 - 1, 2), (1, 2**64 - 1),
        (0, 2**64 - 1),
    ]  # fmt: skip
    refused += [await refusal_of(mallory.register("r", own, *span)) for span in spans]
    await mallory.register("r", f"/{own}", 16, 32)
    places = [
        (0, 33), (33, 0), (32, 1), (17, 16), (2**31, 16), (2**32, 2**32), (2**63 - 1, 2), (1, 2**63 - 1),
        (-1, 16), (0, -1), (-16, 32),
    ]  # fmt: skip
    for answer in (False, True):
        refused += [await refusal_of(mallory.infer("r", *place, answer=answer)) for place in places]
    assert {each.code for each in refused} == {Code.SHM_DENIED}
    assert {each.status for each in refused} <= {"PERMISSION_DENIED", 403}

    others = [
        await refusal_of(mallory.infer(CANARY)),
        await refusal_of(mallory.infer(CANARY, answer=True)),
        await refusal_of(mallory.status(CANARY)),
    ]
    none = [
        await refusal_of(mallory.infer("nobodys")),
        await refusal_of(mallory.infer("nobodys", answer=True)),
        await refusal_of(mallory.status("nobodys")),
    ]
    assert [str(each).replace(CANARY, "nobodys") for each in others] == [str(each) for each in none]
    assert {each.code for each in others} == {Code.NOT_FOUND}
    await mallory.unregister(CANARY)
    assert await bob.infer(CANARY) == ANSWER, "his region is as before"
    await mallory.register(CANARY, own)
    await mallory.unregister()
    assert await bob.infer(CANARY) == ANSWER, "a name means something to each tenant alone"
    await mallory.register("r", own)
    wrong = [await refusal_of(mallory.infer("r", 0, size)) for size in ("16", None)]
    assert {each.code for each in wrong} == {Code.INVALID_ARGUMENT}
    texts = " ".join(map(str, (*refused, *wrong))) + await mallory.status()
    assert CANARY not in texts
    assert VICTIM not in texts.replace(files["bobs"].name, "")
    assert files["bobs"].read_bytes() == files["nobodys"].read_bytes() == ROW * 8
    assert (node.front.pid, node.front.restarts) == (pid, 0)
    tried = len(refused) + len(others) + len(none) + len(wrong)
    record("A44", "P", tried, transport=mallory.transport, refused=tried, crashes=0)


async def test_a44_regions_are_bounded(
    node: DataPlaneNode, mallory: Caller, bob: Caller, files: dict[str, Path]
) -> None:
    for number in range(REGIONS_PER_TENANT):
        await mallory.register(f"r{number}", files["own"].name)
    full = await refusal_of(mallory.register("more", files["own"].name))
    assert full.code == Code.SHM_DENIED
    assert (await refusal_of(mallory.register("r0", files["own"].name))).code == Code.CONFLICT
    await bob.register("another", files["bobs"].name)
    await mallory.unregister("r7")
    await mallory.register("more", files["own"].name)


async def test_a44_a_file_that_shrinks_meanwhile_kills_nobody(
    node: DataPlaneNode, mallory: Caller, bob: Caller
) -> None:
    """A mapping would end in a bus error here."""
    pid, path = node.front.pid, FOLDER / f"{ATTACKER}large"
    path.write_bytes(bytes(LARGE))
    await mallory.register("r", path.name, 0, LARGE)
    outcomes: dict[str, int] = {}
    stopped = asyncio.Event()

    def resize() -> None:
        while not stopped.is_set():
            for size in (0, LARGE // 2, 4096, LARGE - 1, LARGE):
                os.truncate(path, size)

    async def ask(*, answer: bool) -> None:
        size = WIDTH if answer else LARGE
        try:
            await mallory.infer("r", LARGE - size, size, rows=size // WIDTH, answer=answer)
            outcome = "answered"
        except InferenceError as error:
            outcome = error.code
        outcomes[outcome] = outcomes.get(outcome, 0) + 1

    async def hammer() -> None:
        while not {"answered", Code.SHM_DENIED} <= outcomes.keys() or sum(outcomes.values()) < 40:
            await asyncio.gather(*(ask(answer=bool(number % 2)) for number in range(4)))

    resizing = asyncio.create_task(asyncio.to_thread(resize))
    try:
        async with asyncio.timeout(60):
            await hammer()
    finally:
        stopped.set()
        await resizing
    assert outcomes.keys() == {"answered", Code.SHM_DENIED}, outcomes
    assert (node.front.pid, node.front.restarts) == (pid, 0)
    assert await bob.infer(CANARY) == ANSWER
    record("A44", "P", sum(outcomes.values()), transport=mallory.transport, outcomes=outcomes, crashes=0)


async def test_a44_it_is_off_unless_allowed_and_of_the_front_that_was_called(
    node: DataPlaneNode, files: dict[str, Path], tmp_path: Path
) -> None:
    """For a tenant without a grant, at a front without one, and in a call that another front forwards."""
    gateway = DataPlaneNode("g1", node.authority, tmp_path / "g1", Role.GATEWAY)
    callers: list[Caller] = []
    try:
        await gateway.start()
        key = WorkloadKey("mallory", "relu")
        await gateway.configure([Route(key, 1, (node.endpoint("a-mallory", at=gateway),))])
        for transport in ("grpc", "rest"):
            own = Caller(node, "mallory", transport)
            await own.register(f"r-{transport}", files["own"].name)
            refused = []
            for caller in (Caller(node, "other", transport), Caller(gateway, "mallory", transport)):
                refused += [
                    await refusal_of(caller.register("r", files["own"].name)),
                    await refusal_of(caller.infer(f"r-{transport}")),
                    await refusal_of(caller.infer(f"r-{transport}", answer=True)),
                    await refusal_of(caller.status()),
                    await refusal_of(caller.unregister()),
                ]
                callers.append(caller)
            peer = Caller(node, "mallory", transport)
            agent = node.authority.issue(Role.AGENT, "n2")
            await peer.grpc.close()
            peer.grpc, peer.rest = node.grpc_client(agent), node.rest_client(agent)
            forwarded = {"shoal-tenant": "mallory", "shoal-origin": "n2", "shoal-hop": "1"}
            refused.append(await refusal_of(peer.infer(f"r-{transport}", said=forwarded)))
            assert {each.code for each in refused} == {Code.SHM_DENIED}, [str(each) for each in refused]
            callers += [own, peer]
        assert await callers[2].infer("r-grpc") == ANSWER
        assert "system_shared_memory" in (await callers[2].grpc.server())["extensions"]
        assert "system_shared_memory" not in (await callers[0].grpc.server())["extensions"]
    finally:
        for each in callers:
            await each.close()
        await gateway.stop()


async def test_f01_a_request_with_shared_memory_is_tried_again_where_its_worker_dies(
    node: DataPlaneNode, files: dict[str, Path], tmp_path: Path
) -> None:
    key, names = WorkloadKey("mallory", "relu"), ("a-mallory", "a-second")
    await node.load("a-second", key, tmp_path / "relu.onnx")
    await node.configure([Route(key, 2, tuple(node.endpoint(name) for name in names))])
    caller = Caller(node, "mallory", "grpc")
    try:
        await caller.register("r", files["own"].name)
        assert await caller.infer("r") == ANSWER
        pids = {name: node.worker_pid(name) for name in names}
        for pid in pids.values():
            os.kill(pid, 19)  # SIGSTOP: so that it is seen where the request waits
        asked = asyncio.create_task(caller.infer("r"))

        async def find() -> str | None:
            return next((name for name, count in (await node.front.stats()).in_flight if count), None)

        chosen = str(await until(find, 10, "the request at a worker"))
        files["own"].write_bytes(bytes(128))
        os.kill(pids.pop(chosen), 9)
        (other,) = pids.values()
        os.kill(other, 18)
        assert await asked == ANSWER, "by the bytes that were read first"
        assert sum(each.retried for each in (await node.front.stats()).ingress) == 1
    finally:
        await caller.close()
