"""A05: names that pretend to be others, in certificates that the region's own CA signed and in names as asked for.

Every listener reads a certificate's name the same way: exactly one URI name, in our form; the common name is ignored.
"""

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID

from harness.clients.oip import GrpcClient, InferenceError, RestClient
from harness.cluster.agents import AgentProcess, api
from harness.cluster.coordinator import REGION, CoordinatorServer, channel
from harness.crypto.pki import CertificateFiles
from harness.report import record
from harness.wait import wait_until
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.identity.roots import Roots
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.v1 import enrolment_pb2, enrolment_pb2_grpc, operator_pb2, operator_pb2_grpc
from shoal.wire.enrol import key_pem, new_key, redeem, request_pem
from shoal.wire.grpcio_status import refusal_of
from shoal.wire.identity import dns_of
from shoal.wire.limits import ENROL_BYTES, channel_options
from shoal.wire.member_files import Enrolled

ANN = f"shoal://{REGION}/operator/ann"
URIS: dict[str, Sequence[str]] = {
    "no URI name": (),
    "two of ours": (ANN, f"shoal://{REGION}/viewer/ann"),
    "the same twice": (ANN, ANN),
    "one of ours and a stranger's": (ANN, "https://example.org/ann"),
    "another scheme": (f"spiffe://{REGION}/operator/ann",),
    "the scheme in capitals": (f"SHOAL://{REGION}/operator/ann",),
    "the role in capitals": (f"shoal://{REGION}/Operator/ann",),
    "the name in capitals": (f"shoal://{REGION}/operator/Ann",),
    "a role that is none": (f"shoal://{REGION}/root/ann",),
    "a NUL at the end": (f"{ANN}\0",),
    "a NUL before another name": (f"{ANN}\0.example.org",),
    "percent codes": (f"shoal://{REGION}/operator/%61nn",),
    "a coded slash": (f"shoal://{REGION}/agent%2f..%2foperator/ann",),
    "a trailing dot": (f"{ANN}.",),
    "a trailing slash": (f"{ANN}/",),
    "a trailing newline": (f"{ANN}\n",),
    "a Cyrillic a": (f"shoal://{REGION}/operator/\N{CYRILLIC SMALL LETTER A}nn",),
    "a full-width a": (f"shoal://{REGION}/operator/\N{FULLWIDTH LATIN SMALL LETTER A}nn",),
    "a user in it": (f"shoal://admin@{REGION}/operator/ann",),
    "a query": (f"{ANN}?role=operator",),
    "a fragment": (f"{ANN}#x",),
    "no name": (f"shoal://{REGION}/operator/",),
    "a plus": (f"shoal://{REGION}/agent/+",),
    "a hash": (f"shoal://{REGION}/agent/#",),
    "two dots": (f"shoal://{REGION}/agent/..",),
}
NAMES = ("+", "#", "..", "a/b", "Ann", "ann.", "a%6e", "a\0n", "a\n", " ann", "-ann", "ann-", "x" * 64,
         "\N{CYRILLIC SMALL LETTER A}nn")  # fmt: skip


@pytest.fixture(scope="module")
def gateway(
    coordinator: CoordinatorServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[operator_pb2.NodeView]:
    """A real front of the same region."""
    member = AgentProcess(coordinator, tmp_path_factory.mktemp("gw") / "state", "gw")
    assert member.join().returncode == 0
    member.start()

    def serving() -> operator_pb2.NodeView | None:
        with api(coordinator) as operator:
            found = [view for view in operator.get("nodes").nodes if view.front_ready]
        return found[0] if found else None

    found = wait_until(serving, 30.0, "the gateway to serve")
    assert found is not None
    yield found
    member.end()


def craft_certificate(coordinator: CoordinatorServer, folder: Path, uris: Sequence[str], common_name: str) -> Enrolled:
    """Signed by the region's CA, as the CA would never do it: whatever the URI names say."""
    wall = CoordinatorClock().wall()
    root = Roots.open(coordinator.data / "ca", REGION, wall=wall, may_create=False).issuing
    assert root.key is not None
    now = datetime.datetime.fromtimestamp(wall, datetime.UTC)
    key = new_key()
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier._init_without_validation(uri) for uri in uris]
    names.append(x509.DNSName(dns_of(REGION, Role.OPERATOR, "ann")))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .issuer_name(root.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(minutes=10))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(root.key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    found = Enrolled(REGION, Role.OPERATOR, "ann", pem, root.pem, "", "", key_pem(key))
    found.write(folder)
    return found


def files(folder: Path) -> CertificateFiles:
    return CertificateFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


async def codes(
    coordinator: CoordinatorServer, gateway: operator_pb2.NodeView, shown: Enrolled, folder: Path
) -> list[str]:
    """What every listener answers to this certificate."""
    found = []
    with channel(coordinator.link, shown) as opened, pytest.raises(grpc.RpcError) as error:
        operator_pb2_grpc.OperatorStub(opened).WhoAmI(operator_pb2.WhoAmIRequest(), timeout=5)
    found.append(str(refusal_of(error.value).code))
    client = GrpcClient(port(gateway.node.data_address), shown.ca_pem, files(folder))
    with pytest.raises(InferenceError) as failed:
        await client.ready()
    found.append(failed.value.code)
    await client.close()
    rest = RestClient(port(gateway.node.data_address), shown.ca_pem, files(folder))
    response = await rest.request("GET", "/v2/health/ready")
    found.append(response.json()["code"])
    page = await RestClient(port(coordinator.metrics), shown.ca_pem, files(folder)).request("GET", "/metrics")
    found.append(page.body.decode().split()[-1].strip("()"))
    return found


async def test_a05_no_listener_takes_a_certificate_whose_name_is_not_ours(
    coordinator: CoordinatorServer, gateway: operator_pb2.NodeView, tmp_path: Path
) -> None:
    listeners = 0
    for number, (what, uris) in enumerate(URIS.items()):
        folder = tmp_path / str(number)
        shown = craft_certificate(coordinator, folder, uris, ANN)
        answers = await codes(coordinator, gateway, shown, folder)
        assert set(answers) == {Code.CERT_NAME_INVALID}, f"{what}: {answers}"
        listeners = len(answers)
    record("A05", "P", len(URIS) * listeners, certificates=len(URIS), listeners=listeners)


def test_a05_the_common_name_says_nothing(coordinator: CoordinatorServer, tmp_path: Path) -> None:
    """A tenant whose common name is an operator's, and an operator who has a node's."""
    tenant = craft_certificate(
        coordinator, tmp_path / "t", [f"shoal://{REGION}/tenant/shop"], f"shoal://{REGION}/operator/ann"
    )
    with channel(coordinator.link, tenant) as opened, pytest.raises(grpc.RpcError) as error:
        operator_pb2_grpc.OperatorStub(opened).WhoAmI(operator_pb2.WhoAmIRequest(), timeout=5)
    assert refusal_of(error.value).code is Code.ROLE_DENIED
    ann = craft_certificate(coordinator, tmp_path / "o", [ANN], "edge-1")
    with channel(coordinator.link, ann) as opened:
        said = operator_pb2_grpc.OperatorStub(opened).WhoAmI(operator_pb2.WhoAmIRequest(), timeout=5)
    assert (said.role, said.name) == ("operator", "ann")
    record("A05", "P", 2, what="common name")


async def test_a05_names_that_nobody_may_have(
    coordinator: CoordinatorServer, gateway: operator_pb2.NodeView, tmp_path: Path
) -> None:
    """As a token's name, as a joiner's, and as a tenant's in metadata."""
    ca = coordinator.certificate(Role.OPERATOR, "ann")
    ca.write(tmp_path / "op")
    with api(coordinator) as operator:
        token = operator.create_token("agent", "", 600.0).token
        for name in NAMES:
            with pytest.raises(ShoalError) as refused:
                operator.create_token("agent", name, 60.0)
            assert refused.value.code is Code.NAME_INVALID, f"{name!r}: {refused.value}"
    server = dns_of(REGION, Role.COORDINATOR, "coordinator")
    csr = request_pem(new_key(), "").decode()
    with grpc.secure_channel(
        coordinator.enrol,
        grpc.ssl_channel_credentials(ca.ca_pem),
        channel_options(ENROL_BYTES, server_name=server),
    ) as opened:
        stub = enrolment_pb2_grpc.EnrolmentStub(opened)
        for name in NAMES:
            with pytest.raises(grpc.RpcError) as error:
                stub.Redeem(enrolment_pb2.RedeemRequest(token=token, csr_pem=csr, name=name), timeout=10)
            assert refusal_of(error.value).code is Code.NAME_INVALID, f"{name!r}: {error.value}"
    assert redeem(coordinator.enrol, token, "honest").name == "honest", "none of them used the token up"
    rest = RestClient(port(gateway.node.data_address), ca.ca_pem, files(tmp_path / "op"))
    asked = [name for name in NAMES if name.isascii() and name.isprintable() and name == name.strip()]
    for name in asked:
        response = await rest.request("POST", "/v2/models/m/infer", b"{}", {"shoal-tenant": name})
        assert response.json()["code"] == Code.NAME_INVALID, name
    record("A05", "P", 2 * len(NAMES) + len(asked), what="names")
