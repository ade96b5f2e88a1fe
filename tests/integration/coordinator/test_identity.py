"""Who gets in: rows A01, A02, A06, A07 and A14, against a real coordinator process."""

import base64
import datetime
import hashlib
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from onnx import helper

from harness.clients.http2 import declare_4_gib
from harness.cluster.coordinator import REGION, CoordinatorServer, channel, operator, operator_of
from harness.models import synthetic
from harness.report import record
from harness.wait import wait_until
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.identity.authority import FileAuthority
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Node, Role
from shoal.types.link import Hello
from shoal.types.token import parse_join_token
from shoal.types.units import Bytes, Seconds, Wall
from shoal.v1 import (
    artifacts_pb2,
    artifacts_pb2_grpc,
    enrolment_pb2,
    enrolment_pb2_grpc,
    link_pb2,
    link_pb2_grpc,
    operator_pb2_grpc,
)
from shoal.v1 import operator_pb2 as api
from shoal.wire import nouns
from shoal.wire.certificates import identity_of_pem
from shoal.wire.enrol import new_key, redeem, request_pem
from shoal.wire.grpcio_status import refusal_of
from shoal.wire.identity import dns_of
from shoal.wire.limits import ENROL_BYTES, LINK_BYTES, channel_options
from shoal.wire.member_files import Enrolled

UNLIMITED = 2**31 - 1


@pytest.fixture(scope="module")
def admin(coordinator: CoordinatorServer) -> Enrolled:
    folder = Path(coordinator.ready["operator_dir"])
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir()), "only their owner reads them"
    return operator_of(REGION, folder)


def token(coordinator: CoordinatorServer, admin: Enrolled, role: str, name: str = "", valid_s: float = 60.0) -> str:
    request = api.CreateTokenRequest(role=role, name=name, valid_s=valid_s)
    text: str = operator(coordinator.link, admin).CreateToken(request, timeout=10).token
    return text


def refusal(call: Callable[[], Any]) -> Refusal:
    """Why a call was refused."""
    with pytest.raises(grpc.RpcError) as error:
        call()
    return refusal_of(error.value)


def audit_checks(coordinator: CoordinatorServer, admin: Enrolled) -> list[str]:
    checks = operator(coordinator.link, admin).Doctor(api.DoctorRequest(), timeout=10).checks
    return [check.name for check in checks if "audit" in check.name and check.ok]


def hello(name: str, role: Role = Role.AGENT, region: str = REGION) -> link_pb2.FromAgent:
    node = Node(
        name, region, role, {}, "0", "linux", "x86_64", Bytes(2**30), Bytes(2**30), (),
        "127.0.0.1:1", "127.0.0.1:4", "boot-1",
    )  # fmt: skip
    return nouns.from_agent_to_wire(Hello(node, f"nonce-{name}", None, 1, Wall(CoordinatorClock().wall())))


# A01


def test_a01_an_expired_certificate_is_refused_on_a_new_connection(coordinator: CoordinatorServer) -> None:
    now = CoordinatorClock().wall()
    old = coordinator.certificate(Role.OPERATOR, "late", valid_s=60.0, wall=Wall(now - 3600))
    with pytest.raises(grpc.RpcError):
        operator(coordinator.link, old).WhoAmI(api.WhoAmIRequest(), timeout=5)


@pytest.mark.parametrize("role", [Role.AGENT, Role.OPERATOR])
def test_a01_an_open_stream_ends_within_a_second_of_its_certificate(coordinator: CoordinatorServer, role: Role) -> None:
    clock = CoordinatorClock()
    short = coordinator.certificate(role, f"short-{role}", valid_s=3.0)
    ends = identity_of_pem(short.certificate_pem).not_after
    said = threading.Event()
    with channel(coordinator.link, short) as opened:
        if role is Role.AGENT:

            def messages() -> Iterator[link_pb2.FromAgent]:
                yield hello(f"short-{role}")
                said.wait(30)

            stream: Any = link_pb2_grpc.AgentLinkStub(opened).Session(messages())
            assert _first(stream).HasField("welcome")
        else:
            stream = operator(coordinator.link, short).Events(api.EventsRequest(follow=True))
            _first(stream)
        why = refusal(lambda: [None for _ in stream])
        assert why.code is Code.CERT_EXPIRED
        late = clock.wall() - ends
        assert -0.1 <= late <= 1.0
        if role is Role.AGENT:
            said.set()
            again = link_pb2_grpc.AgentLinkStub(opened).Session(iter([hello(f"short-{role}")]))
            assert refusal(partial(_first, again)).code is Code.CERT_EXPIRED
    record("A01", "P", 1, role=role, closed_s_after_expiry=round(late, 3))


def test_a01_validity_is_checked_per_call(coordinator: CoordinatorServer) -> None:
    short = coordinator.certificate(Role.OPERATOR, "brief", valid_s=2.0)
    stub = operator(coordinator.link, short)
    assert stub.WhoAmI(api.WhoAmIRequest(), timeout=5).name == "brief"
    found = wait_until(
        lambda: _expired(lambda: stub.WhoAmI(api.WhoAmIRequest(), timeout=5)), 6.0, "the same connection refuses"
    )
    assert found is not None
    assert found.code is Code.CERT_EXPIRED
    assert found.remedy


def _first(stream: Any) -> Any:
    """The next message of a call; grpc's own type hints leave `next` out."""
    return next(stream)


def _expired(call: Callable[[], Any]) -> Refusal | None:
    try:
        call()
    except grpc.RpcError as error:
        return refusal_of(error)
    return None


# A02


def strangers(tmp_path: Path, coordinator: CoordinatorServer) -> dict[str, Enrolled]:
    """Certificates that look right and that this region's CA did not sign."""
    clock = CoordinatorClock()
    wall = clock.wall()
    other = FileAuthority.open(tmp_path / "other", REGION, wall=wall, may_create=True)
    foreign = FileAuthority.open(tmp_path / "foreign", "us", wall=wall, may_create=True)
    own = coordinator.authority()
    leaf = own.enrol_self(Role.OPERATOR, "leaf", lifetime_s=Seconds(600), wall=wall)
    key = new_key()
    return {
        "another CA": other.enrol_self(Role.OPERATOR, "root", lifetime_s=Seconds(600), wall=wall),
        "another region's CA": foreign.enrol_self(Role.OPERATOR, "root", lifetime_s=Seconds(600), wall=wall),
        "self-signed": _signed_by(key, key, "root", issuer="root"),
        "signed by a leaf": _by_leaf(leaf),
    }


def _by_leaf(leaf: Enrolled) -> Enrolled:
    """A certificate signed with the key of an ordinary one, sent with it as its chain."""
    signer = serialization.load_pem_private_key(leaf.key_pem, password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    mine = _signed_by(new_key(), signer, "root", issuer="leaf")
    chain = mine.certificate_pem + leaf.certificate_pem
    return Enrolled(REGION, Role.OPERATOR, "root", chain, leaf.ca_pem, "", "", mine.key_pem)


def _signed_by(
    key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, name: str, *, issuer: str
) -> Enrolled:
    now = datetime.datetime.fromtimestamp(CoordinatorClock().wall(), datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(minutes=10))
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"shoal://{REGION}/operator/{name}")]),
            critical=False,
        )
        .sign(signer, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Enrolled(REGION, Role.OPERATOR, name, certificate.public_bytes(serialization.Encoding.PEM), b"", "", "", pem)


def test_a02_certificates_that_this_ca_did_not_sign_get_nowhere(
    coordinator: CoordinatorServer, admin: Enrolled, tmp_path: Path
) -> None:
    """Refused in the handshake, below where a code can travel; an honest caller is served all the while."""
    for what, stranger in strangers(tmp_path, coordinator).items():
        with channel(coordinator.link, stranger, ca=admin.ca_pem) as opened:
            for _ in range(2):
                with pytest.raises(grpc.RpcError) as refused:
                    operator_pb2_grpc.OperatorStub(opened).WhoAmI(api.WhoAmIRequest(), timeout=3)
                assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED), what
        assert operator(coordinator.link, admin).WhoAmI(api.WhoAmIRequest(), timeout=5).name == "admin"


def test_a02_no_certificate_and_the_wrong_role_get_nowhere(coordinator: CoordinatorServer, admin: Enrolled) -> None:
    plain = grpc.ssl_channel_credentials(admin.ca_pem)
    options = channel_options(LINK_BYTES, server_name=dns_of(REGION, Role.COORDINATOR, "coordinator"))
    with grpc.secure_channel(coordinator.link, plain, options) as opened, pytest.raises(grpc.RpcError):
        _first(link_pb2_grpc.AgentLinkStub(opened).Session(iter([])))
    agent = coordinator.certificate(Role.AGENT, "curious")
    assert (
        refusal(lambda: operator(coordinator.link, agent).WhoAmI(api.WhoAmIRequest(), timeout=5)).code
        is Code.ROLE_DENIED
    )
    viewer = coordinator.certificate(Role.VIEWER, "reader")
    assert operator(coordinator.link, viewer).WhoAmI(api.WhoAmIRequest(), timeout=5).role == "viewer"
    denied = refusal(lambda: operator(coordinator.link, viewer).Apply(api.ApplyRequest(), timeout=5))
    assert denied.code is Code.ROLE_DENIED


def test_a_node_speaks_for_itself_only(coordinator: CoordinatorServer) -> None:
    agent = coordinator.certificate(Role.AGENT, "honest")
    for lie in (hello("other"), hello("honest", Role.GATEWAY), hello("honest", region="us")):
        with channel(coordinator.link, agent) as opened:
            stream = link_pb2_grpc.AgentLinkStub(opened).Session(iter([lie]))
            assert refusal(partial(_first, stream)).code is Code.NODE_MISMATCH


# A06


def test_a06_one_of_a_hundred_redemptions_at_once_succeeds(coordinator: CoordinatorServer, admin: Enrolled) -> None:
    """A hundred machines, each on a connection of its own as `join` makes it."""
    text = token(coordinator, admin, "agent", "edge-1")
    ready = threading.Barrier(100)

    def one(_: int) -> Enrolled | Refusal:
        ready.wait(30)
        try:
            return redeem(coordinator.enrol, text, "edge-1")
        except ShoalError as error:
            return error.refusal

    with ThreadPoolExecutor(100) as pool:
        outcomes = list(pool.map(one, range(100)))
    won = [outcome for outcome in outcomes if isinstance(outcome, Enrolled)]
    assert len(won) == 1
    assert identity_of_pem(won[0].certificate_pem).uri == f"shoal://{REGION}/agent/edge-1"
    refused = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
    # The first twenty failures are told why; then the address has to slow down.
    assert {outcome.code for outcome in refused} <= {Code.TOKEN_USED, Code.OVERLOADED}
    assert Code.TOKEN_USED in {outcome.code for outcome in refused}
    assert all(outcome.remedy for outcome in refused)
    record("A06", "P", len(outcomes), at_once=len(outcomes), redeemed=len(won), told_why=len(refused))


def test_a06_on_one_connection_no_more_calls_at_once_than_it_may_have(
    coordinator: CoordinatorServer, admin: Enrolled
) -> None:
    """A flood over one connection: the server refuses streams beyond its limit, unread, and still redeems once."""
    text = token(coordinator, admin, "agent", "edge-8")
    request = enrolment_pb2.RedeemRequest(token=text, csr_pem=request_pem(new_key(), "edge-8").decode(), name="edge-8")
    with enrolment(coordinator, admin) as opened, ThreadPoolExecutor(50) as pool:
        stub = enrolment_pb2_grpc.EnrolmentStub(opened)
        outcomes = list(pool.map(lambda _: _outcome(lambda: stub.Redeem(request, timeout=30)), range(100)))
    codes = {outcome.code for outcome in outcomes if isinstance(outcome, Refusal)}
    assert codes <= {Code.TOKEN_USED, Code.OVERLOADED, Code.COORDINATOR_UNREACHABLE}
    won = sum(not isinstance(outcome, Refusal) for outcome in outcomes)
    assert won <= 1
    if not won:  # the failures of the test before left this address no redemption to spare
        redeem_when_allowed(coordinator, text, "edge-8")
    assert refused_redemption(coordinator, text, "edge-8") is Code.TOKEN_USED


def test_a06_used_expired_foreign_and_guessed_tokens(
    coordinator: CoordinatorServer, admin: Enrolled, tmp_path: Path
) -> None:
    used = token(coordinator, admin, "agent", "edge-2")
    wait_until(lambda: redeem(coordinator.enrol, used, "edge-2"), 60, "the address may try again")
    assert refused_redemption(coordinator, used, "edge-2") is Code.TOKEN_USED
    brief = token(coordinator, admin, "agent", "edge-3", valid_s=0.05)
    clock, made = CoordinatorClock(), CoordinatorClock().wall()
    wait_until(lambda: clock.wall() > made + 0.05, 5, "its end")
    assert refused_redemption(coordinator, brief, "edge-3") is Code.TOKEN_EXPIRED
    bound = token(coordinator, admin, "agent", "edge-4")
    assert refused_redemption(coordinator, bound, "edge-5") is Code.TOKEN_INVALID
    assert redeem_when_allowed(coordinator, bound, "edge-4").role is Role.AGENT, "a wrong name does not burn it"
    bearer = token(coordinator, admin, "bearer", "shop")
    assert not bearer.startswith("shoal-join")
    parsed = parse_join_token(bound)
    guess = f"shoal-join.{REGION}.{parsed.ca_sha256}.{'A' * 27}"
    assert refused_redemption(coordinator, guess, "edge-6") is Code.TOKEN_INVALID
    foreign = f"shoal-join.us.{parsed.ca_sha256}.{parsed.secret}"
    with enrolment(coordinator, admin) as opened:
        request = enrolment_pb2.RedeemRequest(token=foreign, csr_pem=request_pem(new_key(), "x").decode(), name="x")
        assert (
            code_beyond_overload(lambda: enrolment_pb2_grpc.EnrolmentStub(opened).Redeem(request, timeout=10))
            is Code.TOKEN_INVALID
        )


def test_a06_an_unbound_token_takes_no_name_that_is_taken(coordinator: CoordinatorServer, admin: Enrolled) -> None:
    redeem_when_allowed(coordinator, token(coordinator, admin, "agent", "mine"), "mine")
    free = token(coordinator, admin, "agent")
    assert refused_redemption(coordinator, free, "mine") is Code.CONFLICT
    assert redeem_when_allowed(coordinator, free, "yours").name == "yours"


@pytest.mark.parametrize("role", ["tenant", "bearer"])
def test_a06_no_token_lets_its_holder_choose_a_tenant(
    coordinator: CoordinatorServer, admin: Enrolled, role: str
) -> None:
    request = api.CreateTokenRequest(role=role, valid_s=60.0)
    stub = operator(coordinator.link, admin)
    assert code_beyond_overload(lambda: stub.CreateToken(request, timeout=10)) is Code.FIELD_MISSING


def test_a06_guessing_is_slowed_down_and_leaves_one_trace(coordinator: CoordinatorServer, admin: Enrolled) -> None:
    """Thousands of guesses: none gets in, few reach the store, one audit entry tells of them."""
    parsed = parse_join_token(token(coordinator, admin, "agent", "prize"))
    before = audit_entries(coordinator, admin)
    csr = request_pem(new_key(), "prize").decode()
    with enrolment(coordinator, admin) as opened, ThreadPoolExecutor(8) as pool:
        stub = enrolment_pb2_grpc.EnrolmentStub(opened)

        def guess(number: int) -> Refusal:
            secret = f"{number:027d}"
            text = f"shoal-join.{REGION}.{parsed.ca_sha256}.{secret}"
            request = enrolment_pb2.RedeemRequest(token=text, csr_pem=csr, name="prize")
            return refusal(lambda: stub.Redeem(request, timeout=30))

        codes = [found.code for found in pool.map(guess, range(2000))]
    assert set(codes) <= {Code.TOKEN_INVALID, Code.OVERLOADED}
    assert codes.count(Code.TOKEN_INVALID) < 100
    entries = audit_entries(coordinator, admin) - before
    assert entries <= 3
    record("A06", "P", len(codes), redeemed=0, looked_up=codes.count(Code.TOKEN_INVALID), audit_entries=entries)


def audit_entries(coordinator: CoordinatorServer, admin: Enrolled) -> int:
    (name,) = audit_checks(coordinator, admin)
    return int(name.split()[0])


def enrolment(coordinator: CoordinatorServer, admin: Enrolled) -> grpc.Channel:
    server = dns_of(REGION, Role.COORDINATOR, "coordinator")
    options = channel_options(ENROL_BYTES, server_name=server)
    return grpc.secure_channel(coordinator.enrol, grpc.ssl_channel_credentials(admin.ca_pem), options)


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except grpc.RpcError as error:
        return refusal_of(error)


def code_beyond_overload(call: Callable[[], Any]) -> Code:
    """The code of a refusal, once the address may be answered at all."""

    def attempt() -> Code | None:
        code = refusal(call).code
        return code if code is not Code.OVERLOADED else None

    code = wait_until(attempt, 60, "an answer beyond OVERLOADED")
    assert code is not None
    return code


def refused_redemption(coordinator: CoordinatorServer, text: str, name: str) -> Code:
    """The code, once the address may be answered at all."""

    def attempt() -> Code | None:
        try:
            redeem(coordinator.enrol, text, name)
        except ShoalError as error:
            return error.code if error.code is not Code.OVERLOADED else None
        raise AssertionError("it was redeemed")

    code = wait_until(attempt, 60, "an answer beyond OVERLOADED")
    assert code is not None
    return code


def redeem_when_allowed(coordinator: CoordinatorServer, text: str, name: str) -> Enrolled:
    return wait_until(lambda: redeem(coordinator.enrol, text, name), 60, "a redemption beyond OVERLOADED")


# A07


def greedy() -> dict[str, bytes]:
    """Signing requests that ask for more than a certificate for `edge-7`."""
    key = new_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "edge-7")])

    def build(signer: Any = key, name: x509.Name = subject, *extensions: x509.ExtensionType) -> bytes:
        builder = x509.CertificateSigningRequestBuilder().subject_name(name)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    good = build()
    other = request_pem(new_key(), "edge-7")
    return {
        "a CA": build(key, subject, x509.BasicConstraints(ca=True, path_length=None)),
        "another role": build(
            key,
            subject,
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"shoal://{REGION}/operator/root")]),
        ),
        "more names": build(
            key, subject, x509.SubjectAlternativeName([x509.DNSName("coordinator.coordinator.eu.shoal")])
        ),
        "another name": build(key, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")])),
        "more attributes": build(
            key, x509.Name([*subject, x509.NameAttribute(NameOID.ORGANIZATION_NAME, "operators")])
        ),
        "a weak key": build(rsa.generate_private_key(65537, 1024)),
        "an RSA key": build(rsa.generate_private_key(65537, 2048)),
        "another curve": build(ec.generate_private_key(ec.SECP384R1())),
        "a broken signature": _mixed(good, other),
        "no request": b"hello",
        "too much": good + b"\n" * 10_000,
    }


def _mixed(one: bytes, other: bytes) -> bytes:
    """The body of one request with the signature of another."""
    body = x509.load_pem_x509_csr(one)
    foreign = x509.load_pem_x509_csr(other)
    der = bytearray(body.public_bytes(serialization.Encoding.DER))
    signature = foreign.signature
    der[-4:] = bytes(byte ^ 1 for byte in signature[-4:])
    return (
        b"-----BEGIN CERTIFICATE REQUEST-----\n"
        + base64.encodebytes(bytes(der))
        + b"-----END CERTIFICATE REQUEST-----\n"
    )


def test_a07_a_request_that_asks_for_more_is_denied_and_does_not_burn_the_token(
    coordinator: CoordinatorServer, admin: Enrolled
) -> None:
    text = token(coordinator, admin, "agent", "edge-7", valid_s=300)
    with enrolment(coordinator, admin) as opened:
        stub = enrolment_pb2_grpc.EnrolmentStub(opened)
        for what, csr in greedy().items():
            request = enrolment_pb2.RedeemRequest(token=text, csr_pem=csr.decode(), name="edge-7")
            assert code_beyond_overload(partial(stub.Redeem, request, timeout=10)) is Code.CSR_DENIED, what
    enrolled = redeem_when_allowed(coordinator, text, "edge-7")
    certificate = x509.load_pem_x509_certificate(enrolled.certificate_pem)
    assert identity_of_pem(enrolled.certificate_pem).uri == f"shoal://{REGION}/agent/edge-7"
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not constraints.ca
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [f"edge-7.agent.{REGION}.shoal", "localhost"]
    record("A07", "P", len(greedy()), denied=len(greedy()))


# A14


def test_a14_a_message_over_the_limit_by_a_byte_is_refused(coordinator: CoordinatorServer, admin: Enrolled) -> None:
    """The limit is on what grpc would have to hold: one byte less passes, and is then refused for what it says."""
    with channel(coordinator.link, admin, max_bytes=UNLIMITED) as opened:
        stub = operator_pb2_grpc.OperatorStub(opened)

        def request_of_size(total: int) -> api.GetRequest:
            request = api.GetRequest(kind="x")
            request.kind = "x" * (total - (request.ByteSize() + 3 - 1))
            while request.ByteSize() < total:
                request.kind += "x"
            return request

        fits, over = request_of_size(LINK_BYTES), request_of_size(LINK_BYTES + 1)
        assert (fits.ByteSize(), over.ByteSize()) == (LINK_BYTES, LINK_BYTES + 1)
        assert refusal(lambda: stub.Get(fits, timeout=20)).code is Code.KIND_UNKNOWN
        assert refusal(lambda: stub.Get(over, timeout=20)).code is Code.TOO_LARGE
        agent = coordinator.certificate(Role.AGENT, "bulky")
        with channel(coordinator.link, agent, max_bytes=UNLIMITED) as linked:
            large = hello("bulky")
            large.hello.nonce = "n" * LINK_BYTES
            stream = link_pb2_grpc.AgentLinkStub(linked).Session(iter([large]))
            assert refusal(partial(_first, stream)).code is Code.TOO_LARGE


def test_a14_compressed_a_thousand_to_one_is_refused_by_what_it_becomes(
    coordinator: CoordinatorServer, admin: Enrolled
) -> None:
    with channel(coordinator.link, admin, max_bytes=UNLIMITED) as opened:
        before = resident(coordinator)
        bomb = api.GetRequest(kind="x" * (200 * 2**20))
        stub = operator_pb2_grpc.OperatorStub(opened)
        for _ in range(3):
            call = lambda: stub.Get(bomb, timeout=60, compression=grpc.Compression.Gzip)  # noqa: E731
            assert refusal(call).code is Code.TOO_LARGE
        assert resident(coordinator) - before < 64 * 2**20


@pytest.mark.parametrize(
    "method", ["Operator/Get", "AgentLink/Session", "Artifacts/Push", "Enrolment/Redeem"], ids=lambda m: m.split("/")[0]
)
def test_a14_four_gigabytes_declared_and_ten_bytes_sent_cost_nothing(
    coordinator: CoordinatorServer, admin: Enrolled, tmp_path: Path, method: str
) -> None:
    before = resident(coordinator)
    context = ssl.create_default_context(cadata=admin.ca_pem.decode())
    enrols = method.startswith("Enrolment")
    if not enrols:
        caller = coordinator.certificate(Role.AGENT, "liar") if method.startswith("AgentLink") else admin
        (tmp_path / "cert.pem").write_bytes(caller.certificate_pem)
        (tmp_path / "key.pem").write_bytes(caller.key_pem)
        context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    address = coordinator.enrol if enrols else coordinator.link
    server = dns_of(REGION, Role.COORDINATOR, "coordinator")
    answer = declare_4_gib(address, f"/shoal.v1.{method}", context, server)
    assert b"grpc-status" in answer
    assert b"larger than max" in answer
    grown = resident(coordinator) - before
    assert grown < 32 * 2**20
    assert operator(coordinator.link, admin).WhoAmI(api.WhoAmIRequest(), timeout=5).name == "admin"
    record("A14", "P", 1, listener=method, declared="4 GiB", grown_mib=grown // 2**20)


def test_a14_at_the_enrolment_port_one_byte_more_is_too_large(coordinator: CoordinatorServer, admin: Enrolled) -> None:
    """Before anybody is known: what fits is read and refused for what it says, what is over is not read."""
    before = resident(coordinator)
    server = dns_of(REGION, Role.COORDINATOR, "coordinator")
    options = channel_options(UNLIMITED, server_name=server)

    def open_channel() -> grpc.Channel:
        return grpc.secure_channel(coordinator.enrol, grpc.ssl_channel_credentials(admin.ca_pem), options)

    with open_channel() as opened:
        stub = enrolment_pb2_grpc.EnrolmentStub(opened)

        def request_of_size(total: int) -> enrolment_pb2.RedeemRequest:
            request = enrolment_pb2.RedeemRequest(token="t", name="edge-9", csr_pem="x" * 1000)
            request.csr_pem += "x" * (total - request.ByteSize())
            return enrolment_pb2.RedeemRequest(
                token="t", name="edge-9", csr_pem=request.csr_pem[: len(request.csr_pem) - (request.ByteSize() - total)]
            )

        fits, over = request_of_size(ENROL_BYTES), request_of_size(ENROL_BYTES + 1)
        assert (fits.ByteSize(), over.ByteSize()) == (ENROL_BYTES, ENROL_BYTES + 1)
        assert code_beyond_overload(partial(stub.Redeem, fits, timeout=20)) is Code.TOKEN_INVALID
        assert refusal(lambda: stub.Redeem(over, timeout=20)).code is Code.TOO_LARGE
    bomb = enrolment_pb2.RedeemRequest(token="t", name="edge-9", csr_pem="x" * (64 * 2**20))
    for _ in range(3):
        with open_channel() as opened:  # of its own: the port ends a connection after ten seconds
            redeem_bomb = partial(enrolment_pb2_grpc.EnrolmentStub(opened).Redeem, bomb)
            assert refusal(partial(redeem_bomb, timeout=60, compression=grpc.Compression.Gzip)).code is Code.TOO_LARGE
    grown = resident(coordinator) - before
    assert grown < 32 * 2**20
    record("A14", "P", 5, listener="enrolment", cap_bytes=ENROL_BYTES, grown_mib=grown // 2**20)


def test_a14_more_than_was_announced_is_not_kept(coordinator: CoordinatorServer, admin: Enrolled) -> None:
    """A push of one byte more than its head says, and one whose chunk is larger than a message may be."""
    content = b"x" * 1000
    with channel(coordinator.link, admin, max_bytes=UNLIMITED) as opened:
        stub = artifacts_pb2_grpc.ArtifactsStub(opened)
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        head = artifacts_pb2.PushChunk(head=artifacts_pb2.PushHead(name="m", size=len(content) - 1, digest=digest))
        longer = artifacts_pb2.PushChunk(data=content)
        assert refusal(lambda: stub.Push(iter([head, longer]), timeout=20)).code is Code.MODEL_TOO_LARGE
        whole = artifacts_pb2.PushChunk(head=artifacts_pb2.PushHead(name="m", size=2 * LINK_BYTES, digest=digest))
        chunk = artifacts_pb2.PushChunk(data=b"x" * LINK_BYTES)
        assert chunk.ByteSize() > LINK_BYTES
        assert refusal(lambda: stub.Push(iter([whole, chunk]), timeout=20)).code is Code.TOO_LARGE
        assert not list(stub.List(artifacts_pb2.ListModelsRequest(), timeout=5).models)
    assert not [path for path in (coordinator.data / "models").rglob("*") if path.is_file()]
    record("A14", "P", 2, listener="Artifacts/Push", kept=0)


# I11


def test_a34_a_refused_model_leaves_one_counter_and_one_audit_entry(
    coordinator: CoordinatorServer, admin: Enrolled, tmp_path: Path
) -> None:
    """Ten pushes of a model with foreign operators, over the wire: nothing stays, nobody is told more than why."""
    node = helper.make_node("RunShell", ["x"], ["y"], domain="com.evil")
    made = synthetic.model([node], [synthetic.tensor("x", [1])], [synthetic.tensor("y", [1])], domains={"com.evil": 1})
    content, tries = made.SerializeToString(), 10
    head = artifacts_pb2.PushHead(name="evil", size=len(content), digest=synthetic.digest_of(content))
    pusher = coordinator.certificate(Role.OPERATOR, "pusher")
    entries = audit_entries(coordinator, admin)
    stored = stored_keys(coordinator, admin)
    with channel(coordinator.link, pusher) as opened:
        stub = artifacts_pb2_grpc.ArtifactsStub(opened)
        for _ in range(tries):
            parts = [artifacts_pb2.PushChunk(head=head), artifacts_pb2.PushChunk(data=content)]
            why = refusal(partial(stub.Push, iter(parts), timeout=30))
            assert why.code is Code.CUSTOM_OP_DENIED
            told = f"{why.found} {why.asked} {why.remedy}"
            assert not any(secret in told for secret in (str(coordinator.folder), "/tmp", "admin", "127.0.0.1"))
    assert audit_entries(coordinator, admin) - entries == 1
    counted = f'shoal_coordinator_calls_refused_total{{code="{Code.CUSTOM_OP_DENIED}",method="Push"}} {tries}.0'
    assert counted in scrape(coordinator, admin, tmp_path)
    assert stored_keys(coordinator, admin) == stored
    assert not [path for path in (coordinator.data / "models").rglob("*") if path.is_file()]
    record("A34", "P", tries, audit_entries=1, stored=0)


def stored_keys(coordinator: CoordinatorServer, admin: Enrolled) -> tuple[list[str], list[str]]:
    """Models and events that an operator can see."""
    events = operator(coordinator.link, admin).Events(api.EventsRequest(), timeout=10)
    with channel(coordinator.link, admin) as opened:
        listed = artifacts_pb2_grpc.ArtifactsStub(opened).List(artifacts_pb2.ListModelsRequest(), timeout=5)
    return [model.digest for model in listed.models], [event.code for event in events]


def scrape(coordinator: CoordinatorServer, admin: Enrolled, folder: Path) -> str:
    (folder / "cert.pem").write_bytes(admin.certificate_pem)
    (folder / "key.pem").write_bytes(admin.key_pem)
    context = ssl.create_default_context(cadata=admin.ca_pem.decode())
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    with urllib.request.urlopen(f"https://{coordinator.metrics}/metrics", context=context, timeout=10) as answer:
        return str(answer.read().decode())


def test_a14_a_model_that_claims_more_than_it_sends_leaves_nothing(
    coordinator: CoordinatorServer, admin: Enrolled
) -> None:
    with channel(coordinator.link, admin) as opened:
        stub = artifacts_pb2_grpc.ArtifactsStub(opened)
        digest = "sha256:" + "0" * 64
        claims = artifacts_pb2.PushChunk(head=artifacts_pb2.PushHead(name="m", size=2**42, digest=digest))
        data = artifacts_pb2.PushChunk(data=b"x" * 10)
        assert refusal(lambda: stub.Push(iter([claims, data]), timeout=20)).code in (
            Code.MODEL_TOO_LARGE,
            Code.DISK_FULL,
        )
        small = artifacts_pb2.PushChunk(head=artifacts_pb2.PushHead(name="m", size=100, digest=digest))
        assert refusal(lambda: stub.Push(iter([small, data]), timeout=20)).code is Code.MODEL_DIGEST
        assert not list(stub.List(artifacts_pb2.ListModelsRequest(), timeout=5).models)
    left = [path for path in (coordinator.data / "models").rglob("*") if path.is_file()]
    assert not left


def resident(coordinator: CoordinatorServer) -> int:
    assert coordinator.process is not None
    status = Path(f"/proc/{coordinator.process.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
