"""Steps of sessions that their workers do not survive, at one front."""

from typing import cast

import pytest

from shoal.agent.clock import SystemClock
from shoal.agent.dataplane.caller_auth import CallerAuth
from shoal.agent.dataplane.front import DataPlane
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.sessions import FrontSessions
from shoal.agent.dataplane.transport import InboundCall
from shoal.agent.dataplane.upstream import AttemptFailed, CallContext, PeerClients, WorkerClients
from shoal.agent.ports import LocalWorker, StatefulReplica
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("acme", "counting")
POISON = b"\xff"
REPLICA = "a-1"


class Node:
    """A front and its worker, which ends at a poisoned input and comes again."""

    def __init__(self) -> None:
        clock = SystemClock()
        self.crashes = 0
        workers, peers = cast("WorkerClients", self), cast("PeerClients", self)
        sessions = FrontSessions("west", "n1", clock, workers, peers, lambda: Wall(1.0))
        sessions.lease(Elapsed(clock.now() + 300.0))
        callers = CallerAuth("west", "n1", lambda: Wall(1.0))
        self.plane = DataPlane(FrontSettings("west", "n1"), clock, workers, peers, callers, sessions)
        self.apply_config()

    def apply_config(self) -> None:
        endpoint = Endpoint(REPLICA, "n1", EndpointKind.LOCAL, "", 1.0, EndpointState.READY)
        worker = LocalWorker(REPLICA, KEY, "/socket", str(self.crashes))
        keeper = StatefulReplica(REPLICA, KEY, {"s": "sn"})
        self.plane.configure((Route(KEY, 1, (endpoint,), stateful=True),), (), (worker,), stateful_replicas=(keeper,))

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
        x, state = oip.ModelInferRequest.FromString(request).raw_input_contents
        if x == POISON:
            self.crashes += 1
            self.apply_config()
            raise AttemptFailed(Refusal(Code.WORKER_CRASHED, "it ended", "an answer"), was_sent=True)
        answer = oip.ModelInferResponse(raw_output_contents=[state, bytes([state[0] + 1])])
        for name in ("y", "sn"):
            answer.outputs.add(name=name, datatype="UINT8", shape=[1])
        return answer.SerializeToString()

    async def step(self, x: bytes, sequence: int, *, start: bool = False) -> bytes:
        request = oip.ModelInferRequest(model_name="counting", raw_input_contents=[x])
        request.inputs.add(name="x", datatype="UINT8", shape=[1])
        request.parameters["sequence_id"].int64_param = sequence
        request.parameters["sequence_start"].bool_param = start
        call = InboundCall(Identity("west", Role.TENANT, "acme", Wall(0.0), Wall(2.0), "1"))
        answer = await self.plane.infer(call, request.SerializeToString())
        return oip.ModelInferResponse.FromString(answer).raw_output_contents[0]


async def test_a_step_that_ends_two_workers_is_not_run_again_and_its_session_stands() -> None:
    node = Node()
    assert await node.step(b"\0", 7, start=True) == b"\0"
    for _ in range(3):  # its client insists
        with pytest.raises(ShoalError) as caught:
            await node.step(POISON, 7)
        assert caught.value.code is Code.REQUEST_CRASHED_WORKER
    assert node.crashes == 2
    assert await node.step(b"\0", 7) == b"\1"
    assert await node.step(b"\0", 8, start=True) == b"\0"
