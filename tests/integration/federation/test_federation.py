"""Three coordinators and a federation, each a process: joining, the directory, a solicitation; and a member who lies.

`mallory` is a member whose keys the tests hold: it can say whatever a member can say (rows A21, A24, A27, A03).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from harness.builders.federation_members import advertisement, capacity, member
from harness.builders.negotiation import award, notice, renewal, solicitation
from harness.cluster.coordinator import CoordinatorServer
from harness.cluster.federation import NAME, FederationProcesses, federation_of
from harness.report import record
from harness.wait import wait_until
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.identity.authority import FileAuthority
from shoal.types.agreement import Delivered, Release, ReportContent
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.offer import Decline
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey
from shoal.v1 import federation_pb2, federation_pb2_grpc, operator_pb2
from shoal.wire import nouns, signed_envelope
from shoal.wire.grpcio_status import refusal_of
from shoal.wire.identity import dns_of
from shoal.wire.limits import ENROL_BYTES, LINK_BYTES, channel_options
from shoal.wire.member_files import Enrolled

CALL_S = 10.0
TRADES = """apiVersion: shoal/v1
kind: Region
metadata: {name: beta}
spec: {trade: [{with: mallory, tenants: [shop]}]}
"""
COORDINATORS = {Role.COORDINATOR}
FEDERATION: Mapping[str, set[Role]] = dict.fromkeys(("Advertise", "Solicit", "Report", "Update", "Leave"), COORDINATORS)
PEER: Mapping[str, set[Role]] = {
    "Bid": {Role.COORDINATOR, Role.FEDERATION},
    **dict.fromkeys(("Award", "Release", "Renew", "Notify", "Fetch", "Measure"), COORDINATORS),
}
"""A second time, by hand and apart from the code that rules."""


@pytest.fixture(scope="module")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FederationProcesses]:
    with federation_of(tmp_path_factory.mktemp("federation"), "alpha", "beta", "mallory") as found:
        for region in found.regions:
            found.join(region)
        found.wait_all_known()
        yield found


def coordinator_of(region: CoordinatorServer) -> Enrolled:
    """What its process holds too."""
    return region.certificate(Role.COORDINATOR, "coordinator")


def signer(region: CoordinatorServer, *, named: str = "") -> signed_envelope.RegionSigner:
    own = coordinator_of(region)
    return signed_envelope.RegionSigner(named or region.region, own.certificate_pem, own.key_pem)


def dial(address: str, caller: Enrolled, server: CoordinatorServer) -> grpc.Channel:
    """Its caller is `caller`; the server must be of `server`'s CA and name."""
    role = Role.FEDERATION if server.role == "federation" else Role.COORDINATOR
    name = dns_of(server.region, role, str(role))
    credentials = grpc.ssl_channel_credentials(
        server.certificate(Role.VIEWER, "any").ca_pem, caller.key_pem, caller.certificate_pem
    )
    return grpc.secure_channel(address, credentials, channel_options(LINK_BYTES, server_name=name))


def peers(regions: FederationProcesses, caller: Enrolled, to: str) -> Any:
    view = regions.federation_view(to)
    assert view is not None
    address = next(one.address for one in view.members if one.region == to)
    return federation_pb2_grpc.PeerStub(dial(address, caller, regions.regions[to]))


def service(regions: FederationProcesses, caller: Enrolled) -> Any:
    return federation_pb2_grpc.FederationStub(dial(regions.federation.link, caller, regions.federation))


def refusal_code(call: Callable[..., object], *arguments: object, **more: object) -> Code:
    with pytest.raises(grpc.RpcError) as error:
        call(*arguments, timeout=CALL_S, **more)
    return refusal_of(error.value).code


def test_every_region_knows_every_other_its_distance_and_what_it_has(regions: FederationProcesses) -> None:
    for region in regions.regions:
        view = regions.federation_view(region)
        assert view is not None
        assert view.federation == NAME
        assert [one.region for one in view.members] == ["alpha", "beta", "mallory"]
        assert all(one.trust == 1.0 for one in view.members)
        assert [math.isnan(one.rtt_s) for one in view.members] == [one.region == region for one in view.members]
    listed = regions.operator().GetFederation(operator_pb2.GetFederationRequest(), timeout=CALL_S).federation
    assert [one.region for one in listed.members] == ["alpha", "beta", "mallory"]


def test_a_federation_has_a_log_of_its_own_and_of_no_node(regions: FederationProcesses) -> None:
    operator = regions.operator()
    pages = operator.Logs(operator_pb2.LogsRequest(lines=1), timeout=CALL_S)
    assert sum(len(page.lines) for page in pages) == 1
    asked = operator_pb2.LogsRequest(node="edge-1", lines=5)
    assert (
        refusal_code(lambda request, timeout: list(operator.Logs(request, timeout=timeout)), asked) is Code.NODE_UNKNOWN
    )


def test_a_token_is_for_one_region_and_once(regions: FederationProcesses, tmp_path: Path) -> None:
    token = regions.token("beta")
    stub = regions.operator("alpha")
    join = operator_pb2.JoinFederationRequest(address=regions.federation.enrol, token=token)
    assert refusal_code(stub.JoinFederation, join) is Code.CONFLICT, "it is a member already"
    forged = token[:-4] + "AAAA"
    for text, code in ((token, Code.TOKEN_INVALID), (forged, Code.TOKEN_INVALID), ("nonsense", Code.TOKEN_INVALID)):
        assert refusal_code(join_as, regions, "mallory", text) is code
    assert join_as(regions, "beta", token).federation == NAME, "a member may join again, with the same CA"
    assert join_as(regions, "beta", token).federation == NAME, "the reply may have been lost"
    named = regions.token("nobody")
    assert refusal_code(join_as, regions, "beta", named) is Code.TOKEN_INVALID
    taken = regions.token()
    assert refusal_code(join_as, regions, "beta", taken, roots=same_name("beta", tmp_path)) is Code.CERT_UNTRUSTED
    assert refusal_code(join_as, regions, "beta", taken, proves=named) is Code.REGION_MISMATCH
    mallory, unended = (
        regions.regions["mallory"].authority().roots,
        (regions.regions["beta"].authority().roots[0][:-1],),
    )
    assert refusal_code(join_as, regions, "beta", taken, roots=mallory) is Code.FIELD_INVALID
    assert refusal_code(join_as, regions, "beta", taken, roots=unended) is Code.FIELD_INVALID
    assert refusal_code(join_as, regions, "mallory", taken, name="beta") is Code.FIELD_INVALID


def join_as(
    regions: FederationProcesses,
    region: str,
    token: str,
    *,
    name: str = "",
    roots: tuple[str, ...] = (),
    proves: str = "",
    timeout: float = CALL_S,
) -> federation_pb2.JoinReply:
    """As the coordinator of `region` would. roots: instead of its own. proves: the token that its proof is over."""
    process = regions.regions[region]
    view = regions.federation_view(region)
    assert view is not None
    own = next(one for one in view.members if one.region == region)
    request = federation_pb2.JoinRequest(
        token=token,
        region=name or region,
        address=own.address,
        roots=roots or process.authority().roots,
        proof=signer(process).sign_bytes(signed_envelope.JOIN, (proves or token).encode(), NAME),
    )
    ca = regions.federation.certificate(Role.VIEWER, "any").ca_pem
    options = channel_options(ENROL_BYTES, server_name=dns_of(NAME, Role.FEDERATION, "federation"))
    with grpc.secure_channel(regions.federation.enrol, grpc.ssl_channel_credentials(ca), options) as opened:
        reply: federation_pb2.JoinReply = federation_pb2_grpc.JoiningStub(opened).Join(request, timeout=timeout)
        return reply


def test_what_a_region_solicits_is_answered_by_who_may_have_it(regions: FederationProcesses) -> None:
    """Over the federation, and directly where it is not there. Nobody has a gateway, or works for others."""
    alpha, mallory = regions.regions["alpha"], regions.regions["mallory"]
    told = advertisement("mallory", future(), lease_s=20.0)
    lies = service(regions, coordinator_of(mallory))
    lies.Advertise(signer(mallory).sign(told, NAME), timeout=CALL_S)
    asked = solicitation("s-alpha", origin="alpha")
    message = signer(alpha).sign(asked, signed_envelope.ANYONE)
    reply = service(regions, coordinator_of(alpha)).Solicit(message, timeout=CALL_S)
    answers = [*reply.answers, peers(regions, coordinator_of(alpha), "beta").Bid(message, timeout=CALL_S)]
    assert [each.by for each in answers] == ["mallory", "beta"]

    def roots_of(region: str) -> tuple[str, ...]:
        return (regions.regions[region].certificate(Role.VIEWER, "any").ca_pem.decode(),)

    for each in answers:
        heard = signed_envelope.verify_envelope(
            each, Decline, to="alpha", roots_of=roots_of, wall=CoordinatorClock().wall()
        )
        assert heard.solicitation == "s-alpha"
        assert heard.refusal.code in (Code.NODE_NOT_READY, Code.TRADE_DENIED)


def future() -> int:
    """A number that the region's own process does not reach while this test runs."""
    return int(CoordinatorClock().wall() * 1000) + 10**9


def test_a21_what_is_said_in_another_regions_name(regions: FederationProcesses) -> None:
    mallory, alpha = regions.regions["mallory"], regions.regions["alpha"]
    own, names = coordinator_of(mallory), 0
    to_beta, to_federation = peers(regions, own, "beta"), service(regions, own)
    forged = mallory.authority()
    forged.region = "alpha"
    minted = forged.enrol_self(
        Role.COORDINATOR, "coordinator", lifetime_s=Seconds(600.0), wall=CoordinatorClock().wall()
    )
    as_alpha = signed_envelope.RegionSigner("alpha", minted.certificate_pem, minted.key_pem)

    direct = {
        "Award": replace(award(), origin="alpha"),
        "Release": Release("s-1", "b-1", "alpha"),
        "Renew": renewal(1),
        "Notify": notice(1.0, by="alpha"),
        "Bid": solicitation(origin="alpha"),
    }
    for method, noun in direct.items():
        call, to = getattr(to_beta, method), signed_envelope.ANYONE if method == "Bid" else "beta"
        renamed = signer(mallory).sign(noun, to)
        renamed.by = "alpha"
        inside = signer(mallory).sign(noun, to)
        genuine, minted_ = signer(alpha).sign(noun, to), as_alpha.sign(noun, to)
        for message in (renamed, genuine, minted_, *([inside] if method != "Renew" else [])):
            assert refusal_code(call, message) is (Code.REGION_MISMATCH), method
            names += 1
    upwards: dict[str, object] = {
        "Advertise": advertisement("alpha", future()),
        "Solicit": solicitation(origin="alpha"),
        "Update": member("alpha", address="mallory:1", roots=(mallory.authority().roots[0],)),
    }
    for method, noun in upwards.items():
        call, to = getattr(to_federation, method), signed_envelope.ANYONE if method == "Solicit" else NAME
        renamed = signer(mallory).sign(noun, to)
        renamed.by = "alpha"
        for message in (renamed, signer(mallory).sign(noun, to), signer(alpha).sign(noun, to)):
            assert refusal_code(call, message) is (Code.REGION_MISMATCH), method
            names += 1
    # A certificate of mallory's making that says `alpha` shakes hands: its CA is a member's. Its calls are judged.
    for stub in (peers(regions, minted, "beta"), service(regions, minted)):
        call = stub.Award if hasattr(stub, "Award") else stub.Advertise
        message = as_alpha.sign(award(), "beta")
        assert refusal_code(call, message) is Code.CERT_UNTRUSTED
        names += 1
    view = regions.federation_view("beta")
    assert view is not None
    assert next(one.address for one in view.members if one.region == "alpha") != "mallory:1"
    record("A21", "P", names)


def same_name(region: str, folder: Path) -> tuple[str, ...]:
    """CAs of the region's name, with keys of somebody else."""
    return FileAuthority.open(folder / region, region, wall=CoordinatorClock().wall(), may_create=True).roots


def test_a21_no_member_says_a_ca_that_shuts_another_one_out(regions: FederationProcesses, tmp_path: Path) -> None:
    mallory = regions.regions["mallory"]
    view = regions.federation_view("mallory")
    assert view is not None
    address = next(one.address for one in view.members if one.region == "mallory")
    stub, own = service(regions, coordinator_of(mallory)), mallory.authority().roots
    hostile = {
        "without its end": (own[0].rstrip("\n"),),
        "of another region's name": (*own, *same_name("alpha", tmp_path)),
        "of the federation's name": (*own, *same_name(NAME, tmp_path)),
        "of another region": (*own, *regions.regions["alpha"].authority().roots),
    }
    for name, roots in hostile.items():
        told = signer(mallory).sign(member("mallory", address=address, roots=roots), NAME)
        assert refusal_code(stub.Update, told) is Code.FIELD_INVALID, name
    for each in regions.regions.values():
        with dial(regions.federation.link, coordinator_of(each), regions.federation) as opened:
            assert answer(opened, "/shoal.v1.Federation/Report") is not Code.COORDINATOR_UNREACHABLE, each.region
    record("A21", "P", len(hostile), what="CAs that a member says")


def test_a24_advertisements_that_cannot_be(regions: FederationProcesses) -> None:
    mallory = regions.regions["mallory"]
    stub, says = service(regions, coordinator_of(mallory)), signer(mallory)
    good = advertisement("mallory", future(), lease_s=3.0, classes=(capacity(device_class="honest"),))
    stub.Advertise(says.sign(good, NAME), timeout=CALL_S)
    absurd: dict[str, Any] = {
        "1e12 GPUs": {"classes": (capacity(devices=10**12),)},
        "negative price": {"classes": (capacity(cost_usd_per_h=-1.0),)},
        "NaN": {"classes": (capacity(confidence=math.nan),)},
        "infinite": {"classes": (capacity(cost_usd_per_h=math.inf),)},
        "too many classes": {"classes": tuple(capacity(device_class=f"gpu {n}") for n in range(65))},
        "huge": {"classes": tuple(capacity(device_class=f"gpu {n}" + "x" * 4000) for n in range(60))},
        "a lease for ever": {"lease_s": 1e12},
    }
    for name, changes in absurd.items():
        told = advertisement("mallory", good.sequence + 1, **changes)
        assert refusal_code(stub.Advertise, says.sign(told, NAME)) is Code.ADVERT_INVALID, name
    older = replace(good, sequence=good.sequence - 1)
    assert refusal_code(stub.Advertise, says.sign(older, NAME)) is Code.REPLAYED

    def counts() -> list[str]:
        view = regions.operator().GetFederation(operator_pb2.GetFederationRequest(), timeout=CALL_S).federation
        return [each.device_class for one in view.members if one.region == "mallory" for each in one.classes]

    assert counts() in (["honest"], []), "the last good one, until it is old"
    wait_until(lambda: not counts(), 20, "the last good one ages out")
    record("A24", "P", len(absurd) + 1)


def test_a27_bytes_are_lent_by_agreement_alone(regions: FederationProcesses) -> None:
    alpha = regions.regions["alpha"]
    asked = federation_pb2.PeerFetch(agreement="a-guess", digest="sha256:" + "0" * 64)
    stub = peers(regions, coordinator_of(alpha), "beta")
    assert (
        refusal_code(lambda asked, timeout: list(stub.Fetch(asked, timeout=timeout)), asked) is Code.AGREEMENT_UNKNOWN
    )
    record("A27", "P", 1, what="fetch without an agreement")


def test_a27_the_region_and_its_tenant_need_a_right_each(regions: FederationProcesses) -> None:
    """What beta's document says, as mallory finds out who asks for one tenant with another's right."""
    mallory, beta = regions.regions["mallory"], regions.operator("beta")
    stub, says = peers(regions, coordinator_of(mallory), "beta"), signer(mallory)

    def code(tenant: str, number: int) -> Code:
        asked = solicitation(f"s-{tenant}-{number}", origin="mallory", workload=WorkloadKey(tenant, "ocr"))
        reply = stub.Bid(says.sign(asked, signed_envelope.ANYONE), timeout=CALL_S)
        return nouns.decode(Decline, reply.content).refusal.code

    assert [code(tenant, 1) for tenant in ("shop", "bank")] == [Code.TRADE_DENIED] * 2
    text = TRADES.replace("mallory, tenants", "alpha, tenants")
    for number, (trades, expected) in enumerate(
        ((text, [Code.TRADE_DENIED] * 2), (TRADES, [Code.NODE_NOT_READY, Code.TENANT_DENIED])), start=2
    ):
        document = operator_pb2.Document(name="r.yaml", text=trades)
        beta.Apply(operator_pb2.ApplyRequest(documents=[document]), timeout=CALL_S)
        assert [code(tenant, number) for tenant in ("shop", "bank")] == expected
    record("A27", "P", 6, what="solicited for a tenant without the right")


def test_a_record_of_ones_own_is_answered(regions: FederationProcesses) -> None:
    mallory = regions.regions["mallory"]
    stub, says = service(regions, coordinator_of(mallory)), signer(mallory)
    praise = ReportContent((Delivered("mallory", "a", Seconds(1.0), Seconds(0.1), 100, False),), ())
    assert stub.Report(says.sign(praise, NAME), timeout=CALL_S).next_sequence >= 1


def test_a03_every_role_of_every_region_calls_every_method(regions: FederationProcesses) -> None:
    """On the ports where several regions' certificates shake hands: a member's, the federation's, the port's own."""
    methods = federation_pb2.DESCRIPTOR.services_by_name
    assert {method.name for method in methods["Federation"].methods} == FEDERATION.keys()
    assert {method.name for method in methods["Peer"].methods} == PEER.keys()
    assert {method.name for method in methods["Joining"].methods} == {"Join"}
    view, asked = regions.federation_view("beta"), 0
    assert view is not None
    beta = next(one.address for one in view.members if one.region == "beta")
    ports = (
        (regions.federation.link, regions.federation, "Federation", FEDERATION),
        (beta, regions.regions["beta"], "Peer", PEER),
    )
    for address, server, name, table in ports:
        for caller in (regions.regions["alpha"], regions.federation):
            for role in (role for role in Role if role is not Role.BROKER):
                foreign = caller is not server
                with dial(address, caller.certificate(role, "somebody"), server) as opened:
                    for method, may in table.items():
                        code = answer(opened, f"/shoal.v1.{name}/{method}")
                        assert (code is not Code.ROLE_DENIED) is (role in may), (
                            f"{caller.region} {role} {method}: {code}"
                        )
                        asked += 1
                    operators = answer(opened, "/shoal.v1.Operator/CreateToken")
                    if name == "Peer":
                        assert operators is Code.UNIMPLEMENTED
                    elif foreign:
                        assert operators is Code.REGION_MISMATCH, f"{role} of {caller.region}"
    record("A03", "P", asked, listener="federation and peers")


def test_a03_a_federations_ca_is_rotated_by_its_operators_and_read_by_its_viewers(regions: FederationProcesses) -> None:
    may = {"RotateAuthority": {Role.OPERATOR}, "GetAuthority": {Role.OPERATOR, Role.VIEWER}}
    asked = 0
    for caller in (regions.regions["alpha"], regions.federation):
        for role in (role for role in Role if role is not Role.BROKER):
            with dial(regions.federation.link, caller.certificate(role, "somebody"), regions.federation) as opened:
                for method, allowed in may.items():
                    code = answer(opened, f"/shoal.v1.Operator/{method}")
                    if caller is not regions.federation:
                        assert code is Code.REGION_MISMATCH, f"{role} of {caller.region} {method}: {code}"
                    else:
                        assert (code is not Code.ROLE_DENIED) is (role in allowed), f"{role} {method}: {code}"
                        assert code is not Code.REGION_MISMATCH
                    asked += 1
    found = regions.operator().GetAuthority(operator_pb2.GetAuthorityRequest(), timeout=CALL_S)
    assert found.stage == "idle", "nobody's message was one"
    record("A03", "P", asked, listener="federation, its CA")


def answer(opened: grpc.Channel, method: str) -> Code:
    """What one call with a message that is none comes to."""
    stream = opened.stream_stream(method, None, None)(iter([b"\xff"]), timeout=CALL_S)
    with pytest.raises(grpc.RpcError) as error:
        for _ in stream:
            pass
    return refusal_of(error.value).code


def test_a_member_that_restarts_is_a_member_still_wherever_it_listens_now(regions: FederationProcesses) -> None:
    alpha = regions.regions["alpha"]
    view = regions.federation_view("beta")
    assert view is not None
    before = next(one.address for one in view.members if one.region == "alpha")
    alpha.end()
    alpha.start(flags=("--peers", "127.0.0.1:0"))

    def has_moved() -> bool:
        known = regions.federation_view("beta")
        assert known is not None
        return any(one.region == "alpha" and one.address != before and one.rtt_s > 0 for one in known.members)

    wait_until(has_moved, 30, "beta measures alpha where it is now")


def test_who_leaves_is_trusted_no_more_and_may_come_again(regions: FederationProcesses) -> None:
    operator = regions.operator("mallory")
    operator.LeaveFederation(operator_pb2.LeaveFederationRequest(), timeout=CALL_S)
    assert regions.federation_view("mallory") is None
    asked = signer(regions.regions["mallory"]).sign(solicitation(origin="mallory"), signed_envelope.ANYONE)
    stub = service(regions, coordinator_of(regions.regions["mallory"]))
    assert refusal_code(stub.Solicit, asked) in (
        Code.REGION_UNKNOWN,
        Code.COORDINATOR_UNREACHABLE,  # it does not even shake hands
    )
    assert regions.join("mallory").federation == NAME
    audited = [entry.code for entry in regions.operator().Events(operator_pb2.EventsRequest(), timeout=CALL_S)]
    assert audited.count("REGION_LEFT") == 1
