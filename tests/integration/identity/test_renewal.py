"""A certificate that ended, or is about to: rows F29 and A12, with real agents and a real coordinator."""

import json
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from harness.cluster.agents import AgentProcess, api
from harness.cluster.coordinator import REGION, CoordinatorServer, channel
from harness.report import record
from harness.wait import wait_until
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.identity.authority import FileAuthority
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall
from shoal.v1 import enrolment_pb2, enrolment_pb2_grpc, operator_pb2, operator_pb2_grpc
from shoal.wire.certificates import identity_of_pem
from shoal.wire.enrol import is_matching_pair, new_key, redeem, renew, request_pem
from shoal.wire.grpcio_status import refusal_of
from shoal.wire.identity import dns_of
from shoal.wire.limits import ENROL_BYTES
from shoal.wire.member_files import Enrolled, recover_write
from shoal.wire.signing import sign
from shoal.wire.tls_ignoring_dates import channel_ignoring_dates

DAY_S = 86400.0


def issue_ending(
    coordinator: CoordinatorServer, folder: Path, name: str, *, ago_s: float, role: Role = Role.AGENT
) -> Enrolled:
    """Files in `folder` of a certificate that ended `ago_s` ago (negative: that is good so much longer)."""
    wall = CoordinatorClock().wall()
    issued = coordinator.certificate(role, name, valid_s=60.0, wall=Wall(wall - ago_s - 60.0))
    issued.write(folder)
    return issued


def renewal_denial(ask: Callable[[], object]) -> ShoalError:
    with pytest.raises(ShoalError) as error:
        ask()
    assert error.value.code is Code.RENEW_DENIED, str(error.value)
    return error.value


# F29


@pytest.mark.alone
@pytest.mark.parametrize("days", [0.0, 30.0])
def test_f29_a_node_whose_certificate_ended_while_it_was_away_comes_back_by_itself(
    coordinator: CoordinatorServer, tmp_path: Path, days: float
) -> None:
    """Its files are those of somebody who was cut off for so long; nobody touches the device."""
    member = AgentProcess(coordinator, tmp_path / "gw", f"gw-{days:.0f}")
    member.write_membership()
    old = issue_ending(coordinator, member.identity, member.name, ago_s=days * DAY_S + 60.0, role=Role.GATEWAY)
    member.start()
    try:
        booted = member.wait_logged("agent_started")["timestamp"]
        up = member.wait_logged("session_opened")["timestamp"]
        fresh = (member.identity / "cert.pem").read_bytes()
        assert identity_of_pem(fresh).serial != identity_of_pem(old.certificate_pem).serial
        assert is_matching_pair(fresh, (member.identity / "key.pem").read_bytes())
        took_s = _seconds(up) - _seconds(booted)
        assert took_s <= 5.0
        record("F29", "P", 1, days_away=days, back_after_s=round(took_s, 2), hands_on_the_device=0)
    finally:
        member.end()


def test_a_running_agent_renews_at_two_thirds_and_its_listeners_show_the_new_certificate(tmp_path: Path) -> None:
    """Certificates of nine seconds: two renewals, no restart of anything, and the link is there again at once."""
    region = CoordinatorServer(tmp_path / "c")
    (tmp_path / "c").mkdir()
    region.start(flags=("--node-lifetime", "9"))
    member = AgentProcess(region, tmp_path / "gw", "gw")
    try:
        assert member.join().returncode == 0
        member.start()
        member.wait_logged("certificate_renewed", 2)
        member.wait_logged("session_opened", 3)

        def shows_new_serial() -> bool:
            serial = identity_of_pem((member.identity / "cert.pem").read_bytes()).serial
            with api(region) as operator:
                node = operator.get("nodes", "gw").nodes[0].node
            host, _, port = node.data_address.rpartition(":")
            pem = ssl.get_server_certificate((host, int(port)))
            return identity_of_pem(pem.encode()).serial == serial

        wait_until(shows_new_serial, 10.0, "the front to show the new certificate")
        assert len(member.log_lines("agent_started")) == 1
        assert not member.log_lines("front_restarted")
    finally:
        member.end()
        region.end()


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


def _key(enrolled: Enrolled) -> EllipticCurvePrivateKey:
    key = load_pem_private_key(enrolled.key_pem, password=None)
    assert isinstance(key, EllipticCurvePrivateKey)
    return key


# A12


def test_a12_what_may_renew_does_and_its_old_certificate_still_may(
    coordinator: CoordinatorServer, tmp_path: Path
) -> None:
    """A reply that was lost must not lock anybody out."""
    folder = tmp_path / "n"
    with api(coordinator) as operator:
        token = operator.create_token("agent", "lost-reply", 60.0).token
    redeem(coordinator.enrol, token, "lost-reply").write(folder)
    first, second = renew(coordinator.enrol, folder), renew(coordinator.enrol, folder)
    assert identity_of_pem(first.certificate_pem).uri == f"shoal://{REGION}/agent/lost-reply"
    assert len({identity_of_pem(each.certificate_pem).serial for each in (first, second)}) == 2


def test_a12_past_its_grace(coordinator: CoordinatorServer, tmp_path: Path) -> None:
    issue_ending(coordinator, tmp_path / "late", "late", ago_s=91 * DAY_S)
    renewal_denial(lambda: renew(coordinator.enrol, tmp_path / "late"))
    issue_ending(coordinator, tmp_path / "in-time", "in-time", ago_s=89 * DAY_S)
    assert identity_of_pem(renew(coordinator.enrol, tmp_path / "in-time").certificate_pem).name == "in-time"


def test_a12_after_revocation(coordinator: CoordinatorServer, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    with api(coordinator) as operator:
        redeem(coordinator.enrol, operator.create_token("agent", "gone", 60.0).token, "gone").write(folder)
        renew(coordinator.enrol, folder).write(folder)
        assert len(operator.revoke("gone", reason="a test").serials) == 2, "the one before it could be shown as well"
        renewal_denial(lambda: renew(coordinator.enrol, folder))
        again = redeem(coordinator.enrol, operator.create_token("agent", "gone", 60.0).token, "gone")
        again.write(tmp_path / "again")
    assert renew(coordinator.enrol, tmp_path / "again").name == "gone", "a new token begins anew"
    renewal_denial(lambda: renew(coordinator.enrol, folder))


def test_a12_for_another_key_name_or_region_and_twice(coordinator: CoordinatorServer, tmp_path: Path) -> None:
    mine = issue_ending(coordinator, tmp_path / "mine", "mine", ago_s=60.0)
    other = issue_ending(coordinator, tmp_path / "other", "other", ago_s=60.0)
    foreign = FileAuthority.open(tmp_path / "ca", REGION, wall=CoordinatorClock().wall(), may_create=True)
    forged = foreign.enrol_self(Role.AGENT, "mine", lifetime_s=Seconds(60.0), wall=CoordinatorClock().wall())
    coordinators = coordinator.certificate(Role.COORDINATOR, "coordinator")
    csr = request_pem(new_key(), "")
    with channel_ignoring_dates(
        coordinator.enrol, mine.ca_pem, dns_of(REGION, Role.COORDINATOR, "coordinator"), ENROL_BYTES
    ) as opened:
        stub = enrolment_pb2_grpc.EnrolmentStub(opened)

        def ask(shown: Enrolled, signed: Enrolled, *, nonce: str = "", csr_pem: bytes = csr) -> Any:
            nonce = nonce or stub.Challenge(enrolment_pb2.ChallengeRequest(), timeout=5).nonce
            content = nonce.encode() + csr
            request = enrolment_pb2.RenewCertificateRequest(
                certificate_pem=shown.certificate_pem.decode(),
                csr_pem=csr_pem.decode(),
                nonce=nonce,
                signature=sign(_key(signed), REGION, identity_of_pem(shown.certificate_pem).name, "renewal", content),
            )
            return stub.Renew(request, timeout=5)

        refused: list[Callable[[], Any]] = [
            lambda: ask(mine, other),
            lambda: ask(mine, mine, csr_pem=request_pem(new_key(), "")),
            lambda: ask(forged, forged),
            lambda: ask(coordinators, coordinators),
            lambda: ask(mine, mine, nonce="0.made-up.00"),
        ]
        for each in refused:
            with pytest.raises(grpc.RpcError) as error:
                each()
            assert refusal_of(error.value).code is Code.RENEW_DENIED
        nonce = stub.Challenge(enrolment_pb2.ChallengeRequest(), timeout=5).nonce
        assert ask(mine, mine, nonce=nonce).certificate_pem
        with pytest.raises(grpc.RpcError) as error:
            ask(mine, mine, nonce=nonce)
        assert refusal_of(error.value).code is Code.RENEW_DENIED
    record("A12", "P", len(refused) + 1)


def test_a12_an_expired_certificate_may_do_nothing_else(coordinator: CoordinatorServer, tmp_path: Path) -> None:
    old = issue_ending(coordinator, tmp_path / "op", "ann", ago_s=60.0, role=Role.OPERATOR)
    with channel(coordinator.link, old) as opened, pytest.raises(grpc.RpcError):
        operator_pb2_grpc.OperatorStub(opened).WhoAmI(operator_pb2.WhoAmIRequest(), timeout=3)
    renew(coordinator.enrol, tmp_path / "op").write(tmp_path / "op")
    fresh = replace(
        old,
        certificate_pem=(tmp_path / "op" / "cert.pem").read_bytes(),
        key_pem=(tmp_path / "op" / "key.pem").read_bytes(),
    )
    with channel(coordinator.link, fresh) as opened:
        said = operator_pb2_grpc.OperatorStub(opened).WhoAmI(operator_pb2.WhoAmIRequest(), timeout=5)
    assert said.name == "ann"


def test_a12_in_a_flood(coordinator: CoordinatorServer, tmp_path: Path) -> None:
    """Whoever holds a key does not gather certificates with it; others are served meanwhile."""
    issue_ending(coordinator, tmp_path / "eager", "eager", ago_s=-30.0)
    issue_ending(coordinator, tmp_path / "calm", "calm", ago_s=-30.0)

    def one(_: int) -> Code | None:
        try:
            renew(coordinator.enrol, tmp_path / "eager")
        except ShoalError as error:
            return error.code
        return None

    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(one, range(16)))
    assert codes.count(None) <= 6
    assert set(codes) <= {None, Code.RENEW_DENIED, Code.CONFLICT}

    def is_renewed() -> bool:
        return renew(coordinator.enrol, tmp_path / "calm").name == "calm"

    wait_until(is_renewed, 10.0, "another identity of the same address to be served")
    record("A12", "P", 16, certificates=codes.count(None))


def test_a_write_of_the_files_that_was_cut_off_is_ended(coordinator: CoordinatorServer, tmp_path: Path) -> None:
    mine = issue_ending(coordinator, tmp_path / "n", "cut-off", ago_s=-30.0)
    fresh = renew(coordinator.enrol, tmp_path / "n")
    fresh.write(tmp_path / "other")
    pending = {"key.pem": fresh.key_pem, "ca.pem": fresh.ca_pem, "cert.pem": fresh.certificate_pem}
    (tmp_path / "n" / "pending.json").write_text(json.dumps({name: pem.decode() for name, pem in pending.items()}))
    (tmp_path / "n" / "key.pem").write_bytes(fresh.key_pem)
    assert not is_matching_pair(mine.certificate_pem, (tmp_path / "n" / "key.pem").read_bytes())
    recover_write(tmp_path / "n")
    assert {name: (tmp_path / "n" / name).read_bytes() for name in pending} == pending
    assert not (tmp_path / "n" / "pending.json").exists()
