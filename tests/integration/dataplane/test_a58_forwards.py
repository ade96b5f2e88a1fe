"""A58: an agent's certificate forwards a request for a tenant that sent none. A real front that has a session
refuses it."""

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from harness.clients.oip import GrpcClient, InferenceError, RestClient, Tensor, step_request
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority
from harness.models import engine_cases
from harness.report import record
from shoal.agent.clock import SystemClock
from shoal.agent.dataplane.forward_auth import ForwardAuth, extras_of
from shoal.agent.ports import StatefulReplica
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Forwarding, Front
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.route import Endpoint, Route
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY, OTHER = WorkloadKey("acme", "summing"), WorkloadKey("acme", "other")
REPLICA = "a-1"
SEQUENCE = 7
THIEF = X25519PrivateKey.generate()
"""Of a listed front that the attacker holds whole; it is listed for another workload only."""


@dataclass
class Pair:
    """`keeper` has the session; clients enter at `entry`, which forwards to it."""

    authority: Authority
    session_owner: DataPlaneNode
    entry: DataPlaneNode
    client: GrpcClient
    steps: int = 0

    async def step(self) -> None:
        """The next step of the session, by its own client; its answer shows every step before it and no other."""
        self.steps += 1
        answer = await infer(self.client, self.steps, start=self.steps == 1)
        assert answer == float(sum(range(1, self.steps + 1))), "somebody else changed the session"

    def forwards(self, name: str, private: X25519PrivateKey) -> ForwardAuth:
        """What signs as that front does."""
        made = ForwardAuth("eu", name, private.private_bytes_raw(), SystemClock().wall)
        made.configure(Forwarding((Front(self.session_owner.name, self.session_owner.forward_key),)))
        return made


async def infer(client: GrpcClient, value: int, said: Mapping[str, str] | None = None, **options: Any) -> float:
    x = Tensor("x", "FP32", (1, 2), struct.pack("<2f", float(value), 1.0))
    answer = await client.send(step_request("summing", (x,), SEQUENCE, **options), extra_metadata=said or {})
    return float(struct.unpack_from("<f", answer.outputs[0].raw)[0])


def claims(**more: str) -> dict[str, str]:
    """What a front says beside a request that it forwards."""
    return {"shoal-hop": "1", "shoal-tenant": "acme", "shoal-origin": "entry", "shoal-request-id": "r-1", **more}


def proof(signs: ForwardAuth, workload: str = "summing", tenant: str = "acme", step: str = "") -> dict[str, str]:
    return {"shoal-forward": signs.sign("keeper", tenant, workload, "entry", "r-1", extras_of("", step))}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("forwards")
    authority = Authority(folder / "ca", "eu", SystemClock().wall())
    keeper, entry = (
        DataPlaneNode("keeper", authority, folder / "keeper"),
        DataPlaneNode("entry", authority, folder / "entry"),
    )
    model = folder / "summing.onnx"
    model.write_bytes(engine_cases.summing())
    try:
        await asyncio.gather(keeper.start(), entry.start())
        await keeper.load(REPLICA, KEY, model)
        thief = THIEF.public_key().public_bytes_raw().hex()
        listed = Forwarding((Front("entry", entry.forward_key, (KEY,)), Front("thief", thief, (OTHER,))))

        def route(at: DataPlaneNode) -> Route:
            endpoint: Endpoint = keeper.endpoint(REPLICA, at=at)
            return Route(KEY, 1, (endpoint,), stateful=True)

        sessions = (StatefulReplica(REPLICA, KEY, {"s": "sn"}),)
        await keeper.configure([route(keeper)], stateful_replicas=sessions, forwarding=listed)
        tells = Forwarding((Front("keeper", keeper.forward_key),), ("acme",))
        await entry.configure([route(entry)], forwarding=tells)
        await keeper.front.lease(Seconds(300.0), "")
        client = entry.grpc_client(authority.issue(Role.TENANT, "acme"))
        yield Pair(authority, keeper, entry, client)
    finally:
        await asyncio.gather(keeper.stop(), entry.stop())


async def refusal_code(client: Any, said: Mapping[str, str], **options: Any) -> str:
    with pytest.raises(InferenceError) as failed:
        await infer(client, 100, said, **options)
    return failed.value.code


async def test_a58_a_stolen_certificate_forwards_nothing_and_no_session_is_touched(pair: Pair) -> None:
    await pair.step()
    tried = 0
    for name in ("entry", "thief", "stranger"):
        stolen = pair.session_owner.grpc_client(pair.authority.issue(Role.AGENT, name))
        for said in (claims(), claims(**{"shoal-forward": "1;summing;" + 64 * "0"}), claims(**{"shoal-forward": ";"})):
            for options in ({}, {"start": True}, {"end": True}):
                assert await refusal_code(stolen, said, **options) == Code.FORWARD_DENIED, (name, said, options)
                tried += 1
        request = oip.ModelMetadataRequest(name="summing").SerializeToString()
        with pytest.raises(InferenceError, match=Code.FORWARD_DENIED):
            await stolen.call("ModelMetadata", request, claims())
        await pair.step()
    counted = dict((await pair.session_owner.front.stats()).denied)
    assert counted.keys() == {"entry", "thief", "stranger"}
    assert sum(counted.values()) >= tried
    record("A58", "P", tried, refused=tried, sessions_touched=0)


async def test_a27_a58_a_forward_counts_for_what_was_signed_and_once(pair: Pair) -> None:
    await pair.step()
    holder = pair.session_owner.grpc_client(pair.authority.issue(Role.AGENT, "entry"))
    signs = pair.forwards("entry", pair.entry.private)
    signed = proof(signs)
    for changed in ({"shoal-tenant": "other"}, {"shoal-origin": "x"}, {"shoal-request-id": "r-2"}, {"shoal-step": "t"}):
        assert await refusal_code(holder, claims(**{**signed, **changed})) == Code.FORWARD_DENIED, changed
    assert await refusal_code(holder, claims(**proof(signs, "other"))) == Code.FORWARD_DENIED, (
        "signed for another workload"
    )
    thief = pair.session_owner.grpc_client(pair.authority.issue(Role.AGENT, "thief"))
    own = proof(pair.forwards("thief", THIEF))
    assert await refusal_code(thief, claims(**own)) == Code.FORWARD_DENIED, "not listed for this workload"
    assert await refusal_code(thief, claims(**signed)) == Code.FORWARD_DENIED, "signed by another front"

    pair.steps += 1
    total = float(sum(range(1, pair.steps + 1)))
    assert await infer(holder, pair.steps, claims(**signed)) == total, "as the entering front signed it"
    assert await refusal_code(holder, claims(**signed)) == Code.MESSAGE_REPLAYED
    await pair.step()


async def test_forwards_bring_no_cryptography_library_into_a_front(pair: Pair) -> None:
    """It takes 10 MiB. Python's own OpenSSL derives the secrets of forwards, and verifies clients' certificates."""
    await pair.step()
    for node in (pair.entry, pair.session_owner):
        pid = node.front.pid
        assert pid is not None
        assert "/cryptography/" not in Path(f"/proc/{pid}/maps").read_text()


async def test_a58_over_rest_nothing_is_forwarded(pair: Pair) -> None:
    stolen: RestClient = pair.session_owner.rest_client(pair.authority.issue(Role.AGENT, "entry"))
    with pytest.raises(InferenceError) as failed:
        await stolen.infer(
            "summing", [Tensor("x", "FP32", (1, 2), struct.pack("<2f", 1.0, 1.0))], extra_metadata=claims()
        )
    assert failed.value.code == Code.FORWARD_DENIED
    await pair.step()


async def test_a27_a58_clients_of_other_tenants_do_not_enter(pair: Pair) -> None:
    client = pair.entry.grpc_client(pair.authority.issue(Role.TENANT, "umbrella"))
    with pytest.raises(InferenceError) as failed:
        await infer(client, 1, start=True)
    assert failed.value.code == Code.TENANT_DENIED
    assert "entry=umbrella" in str(failed.value)
