"""A front gets the routes that its clients ask for, and keeps them while it is an island: real processes."""

from harness.clients.oip import GrpcClient, InferenceError
from harness.cluster.stack import DevStack, documents, input_of, on_nodes, policy, workload
from harness.report import record
from harness.wait import until, wait_until
from shoal.agent.clock import SystemClock
from shoal.types.codes import Code

ASKED = tuple(f"asked-{at}" for at in range(5))
UNASKED = "unasked"


async def code_of(client: GrpcClient, name: str, timeout: float = 20.0) -> str:
    try:
        await client.infer(name, list(input_of(1)), timeout=timeout)
    except InferenceError as error:
        return error.code
    return "answered"


async def test_what_was_asked_once_is_answered_on_an_island_that_started_there(stack: DevStack) -> None:
    """Served at one node, asked for at the front of another."""
    far = policy("far", on_nodes(["plain-cpu"]))
    stack.apply(documents(far, *(workload(name, "relu", "far") for name in (*ASKED, UNASKED))))
    for name in (*ASKED, UNASKED):
        stack.wait_serving(name)
    files, clock = stack.client_files, SystemClock()
    client = GrpcClient(stack.port("edge-npu", "data"), files.authority.read_bytes(), files)
    assert await code_of(client, "never-applied") == Code.MODEL_NOT_FOUND
    first_ms, second_ms = list[float](), list[float]()
    for name in ASKED:
        for found in (first_ms, second_ms):
            began = clock.now()
            assert await code_of(client, name) == "answered"
            found.append(round(1e3 * (clock.now() - began), 1))
    record("routes-on-demand", "P", len(ASKED), first_ms=first_ms, second_ms=second_ms)
    stack.control.break_member("coordinator", "kill")
    stack.control.break_member("edge-npu", "kill")
    wait_until(lambda: not stack.processes("edge-npu"), 20.0, "the node to be dead")
    stack.control.break_member("edge-npu", "resume")

    async def is_answered(name: str) -> bool:
        return await code_of(client, name, timeout=2.0) == "answered"

    try:
        await until(lambda: is_answered(ASKED[0]), 60.0, "an answer on the island")
        assert [await code_of(client, name) for name in ASKED[1:]] == ["answered"] * (len(ASKED) - 1)
        assert await code_of(client, UNASKED) == Code.MODEL_NOT_READY, "nobody asked for it before"
    finally:
        stack.control.break_member("coordinator", "resume")
    await until(lambda: is_answered(UNASKED), 60.0, "the region's answer")
    await client.close()
    stack.delete_workloads(*ASKED, UNASKED)
