"""Calls that a front is to refuse take no place at its port; its own authentication decides."""

from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import cast

import pytest

from harness.clients.oip import NOTHING, GrpcClient, InferenceError, Metadata, OipClient, RestClient
from harness.crypto.pki import Authority, CertificateFiles
from harness.fakes.fronts import NoPeers
from shoal.agent.clock import SystemClock
from shoal.agent.dataplane import ingress_admission as intake_module
from shoal.agent.dataplane.caller_auth import CallerAuth
from shoal.agent.dataplane.data_port import DataPort
from shoal.agent.dataplane.front import DataPlane
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.sessions import FrontSessions
from shoal.agent.dataplane.transport import TlsFiles
from shoal.agent.dataplane.trust import Authorities
from shoal.agent.dataplane.upstream import PeerClients, WorkerClients
from shoal.types.assignment import Credential
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall
from shoal.wire.certificates import identity_of_pem

TOKEN = Credential("acme", sha256(b"secret").hexdigest(), Wall(4e9))


@dataclass
class Port:
    """The data port of a front without workers. It knows the token `secret` of acme."""

    authority: Authority
    plane: DataPlane
    transport: DataPort
    port: int
    clients: list[OipClient] = field(default_factory=list)

    def client(self, way: str, files: CertificateFiles | None = None) -> OipClient:
        kind = RestClient if way == "rest" else GrpcClient
        made = kind(self.port, self.authority.certificate.read_bytes(), files, "" if files else "secret")
        self.clients.append(made)
        return made

    def revoke(self, files: CertificateFiles) -> None:
        serial = identity_of_pem(files.certificate.read_bytes()).serial
        self.plane.configure((), (TOKEN,), (), revoked=(serial,))


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    clock, workers, peers = SystemClock(), WorkerClients(), cast("PeerClients", NoPeers())
    authority = Authority(tmp_path, "west", clock.wall())
    node = authority.issue(Role.AGENT, "n1")
    tls = TlsFiles(node.certificate, node.key, node.authority)
    sessions = FrontSessions("west", "n1", clock, workers, peers, clock.wall)
    callers = CallerAuth("west", "n1", clock.wall)
    plane = DataPlane(FrontSettings("west", "n1"), clock, workers, peers, callers, sessions)
    plane.configure((), (TOKEN,), ())
    authorities = Authorities("west", tls)
    authorities.configure(())
    transport = DataPort(plane, "127.0.0.1", 0, tls, authorities)
    found = Port(authority, plane, transport, await transport.start())
    yield found
    for client in found.clients:
        await client.close()
    await transport.stop(Seconds(0.0))
    await workers.close()


@pytest.fixture
def full(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port has no place for any call."""
    port.transport.admission.places.most = 0
    monkeypatch.setattr(intake_module, "HEAD_CALLS", 0)


async def code_of(client: OipClient, asked: str, claims: Metadata = NOTHING) -> str:
    """Why the client is refused a path over REST, or a method over gRPC."""
    call: Awaitable[object]
    if isinstance(client, RestClient):
        call = client.checked_request("GET", asked, extra_metadata=claims)
    else:
        assert isinstance(client, GrpcClient)
        call = client.call(asked, b"", extra_metadata=claims)
    with pytest.raises(InferenceError) as refused:
        await call
    return refused.value.code


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("asked", ["/v2/health/ready", "/v2/models/up", "ModelMetadata"])
async def test_a_call_to_refuse_takes_no_place(port: Port, asked: str) -> None:
    way = "rest" if asked.startswith("/") else "grpc"
    assert await code_of(port.client(way), asked) == Code.OVERLOADED, "others look for one"
    assert await code_of(port.client(way), asked, {"shoal-tenant": "bank"}) == Code.TENANT_DENIED
    mine = port.authority.issue(Role.TENANT, "acme")
    assert await code_of(port.client(way, mine), asked) == Code.OVERLOADED
    port.revoke(mine)
    assert await code_of(port.client(way, mine), asked) == Code.CERT_REVOKED


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("way", ["rest", "grpc"])
async def test_that_a_front_lives_is_told_whoever_asks(port: Port, way: str) -> None:
    mine = port.authority.issue(Role.TENANT, "acme")
    port.revoke(mine)
    assert await port.client(way, mine).live()


@pytest.mark.parametrize("way", ["rest", "grpc"])
async def test_that_a_front_lives_is_told_while_others_take_no_answers(
    port: Port, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers without credentials who hold all places that there are for such."""
    monkeypatch.setattr(intake_module, "ANONYMOUS_CALLS", 0)
    assert await port.client(way).live()
