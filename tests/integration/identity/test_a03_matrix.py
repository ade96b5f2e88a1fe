"""A03: every role calls every RPC, REST path and topic. Each call is refused unless a rule allows it; the cases are
generated from the protos.

What each role may do is written here a second time, by hand and independent of the code. A method, a REST form or a
topic that this table lacks fails the test. So does one that it names and that is gone.
"""

import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import grpc
import grpc.aio
import pytest

from harness.clients.mqtt import NOT_AUTHORIZED, Closed, MqttPeer
from harness.clients.oip import SERVICE, GrpcClient, RestClient
from harness.cluster.coordinator import REGION, CoordinatorServer, channel
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority, CertificateFiles
from harness.report import record
from harness.servers.mosquitto import broker, tls
from shoal.inference import open_inference_pb2
from shoal.types import topics
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.topics import DOWN, UP, Channel
from shoal.v1 import artifacts_pb2, enrolment_pb2, link_pb2, operator_pb2
from shoal.wire.grpcio_status import refusal_of
from shoal.wire.identity import dns_of
from shoal.wire.limits import ENROL_BYTES, channel_options

CALLERS = tuple(role for role in Role if role is not Role.BROKER)
"""A broker's certificate is for a server: no listener takes it from a client."""
NODES = {Role.AGENT, Role.GATEWAY}
WRITERS = {Role.OPERATOR}
READERS = {Role.OPERATOR, Role.VIEWER}
TENANTS = {Role.TENANT, Role.OPERATOR}
LOOKERS = TENANTS | {Role.VIEWER, Role.COORDINATOR}
JUNK = b"\xff"
"""No message at all: whoever is let in is refused for that, and nothing is done."""

LINK: Mapping[str, set[Role]] = {
    "AgentLink/Session": NODES,
    "Artifacts/Fetch": NODES | WRITERS,
    "Artifacts/Push": WRITERS,
    "Artifacts/Inspect": WRITERS,
    "Artifacts/Record": {Role.AGENT},
    "Artifacts/List": READERS,
    "Artifacts/Remove": WRITERS,
    "Operator/WhoAmI": READERS | {Role.COORDINATOR},
    "Operator/Plan": READERS,
    "Operator/Apply": WRITERS,
    "Operator/Get": READERS,
    "Operator/Delete": WRITERS,
    "Operator/Explain": READERS,
    "Operator/History": READERS,
    "Operator/CanMove": READERS,
    "Operator/Migrate": WRITERS,
    "Operator/CancelMigration": WRITERS,
    "Operator/Drain": WRITERS,
    "Operator/Cordon": WRITERS,
    "Operator/Events": READERS,
    "Operator/CreateToken": WRITERS,
    "Operator/OpenDashboard": READERS,
    "Operator/Doctor": READERS,
    "Operator/Revoke": WRITERS,
    "Operator/Settle": WRITERS,
    "Operator/Release": WRITERS,
    "Operator/Label": WRITERS,
    "Operator/Measure": WRITERS,
    "Operator/ClearModel": WRITERS,
    "Operator/GetAuthority": READERS,
    "Operator/RotateAuthority": WRITERS,
    "Operator/JoinFederation": WRITERS,
    "Operator/LeaveFederation": WRITERS,
    "Operator/GetFederation": READERS,
    "Operator/SetSignal": WRITERS,
    "Operator/ExportMeasurements": READERS,
    "Operator/ImportMeasurements": WRITERS,
    "Operator/ListMeasurements": READERS,
    "Operator/RemoveMeasurements": WRITERS,
    "Operator/Backup": WRITERS,
    "Operator/Logs": WRITERS,
    "Operator/Trace": READERS,
    "Operator/Timeline": READERS,
    "Operator/GetDiagnostics": WRITERS,
}
ENROL = {"Enrolment/Redeem", "Enrolment/Challenge", "Enrolment/Renew"}
"""Whoever calls: a token, or the key of a certificate, is shown inside the call."""

INFER: Mapping[str, set[Role]] = {
    "ServerLive": set(CALLERS),
    "ServerReady": LOOKERS,
    "ServerMetadata": LOOKERS,
    "ModelReady": LOOKERS,
    "ModelMetadata": LOOKERS,
    "ModelConfig": LOOKERS,
    "ModelStatistics": LOOKERS,
    "RepositoryIndex": LOOKERS,
    "RepositoryModelLoad": LOOKERS,
    "RepositoryModelUnload": LOOKERS,
    "ModelInfer": TENANTS,
    "ModelStreamInfer": TENANTS,
    "SystemSharedMemoryStatus": TENANTS,
    "SystemSharedMemoryRegister": TENANTS,
    "SystemSharedMemoryUnregister": TENANTS,
    "CudaSharedMemoryStatus": LOOKERS,
    "CudaSharedMemoryRegister": LOOKERS,
    "CudaSharedMemoryUnregister": LOOKERS,
}
"""Who may ask for itself. Load and unload are answered with NOT_SUPPORTED."""
FORWARDED = {"shoal-hop": "1", "shoal-tenant": "default", "shoal-origin": "edge-9"}
"""What a front says when it forwards: then nodes may call what tenants may."""

REST = {
    "ServerLive": ("GET", "/v2/health/live"),
    "ServerReady": ("GET", "/v2/health/ready"),
    "ServerMetadata": ("GET", "/v2"),
    "ModelReady": ("GET", "/v2/models/m/ready"),
    "ModelMetadata": ("GET", "/v2/models/m"),
    "ModelConfig": ("GET", "/v2/models/m/config"),
    "ModelStatistics": ("GET", "/v2/models/m/stats"),
    "RepositoryIndex": ("POST", "/v2/repository/index"),
    "RepositoryModelLoad": ("POST", "/v2/repository/models/m/load"),
    "RepositoryModelUnload": ("POST", "/v2/repository/models/m/unload"),
    "ModelInfer": ("POST", "/v2/models/m/infer"),
    "SystemSharedMemoryStatus": ("GET", "/v2/systemsharedmemory/status"),
    "SystemSharedMemoryRegister": ("POST", "/v2/systemsharedmemory/region/r/register"),
    "SystemSharedMemoryUnregister": ("POST", "/v2/systemsharedmemory/unregister"),
    "CudaSharedMemoryStatus": ("GET", "/v2/cudasharedmemory/status"),
    "CudaSharedMemoryRegister": ("POST", "/v2/cudasharedmemory/region/r/register"),
    "CudaSharedMemoryUnregister": ("POST", "/v2/cudasharedmemory/unregister"),
}
NO_REST_FORM = {"ModelStreamInfer"}
CLEARED = (Channel.ONLINE, Channel.CAPABILITY)
"""What a node left at the broker, and the coordinator takes away."""


def methods(module: ModuleType) -> set[str]:
    return {
        f"{service.name}/{method.name}"
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


def test_a03_a_method_without_a_rule_fails_the_build() -> None:
    assert methods(link_pb2) | methods(artifacts_pb2) | methods(operator_pb2) == set(LINK)
    assert methods(enrolment_pb2) == ENROL
    assert {name.partition("/")[2] for name in methods(open_inference_pb2)} == set(INFER)
    assert set(REST) | NO_REST_FORM == set(INFER)


def answer(opened: grpc.Channel, method: str) -> tuple[grpc.StatusCode, Code]:
    """What one call of `method` with a message that is none comes to."""
    stream = opened.stream_stream(method, None, None)(iter([JUNK]), timeout=10)
    with pytest.raises(grpc.RpcError) as error:
        for _ in stream:
            pass
    return error.value.code(), refusal_of(error.value).code


def test_a03_every_role_calls_every_method_of_the_coordinator(coordinator: CoordinatorServer) -> None:
    let_in = 0
    for role in CALLERS:
        caller = coordinator.certificate(role, "somebody")
        with channel(coordinator.link, caller) as opened:
            for method, may in LINK.items():
                _, code = answer(opened, f"/shoal.v1.{method}")
                assert (code is not Code.ROLE_DENIED) is (role in may), f"{role} {method}: {code}"
                assert code not in (Code.UNAUTHENTICATED, Code.COORDINATOR_UNREACHABLE), f"{role} {method}: {code}"
                let_in += role in may
            for method in ENROL:
                status, _ = answer(opened, f"/shoal.v1.{method}")
                assert status is grpc.StatusCode.UNIMPLEMENTED, f"{role} {method}"
    record("A03", "P", len(CALLERS) * len(LINK), listener="link", let_in=let_in)


def test_a03_who_shows_no_certificate_or_a_servers_gets_no_connection(coordinator: CoordinatorServer) -> None:
    servers = coordinator.certificate(Role.BROKER, "broker")
    anonymous = grpc.ssl_channel_credentials(servers.ca_pem)
    shown = grpc.ssl_channel_credentials(servers.ca_pem, servers.key_pem, servers.certificate_pem)
    name = dns_of(REGION, Role.COORDINATOR, "coordinator")
    for credentials in (anonymous, shown):
        options = channel_options(ENROL_BYTES, server_name=name)
        with grpc.secure_channel(coordinator.link, credentials, options) as opened:
            for method in ("Operator/WhoAmI", "AgentLink/Session"):
                status, _ = answer(opened, f"/shoal.v1.{method}")
                assert status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    with grpc.secure_channel(coordinator.enrol, anonymous, channel_options(ENROL_BYTES, server_name=name)) as opened:
        for method in LINK:
            assert answer(opened, f"/shoal.v1.{method}")[0] is grpc.StatusCode.UNIMPLEMENTED, method
        for method in ENROL:
            assert answer(opened, f"/shoal.v1.{method}")[1] is not Code.ROLE_DENIED, method


def test_a03_every_role_reads_the_metrics(coordinator: CoordinatorServer, tmp_path: Path) -> None:
    for role in CALLERS:
        caller = coordinator.certificate(role, "scraper")
        caller.write(tmp_path / role)
        context = ssl.create_default_context(cadata=caller.ca_pem.decode())
        context.load_cert_chain(tmp_path / role / "cert.pem", tmp_path / role / "key.pem")
        if role in {Role.OPERATOR, Role.VIEWER, Role.COORDINATOR}:
            with urllib.request.urlopen(f"https://{coordinator.metrics}/metrics", context=context, timeout=10) as page:
                assert page.status == 200
            continue
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"https://{coordinator.metrics}/metrics", context=context, timeout=10)
        assert error.value.code == 403
        assert Code.ROLE_DENIED in error.value.read().decode()
    record("A03", "P", len(CALLERS), listener="metrics")


async def test_a03_every_role_calls_every_method_of_a_front_in_both_forms(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca", "home", time.time())  # noqa: TID251 - the front's own clock
    folder = tmp_path / "node"
    folder.mkdir()
    node = DataPlaneNode("edge-1", authority, folder)
    await node.start()
    try:
        await node.configure()
        asked = 0
        for role in CALLERS:
            files = authority.issue(role, "somebody")
            over_grpc, over_rest = node.grpc_client(files), node.rest_client(files)
            for method, may in INFER.items():
                for said in ({}, FORWARDED):
                    allowed = role in may or (bool(said) and role in NODES)
                    codes = [await grpc_code(over_grpc, method, said)]
                    if method in REST:
                        codes.append(await rest_code(over_rest, *REST[method], said))
                    for code in codes:
                        assert (code != Code.ROLE_DENIED) is allowed, f"{role} {method} {said}: {code!r}"
                        assert code != Code.UNAUTHENTICATED
                        asked += 1
            await over_grpc.close()
        config, roots = node.front.config, authority.certificate.read_bytes()
        tokenless, anonymous = GrpcClient(config.port, roots), RestClient(config.port, roots)
        for method in INFER:
            wanted = "" if method == "ServerLive" else Code.UNAUTHENTICATED
            assert await grpc_code(tokenless, method, {}) == wanted, method
            if method in REST:
                assert await rest_code(anonymous, *REST[method], {}) == wanted, method
        await tokenless.close()
        record("A03", "P", asked, listener="data plane", anonymous=2 * len(INFER) - len(NO_REST_FORM))
    finally:
        await node.stop()


async def grpc_code(client: GrpcClient, method: str, said: Mapping[str, str]) -> str:
    """Empty when it was answered. Called with one message, which looks the same on the wire: gRPC's asyncio client
    takes a refusal that overtakes a stream's first message for an error of its own."""
    call = client.channel.unary_unary(f"/{SERVICE}/{method}", None, None)
    try:
        await call(b"", metadata=tuple({**client.default_metadata, **said}.items()), timeout=10)
    except grpc.aio.AioRpcError as error:
        return str(refusal_of(error).code)
    return ""


async def rest_code(client: RestClient, method: str, path: str, said: Mapping[str, str]) -> str:
    response = await client.request(method, path, b"{}" if method == "POST" else b"", said)
    return str(response.json().get("code", "")) if response.status >= 400 else ""


def test_a03_every_role_at_every_topic(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca", "home", time.time())  # noqa: TID251 - the broker's own clock
    asked = 0
    with broker(tmp_path / "mqtt", authority, nodes=("edge-1", "edge-2")) as served:

        def peer(files: CertificateFiles, name: str) -> MqttPeer:
            return MqttPeer(served.port, tls(files), name)

        for role in Role:
            name = "coordinator" if role is Role.COORDINATOR else "edge-1"
            files = authority.issue(role, name)
            if role not in {*NODES, Role.COORDINATOR}:
                with pytest.raises(Closed):
                    peer(files, f"{role}-1")
                continue
            sends, reads = ((*DOWN, *CLEARED), UP) if role is Role.COORDINATOR else (UP, DOWN)
            with peer(files, f"{role}-1") as caller:
                for node in ("edge-1", "edge-2"):
                    for one in Channel:
                        topic = topics.of_node("home", node, one)
                        own = role is Role.COORDINATOR or node == "edge-1"
                        may_send, may_read = own and one in sends, own and one in reads
                        assert (caller.publish(topic, b"") != NOT_AUTHORIZED) is may_send, f"{role} sends {topic}"
                        wide = topics.all_nodes("home", one) if role is Role.COORDINATOR else topic
                        assert (caller.subscribe(wide) != NOT_AUTHORIZED) is may_read, f"{role} reads {wide}"
                        asked += 2
    record("A03", "P", asked, listener="broker")
