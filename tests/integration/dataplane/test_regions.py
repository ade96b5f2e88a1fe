"""Two regions that trade, as real processes on crafted desired sets: what west asks for, east answers.

West has a gateway and an agent without replicas, east two gateways and an agent with one.
"""

import asyncio
import os
import signal
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
import pytest_asyncio

from harness.clients.oip import GrpcClient, InferenceError, Tensor
from harness.clients.relu_load import send_load
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority, CertificateFiles
from harness.models.synthetic import relu
from harness.report import record
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import PeerTrust
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.workload import WorkloadKey
from shoal.wire.certificates import identity_of_pem

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY = WorkloadKey("acme", "relu")
AGREEMENT = "ag-1"
GUEST = WorkloadKey(GUEST_TENANT, AGREEMENT)
X = Tensor("x", "FP32", (1, 4), struct.pack("<4f", -1, 2, -3, 4))
Y = struct.pack("<4f", 0, 2, 0, 4)
FORWARDED = {"shoal-hop": "1", "shoal-agreement": AGREEMENT}


@dataclass
class TwoRegions:
    """When the authorities were made."""

    west: Authority
    east: Authority
    home: DataPlaneNode
    edge: DataPlaneNode
    far: tuple[DataPlaneNode, DataPlaneNode]
    worker: DataPlaneNode
    clients: list[GrpcClient] = field(default_factory=list)

    @property
    def nodes(self) -> tuple[DataPlaneNode, ...]:
        return self.home, self.edge, *self.far, self.worker

    def abroad(self, *gateways: DataPlaneNode) -> Route:
        """As west's gateway has it."""
        return Route(KEY, 1, tuple(gateway_endpoint(each, region="east", agreement=AGREEMENT) for each in gateways))

    def inside(self) -> Route:
        """As east's gateways have it."""
        return Route(GUEST, 1, (self.worker.endpoint("a1", at=self.far[0]),))

    def easts(self) -> PeerTrust:
        return PeerTrust("east", (self.east.certificate.read_text(),), tuple(each.name for each in self.far), ())

    def wests(self) -> PeerTrust:
        return PeerTrust("west", (self.west.certificate.read_text(),), (self.home.name,), (AGREEMENT,))

    async def configure_agreed(self) -> None:
        await self.worker.configure()
        for gateway in self.far:
            await gateway.configure([self.inside()], peers=(self.wests(),))
        await self.home.configure([self.abroad(*self.far)], peers=(self.easts(),))
        await self.edge.configure([Route(KEY, 1, (gateway_endpoint(self.home),))])

    async def ingress_requests(self) -> int:
        """Requests that came to east."""
        told = [await gateway.front.stats() for gateway in self.far]
        return sum(each.requests for stats in told for each in stats.ingress)

    def caller(self, at: DataPlaneNode, files: CertificateFiles) -> GrpcClient:
        """With that certificate and the authority of the node that it calls."""
        client = GrpcClient(at.front.config.port, at.files.authority.read_bytes(), files)
        self.clients.append(client)
        return client

    def tenant(self, at: DataPlaneNode) -> GrpcClient:
        return self.caller(at, self.west.issue(Role.TENANT, KEY.tenant))


def gateway_endpoint(gateway: DataPlaneNode, *, region: str = "", agreement: str = "") -> Endpoint:
    address = f"127.0.0.1:{gateway.front.config.port}"
    name = f"{AGREEMENT}/{gateway.name}"
    return Endpoint(name, gateway.name, EndpointKind.GATEWAY, address, 1.0, EndpointState.READY, region, agreement)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started_regions(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TwoRegions]:
    folder = tmp_path_factory.mktemp("regions")
    model = folder / "relu.onnx"
    model.write_bytes(relu().SerializeToString())
    west, east = (Authority(folder / name, name, SystemClock().wall()) for name in ("west", "east"))
    home, edge = DataPlaneNode("g1", west, folder / "w-g1", Role.GATEWAY), DataPlaneNode("n1", west, folder / "w-n1")
    far = (
        DataPlaneNode("g1", east, folder / "e-g1", Role.GATEWAY),
        DataPlaneNode("g2", east, folder / "e-g2", Role.GATEWAY),
    )
    regions = TwoRegions(west, east, home, edge, far, DataPlaneNode("n1", east, folder / "e-n1"))
    try:
        await asyncio.gather(*(node.start() for node in regions.nodes))
        await regions.worker.load("a1", GUEST, model)
        yield regions
    finally:
        await asyncio.gather(*(node.stop() for node in regions.nodes))


@pytest_asyncio.fixture(loop_scope="module")
async def regions(started_regions: TwoRegions) -> AsyncIterator[TwoRegions]:
    await started_regions.configure_agreed()
    yield started_regions
    while started_regions.clients:
        await started_regions.clients.pop().close()


async def code_of(client: GrpcClient, said: dict[str, str] | None = None) -> str:
    """What a request is refused with; the answer's bytes are checked where there is one. A handshake has no code."""
    try:
        answer = await client.infer("relu", (X,), extra_metadata=said or {}, timeout=5)
    except InferenceError as error:
        return error.code or str(error.status)
    assert answer.outputs[0].raw == Y
    return "answered"


async def test_what_home_cannot_do_another_region_answers(regions: TwoRegions) -> None:
    for entry in (regions.home, regions.edge):
        client = regions.tenant(entry)
        answer = await client.infer("relu", (X,), request_id="mine")
        assert (answer.model, answer.id, answer.outputs[0].raw) == ("relu", "mine", Y)
        assert await client.model_ready("relu")
        assert [each["name"] for each in (await client.model("relu"))["inputs"]] == ["x"]

    stats = await regions.home.front.stats()
    (left,) = stats.agreement_counts
    assert (left.agreement, left.region, left.requests, left.errors) == (AGREEMENT, "east", 2, 0)
    assert left.latency_p95_s > 0
    came = [each for gateway in regions.far for each in (await gateway.front.stats()).agreement_counts]
    assert sum(each.requests for each in came) == 2
    assert {(each.agreement, each.region) for each in came} == {(AGREEMENT, "west")}
    entered = [each for gateway in regions.far for each in (await gateway.front.stats()).ingress]
    assert {(each.workload, each.origin) for each in entered} == {(GUEST, "west")}
    assert regions.worker.workers is not None
    (served,) = [each for one in await regions.worker.workers.stats() for each in one.served]
    assert (served.origin, served.requests) == ("west", 2)


async def test_a27_what_runs_elsewhere_is_called_by_its_own_tenant_alone(regions: TwoRegions) -> None:
    """West's gateway has the right to call east; whoever asks west needs one of his own."""
    other, own = (regions.west.issue(Role.TENANT, name) for name in ("other", KEY.tenant))
    asked: Sequence[tuple[DataPlaneNode, CertificateFiles, dict[str, str], str]] = tuple(
        (node, files, said, expected)
        for node in (regions.home, regions.edge)
        for files, said, expected in (
            (own, {}, "answered"),
            (own, {"shoal-agreement": "ag-2"}, "answered"),  # it is no business of a client's
            (other, {}, Code.MODEL_NOT_FOUND),
            (other, {"shoal-agreement": AGREEMENT}, Code.MODEL_NOT_FOUND),
            (other, {"shoal-tenant": KEY.tenant}, Code.TENANT_DENIED),
            (other, {"shoal-tenant": GUEST_TENANT}, Code.TENANT_DENIED),
            (other, FORWARDED | {"shoal-tenant": KEY.tenant}, Code.TENANT_DENIED),
        )
    )
    before = await regions.ingress_requests()
    codes = [await code_of(regions.caller(node, files), said) for node, files, said, _ in asked]
    assert codes == [expected for *_, expected in asked]
    after = await regions.ingress_requests()
    assert after - before == codes.count("answered"), "nothing of the others crossed the border"
    record("A27", "P", len(codes), what="called by another tenant at home")


async def test_only_who_the_agreement_names_meets_the_other_regions_gateway(regions: TwoRegions) -> None:
    far = regions.far[0]
    west, east = regions.west, regions.east
    named = west.issue(Role.GATEWAY, "g1")
    asked: Sequence[tuple[CertificateFiles, dict[str, str], str]] = (
        (named, FORWARDED, "answered"),
        (named, FORWARDED | {"shoal-tenant": "acme", "shoal-origin": "n9"}, "answered"),
        (named, FORWARDED | {"shoal-agreement": "ag-2"}, Code.AGREEMENT_UNKNOWN),
        (named, {"shoal-agreement": AGREEMENT}, Code.ROLE_DENIED),
        (west.issue(Role.GATEWAY, "g2"), FORWARDED, Code.ROLE_DENIED),
        (west.issue(Role.AGENT, "g1"), FORWARDED, Code.ROLE_DENIED),
        (west.issue(Role.OPERATOR, "ops"), {"shoal-tenant": GUEST_TENANT}, Code.ROLE_DENIED),
        (west.issue(Role.GATEWAY, "g1", region="east"), FORWARDED, Code.CERT_UNTRUSTED),
        (west.issue(Role.OPERATOR, "ops", region="east"), {"shoal-tenant": GUEST_TENANT}, Code.CERT_UNTRUSTED),
        (east.issue(Role.GATEWAY, "g1", region="west"), FORWARDED, Code.CERT_UNTRUSTED),
        (west.issue(Role.GATEWAY, "g1", region="north"), FORWARDED, Code.REGION_MISMATCH),
        (east.issue(Role.TENANT, GUEST_TENANT), {}, Code.TENANT_DENIED),
        (west.issue(Role.GATEWAY, "g1", valid_s=-60), FORWARDED, Code.CERT_EXPIRED),
        (Authority(west.folder / "x", "x", SystemClock().wall()).issue(Role.GATEWAY, "g1"), FORWARDED, "UNAVAILABLE"),
    )
    codes = await asyncio.gather(*(code_of(regions.caller(far, files), said) for files, said, _ in asked))
    assert codes == [expected for _, _, expected in asked]
    # Other gateways of the region and agents never heard of the other region.
    assert await code_of(regions.caller(regions.worker, named), FORWARDED) == "UNAVAILABLE"


async def test_what_ends_is_refused_on_connections_that_are_open(regions: TwoRegions) -> None:
    far = regions.far[0]
    named = regions.west.issue(Role.GATEWAY, "g1")
    brief = regions.west.issue(Role.GATEWAY, "g1", valid_s=3.0)
    ending, open_ = regions.caller(far, brief), regions.caller(far, named)
    assert [await code_of(each, FORWARDED) for each in (ending, open_)] == ["answered", "answered"]

    async def forwarded_code() -> str:
        return await code_of(open_, FORWARDED)

    serial = identity_of_pem(named.certificate.read_bytes()).serial
    ends = (
        (replace(regions.wests(), revoked=(serial,)), Code.CERT_REVOKED),
        (replace(regions.wests(), agreements=("ag-2",)), Code.AGREEMENT_UNKNOWN),
        (replace(regions.wests(), gateways=("g2",)), Code.ROLE_DENIED),
        (replace(regions.wests(), roots=(regions.east.certificate.read_text(),)), Code.CERT_UNTRUSTED),
    )
    for trust, code in ends:
        await far.configure([regions.inside()], peers=(trust,))
        assert await forwarded_code() == code
        await far.configure([regions.inside()], peers=(regions.wests(),))
        assert await forwarded_code() == "answered"
    await far.configure([regions.inside()])
    assert await forwarded_code() == Code.REGION_MISMATCH
    await far.configure([regions.inside()], peers=(regions.wests(),))

    async def over() -> bool:
        return await code_of(ending, FORWARDED) == Code.CERT_EXPIRED

    await until(over, 10, "the certificate to end on its open connection")


async def test_a_gateway_sends_nothing_to_who_is_not_the_other_regions(regions: TwoRegions) -> None:
    """Its name must be vouched for by that region's authority, and be one that the agreement has."""
    tenant = regions.tenant(regions.home)
    impostor = replace(gateway_endpoint(regions.edge, region="east", agreement=AGREEMENT), node="g1")
    unnamed = replace(regions.easts(), gateways=("g9",))
    others = replace(regions.easts(), roots=(Authority(regions.east.folder / "y", "y", 1.8e9).certificate.read_text(),))
    own = replace(gateway_endpoint(regions.worker, region="east", agreement=AGREEMENT), node="n1")
    for endpoint, peer, code in (
        (impostor, regions.easts(), Code.REPLICA_UNREACHABLE),
        (own, regions.easts(), Code.CERT_UNTRUSTED),
        (regions.abroad(*regions.far).endpoints[0], unnamed, Code.CERT_UNTRUSTED),
        (regions.abroad(*regions.far).endpoints[0], others, Code.REPLICA_UNREACHABLE),
    ):
        await regions.home.configure([Route(KEY, 2, (endpoint,))], peers=(peer,))
        assert await code_of(tenant) == code


async def test_a25_a_guests_requests_go_to_no_third_region_and_nothing_is_forwarded_twice_inside(
    regions: TwoRegions,
) -> None:
    # East's gateway, were it told so, would not pass on what came from west; nor would west's what an agent sent it.
    third = replace(gateway_endpoint(regions.home, region="west", agreement="ag-3"), node="g1")
    await regions.far[0].configure([Route(GUEST, 2, (third,))], peers=(regions.wests(),))
    named = regions.caller(regions.far[0], regions.west.issue(Role.GATEWAY, "g1"))
    assert await code_of(named, FORWARDED) == Code.MODEL_NOT_READY
    inside = {"shoal-hop": "1", "shoal-tenant": GUEST_TENANT, "shoal-origin": "west", "shoal-agreement": AGREEMENT}
    agent = regions.caller(regions.far[0], regions.east.issue(Role.AGENT, "n1"))
    assert await code_of(agent, inside) == Code.MODEL_NOT_READY
    await regions.home.configure([Route(KEY, 2, (regions.edge.endpoint("a9", at=regions.home),))])
    hop = {"shoal-hop": "1", "shoal-tenant": "acme", "shoal-origin": "n1"}
    assert await code_of(regions.caller(regions.home, regions.west.issue(Role.AGENT, "n1")), hop) == (
        Code.MODEL_NOT_READY
    )


async def _more(count: Callable[[], Awaitable[int]], before: int) -> bool:
    return await count() > before


async def test_one_of_the_other_regions_gateways_stops_then_dies_and_no_request_is_lost(regions: TwoRegions) -> None:
    """F01 and F18 between regions: it hangs with its connections open, is killed, and is started again."""
    clients = [regions.tenant(regions.home), regions.tenant(regions.edge)]
    victim = regions.far[0].front.pid
    assert victim is not None

    async def errors() -> int:
        return sum(each.errors for each in (await regions.home.front.stats()).agreement_counts)

    async def strike() -> None:
        before = await errors()
        os.kill(victim, signal.SIGSTOP)
        try:
            await until(lambda: _more(errors, before), 10, "a request gives up on it")
        finally:
            with suppress(ProcessLookupError):  # its supervisor ends a front that makes no progress
                os.kill(victim, signal.SIGKILL)

    verdict = await send_load(clients, 300, 100.0, 60, strike)
    print(verdict)
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    record("F01", "P", 1, what="a gateway of another region", sent=300, lost=0, slowest_s=round(verdict.slowest_s, 3))
