"""Requests that refer to shared memory, at one front with two replicas: what goes on to a replica holds bytes."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.core.shared_memory import SharedMemoryGrant
from shoal.agent.dataplane.caller_auth import CallerAuth
from shoal.agent.dataplane.front import DataPlane
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.memory import COPIES, MessageMemory
from shoal.agent.dataplane.sessions import FrontSessions
from shoal.agent.dataplane.shared_memory import SharedMemory
from shoal.agent.dataplane.shared_regions import SharedRegions
from shoal.agent.dataplane.transport import InboundCall
from shoal.agent.dataplane.upstream import AttemptFailed, CallContext, PeerClients, WorkerClients
from shoal.agent.dataplane.verification_source import RequestCaptures
from shoal.agent.ports import LocalWorker, StatefulReplica
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey

PLAIN, COUNTING = WorkloadKey("acme", "plain"), WorkloadKey("acme", "counting")
REPLICAS = {"a-1": PLAIN, "a-2": PLAIN, "c-1": COUNTING}


class Node:
    """A front and its workers, which answer x as y; the first attempts of `plain` fail, as often as asked."""

    def __init__(self, folder: Path) -> None:
        clock = self.clock = SystemClock()
        self.file = folder / "acme-x"
        self.file.write_bytes(b"in--out-")
        self.failures = 0
        self.seen: list[bytes] = []
        self.remaining_s: list[float] = []
        self.memory = MessageMemory()
        self.captures = RequestCaptures()
        self.regions = SharedRegions((SharedMemoryGrant("acme", "acme-"),), folder)
        workers, peers = cast("WorkerClients", self), cast("PeerClients", self)
        sessions = FrontSessions("west", "n1", clock, workers, peers, lambda: Wall(1.0))
        sessions.lease(Elapsed(clock.now() + 300.0))
        callers = CallerAuth("west", "n1", lambda: Wall(1.0))
        shared = SharedMemory(self.regions, self.memory)
        settings = FrontSettings("west", "n1")
        self.plane = DataPlane(settings, clock, workers, peers, callers, sessions, self.captures, shared_memory=shared)
        routes = tuple(
            Route(
                key, 1, tuple(_endpoint(name) for name, of in REPLICAS.items() if of == key), stateful=key == COUNTING
            )
            for key in (PLAIN, COUNTING)
        )
        local = tuple(LocalWorker(name, key, "/socket", "1") for name, key in REPLICAS.items())
        stateful = (StatefulReplica("c-1", COUNTING, {"s": "sn"}),)
        self.plane.configure(routes, (), local, stateful_replicas=stateful)
        self.captures.configure(dict.fromkeys(REPLICAS, 9))
        self.plane.register_shared_memory(
            self.call, oip.SystemSharedMemoryRegisterRequest(name="r", key="acme-x", byte_size=8)
        )

    @property
    def call(self) -> InboundCall:
        return InboundCall(Identity("west", Role.TENANT, "acme", Wall(0.0), Wall(2.0), "1"))

    def configure(self, _listed: object) -> None:
        """Of workers and of peers."""

    def is_connecting(self, endpoint: Endpoint) -> bool:
        return False

    def rtt_s(self, endpoint: Endpoint) -> Seconds:
        return Seconds(0.0)

    async def metadata(self, assignment: str, context: CallContext) -> oip.ModelMetadataResponse:
        spec = oip.ModelMetadataResponse.TensorMetadata(name="s", datatype="UINT8", shape=[1])
        return oip.ModelMetadataResponse(inputs=[spec])

    async def infer(self, assignment: str, request: bytes, context: CallContext) -> bytes:
        message = oip.ModelInferRequest.FromString(request)
        assert not any(each.parameters for each in message.inputs)
        assert not any(each.parameters for each in message.outputs)
        self.seen.append(message.raw_input_contents[0])
        self.remaining_s.append(context.remaining_s)
        if self.failures:
            self.failures -= 1
            self.file.write_bytes(b"no--out-")
            raise AttemptFailed(Refusal(Code.WORKER_CRASHED, "it ended", "an answer"), was_sent=True)
        answer = oip.ModelInferResponse(raw_output_contents=message.raw_input_contents)
        for name in ("y", "sn")[: len(message.raw_input_contents)]:
            answer.outputs.add(name=name, datatype="UINT8", shape=[1])
        return answer.SerializeToString()

    async def ask(
        self, key: WorkloadKey, size: int = 2, room: int = 4, remaining_s: float | None = None, timeout_us: int = 0
    ) -> oip.ModelInferResponse:
        request = oip.ModelInferRequest(model_name=key.name)
        if timeout_us:
            request.parameters["timeout"].int64_param = timeout_us
        request.inputs.add(name="x", datatype="UINT8", shape=[size])
        request.outputs.add(name="y")
        of_input, of_output = request.inputs[0].parameters, request.outputs[0].parameters
        for parameters, offset, length in ((of_input, 0, size), (of_output, 4, room)):
            parameters["shared_memory_region"].string_param = "r"
            parameters["shared_memory_byte_size"].int64_param = length
            parameters["shared_memory_offset"].int64_param = offset
        if key == COUNTING:
            request.parameters["sequence_id"].int64_param = 7
            request.parameters["sequence_start"].bool_param = True
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        call = self.call if remaining_s is None else replace(self.call, remaining_s=Seconds(remaining_s))
        return oip.ModelInferResponse.FromString(await self.plane.infer(call, request.SerializeToString()))


def _endpoint(name: str) -> Endpoint:
    return Endpoint(name, "n1", EndpointKind.LOCAL, "", 1.0, EndpointState.READY)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    assert made.memory.held_bytes == 0
    made.regions.unregister("acme")


async def test_a_retry_sends_what_was_read_first(node: Node) -> None:
    node.failures = 1
    answer = await node.ask(PLAIN)
    assert node.seen == [b"in", b"in"], "although the file says something else by then"
    assert node.file.read_bytes() == b"no--int-"
    assert list(answer.raw_output_contents) == [b""]
    assert answer.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize(("remaining_s", "timeout_us"), [(60.0, 0), (None, 60_000_000), (60.0, 90_000_000)])
async def test_the_wait_for_memory_is_taken_off_a_requests_time(
    node: Node, remaining_s: float | None, timeout_us: int
) -> None:
    full = node.memory.hold("acme", node.memory.payer_share // COPIES)
    asked = asyncio.create_task(node.ask(PLAIN, remaining_s=remaining_s, timeout_us=timeout_us))
    await asyncio.sleep(0)  # noqa: TID251 - let it come as far as it can
    began = node.clock.now()
    await until(lambda: node.clock.now() - began >= 0.05, 10.0, "time to pass")
    assert node.remaining_s == []
    full.release()
    await asked
    assert node.remaining_s[0] <= 60.0 - 0.05


async def test_what_is_captured_holds_bytes(node: Node) -> None:
    await node.ask(PLAIN)
    (kept,) = (one for name in REPLICAS for one in node.captures.newest(name, 9))
    message = oip.ModelInferRequest.FromString(kept)
    assert list(message.raw_input_contents) == [b"in"]
    assert not message.inputs[0].parameters


async def test_a_step_of_a_session_answers_into_shared_memory(node: Node) -> None:
    answer = await node.ask(COUNTING)
    assert node.file.read_bytes() == b"in--int-"
    assert [each.name for each in answer.outputs] == ["y"]
    assert list(answer.raw_output_contents) == [b""]


async def test_refusals_are_counted_with_their_code(node: Node) -> None:
    for size, room in ((9, 4), (2, 5), (2, 1)):
        with pytest.raises(ShoalError) as refused:
            await node.ask(PLAIN, size, room)
        assert refused.value.code is Code.SHM_DENIED
    assert node.plane.meter.codes[Code.SHM_DENIED] == 3
    with pytest.raises(ShoalError) as again:
        node.plane.register_shared_memory(
            node.call, oip.SystemSharedMemoryRegisterRequest(name="s", key="../x", byte_size=8)
        )
    assert again.value.code is Code.SHM_DENIED
    assert node.plane.meter.codes[Code.SHM_DENIED] == 4
    (counted,) = node.plane.meter.ingress()
    assert (counted.refused, counted.client_faults) == (1, 1), "its output had no room; the others never went on"
