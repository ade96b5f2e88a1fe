"""F42: the federation's own CA is followed by another; no region is cut off, whoever is restarted or away meanwhile."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from harness.cluster.coordinator import CoordinatorServer
from harness.cluster.federation import NAME, FederationProcesses, advertise_in_place_of, federation_of
from harness.report import record
from harness.wait import wait_until
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.identity.authority import FileAuthority
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.units import Seconds
from shoal.v1 import federation_pb2, federation_pb2_grpc, operator_pb2
from shoal.wire.enrol import redeem
from shoal.wire.grpcio_status import refusal_of
from shoal.wire.identity import dns_of
from shoal.wire.limits import LINK_BYTES, channel_options

CALL_S = 10.0
WAIT_S = 40.0
PEERS = ("--peers", "127.0.0.1:0")
ALPHA = "shoal://alpha/coordinator/coordinator"
ANN = f"shoal://{NAME}/operator/ann"


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[FederationProcesses]:
    with federation_of(tmp_path, "alpha", "beta") as found:
        for region in found.regions:
            found.join(region)
        found.wait_all_known()
        yield found


def authority(regions: FederationProcesses) -> operator_pb2.GetAuthorityReply:
    return regions.operator().GetAuthority(operator_pb2.GetAuthorityRequest(), timeout=CALL_S)


def rotate(regions: FederationProcesses, *stages: str) -> None:
    for stage in stages:
        regions.operator().RotateAuthority(operator_pb2.RotateAuthorityRequest(stage=stage), timeout=CALL_S)


def laggards(regions: FederationProcesses) -> list[str]:
    return [each.uri for each in authority(regions).laggards]


def wait_stage(regions: FederationProcesses, stage: str) -> None:
    wait_until(lambda: authority(regions).stage == stage, WAIT_S, f"the rotation to be at {stage}")


def trust_changes(regions: FederationProcesses, region: str) -> list[str]:
    """What the region wrote each time that it took over CAs of its federation."""
    reply = regions.operator(region).Get(operator_pb2.GetRequest(kind="events"), timeout=CALL_S)
    return [event.message for event in reply.events if event.code == "FEDERATION_CA_CHANGED"]


def wait_trusts(regions: FederationProcesses, region: str, fingerprint: str) -> None:
    """Wait until the region trusts this CA of its federation and no other."""
    wait_until(
        lambda: trust_changes(regions, region)[-1:] == [f"trusts {fingerprint[:16]}"],
        WAIT_S,
        f"{region} to trust the new CA alone",
    )


def restart(process: CoordinatorServer) -> None:
    process.end()
    process.start(flags=PEERS if process.role == "region" else ())


def is_refused_with_old_ca(regions: FederationProcesses, old: Path) -> bool:
    """Whether alpha refuses a caller whom the copy of the federation's CA in `old` certifies as the federation."""
    clock = CoordinatorClock()
    copy = FileAuthority.open(old, NAME, wall=clock.wall(), may_create=False)
    forged = copy.enrol_self(Role.FEDERATION, "federation", lifetime_s=Seconds(600.0), wall=clock.wall())
    view = regions.federation_view("beta")
    assert view is not None
    address = next(one.address for one in view.members if one.region == "alpha")
    roots = regions.regions["alpha"].certificate(Role.VIEWER, "any").ca_pem
    credentials = grpc.ssl_channel_credentials(roots, forged.key_pem, forged.certificate_pem)
    options = channel_options(LINK_BYTES, server_name=dns_of("alpha", Role.COORDINATOR, "coordinator"))
    with grpc.secure_channel(address, credentials, options) as channel:
        try:
            federation_pb2_grpc.PeerStub(channel).Bid(federation_pb2.Said(), timeout=CALL_S)
        except grpc.RpcError as error:
            return refusal_of(error).code in (Code.CERT_UNTRUSTED, Code.COORDINATOR_UNREACHABLE)
    return False


@pytest.mark.timeout(240)
def test_f42_a_rotation_of_the_federations_ca_goes_on_over_restarts_at_each_stage(
    regions: FederationProcesses, tmp_path: Path
) -> None:
    federation, alpha, beta = regions.federation, regions.regions["alpha"], regions.regions["beta"]
    old = tmp_path / "old-ca"
    shutil.copytree(federation.data / "ca", old)
    assert not is_refused_with_old_ca(regions, old), "until then it is the federation's"
    request = operator_pb2.CreateTokenRequest(role="operator", name="ann", valid_s=600.0)
    token = regions.operator().CreateToken(request, timeout=CALL_S).token
    redeem(federation.enrol, token, "ann")

    alpha.end()
    advertise_in_place_of(alpha.authority(), federation.authority(), federation.link)
    rotate(regions, "")
    wait_until(lambda: laggards(regions) == [ALPHA], WAIT_S, "beta to trust both and alpha to be waited for")
    restart(federation)
    assert (authority(regions).stage, laggards(regions)) == ("trust", [ALPHA]), "as before"
    alpha.start(flags=PEERS)
    wait_stage(regions, "issue")
    wait_until(lambda: laggards(regions) == [ANN], WAIT_S, "all but her to have what the stage needs")
    restart(beta)
    restart(federation)
    regions.wait_all_known(WAIT_S)
    assert (authority(regions).stage, laggards(regions)) == ("issue", [ANN])
    rotate(regions, "retire")
    (issuing,) = [root.fingerprint for root in authority(regions).roots if root.state == "issuing"]
    for region in regions.regions:
        wait_trusts(regions, region, issuing)
    wait_until(lambda: is_refused_with_old_ca(regions, old), WAIT_S, "the old CA to vouch for nobody")
    restart(federation)
    restart(alpha)
    regions.wait_all_known(WAIT_S)


@pytest.mark.timeout(240)
def test_f42_who_was_away_over_one_rotation_comes_back_and_over_two_joins_again(regions: FederationProcesses) -> None:
    beta, clock = regions.regions["beta"], CoordinatorClock()
    beta.end()
    rotate(regions, "", "issue", "retire")
    began = clock.now()
    beta.start(flags=PEERS)
    regions.wait_all_known(WAIT_S)
    back_s = clock.now() - began
    assert len(trust_changes(regions, "beta")) == 1, "the CA that it knew vouches for its successor"

    beta.end()
    rotate(regions, "", "issue", "retire", "", "issue", "retire")
    beta.start(flags=PEERS)

    def refusal() -> str:
        view = regions.federation_view("beta")
        assert view is not None
        return view.reason.code

    wait_until(lambda: refusal() == Code.CERT_UNTRUSTED, WAIT_S, "beta to say why the federation does not answer")
    view = regions.federation_view("beta")
    assert view is not None
    assert "shoal federation leave --forget" in view.reason.remedy
    regions.operator("beta").LeaveFederation(operator_pb2.LeaveFederationRequest(forget=True), timeout=CALL_S)
    regions.join("beta")
    regions.wait_all_known(WAIT_S)
    record("F42", "P", 1, what="away over a rotation of the federation's CA", back_s=round(back_s, 1))
