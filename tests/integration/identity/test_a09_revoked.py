"""A09: a revoked certificate, on open calls and on new ones, at every port of a coordinator.

What a region of real nodes makes of it under load is `test_under_load.py`.
"""

import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest

from harness.cluster.agents import api
from harness.cluster.coordinator import CoordinatorServer, channel
from harness.report import record
from shoal.coordinator.clock import CoordinatorClock
from shoal.types.codes import Code, ShoalError
from shoal.v1 import operator_pb2, operator_pb2_grpc
from shoal.wire.enrol import redeem, renew
from shoal.wire.grpcio_status import refusal_of
from shoal.wire.member_files import Enrolled


def enrol_operator(coordinator: CoordinatorServer, name: str, folder: Path) -> Enrolled:
    with api(coordinator) as operator:
        token = operator.create_token("operator", name, 60.0).token
    found = redeem(coordinator.enrol, token, name)
    found.write(folder)
    return found


def test_a09_what_is_open_ends_within_a_second_and_nothing_opens_again(
    coordinator: CoordinatorServer, tmp_path: Path
) -> None:
    ann, bob = (enrol_operator(coordinator, name, tmp_path / name) for name in ("ann", "bob"))
    clock, ended = CoordinatorClock(), threading.Event()
    told: list[tuple[float, Code]] = []
    with channel(coordinator.link, ann) as opened, channel(coordinator.link, bob) as others:
        stub = operator_pb2_grpc.OperatorStub(opened)
        streams: list[Any] = [
            operator_pb2_grpc.OperatorStub(each).Events(operator_pb2.EventsRequest(follow=True))
            for each in (opened, others)
        ]
        for stream in streams:
            next(stream)

        def follow() -> None:
            try:
                for _ in streams[0]:
                    pass
            except grpc.RpcError as error:
                told.append((clock.wall(), refusal_of(error).code))
            ended.set()

        follower = threading.Thread(target=follow)
        follower.start()
        with api(coordinator) as operator:
            asked_at = clock.wall()
            serials = operator.revoke("ann", role="operator", reason="left").serials
            assert len(serials) == 1
            assert ended.wait(5.0)
            ((closed_at, code),) = told
            assert code is Code.CERT_REVOKED
            assert closed_at - asked_at <= 1.0
            operator.create_token("agent", "later", 60.0)
        follower.join()
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as error:
                stub.WhoAmI(operator_pb2.WhoAmIRequest(), timeout=5)
            assert refusal_of(error.value).code is Code.CERT_REVOKED
            assert refusal_of(error.value).remedy
        said = operator_pb2_grpc.OperatorStub(others).WhoAmI(operator_pb2.WhoAmIRequest(), timeout=5)
        assert said.name == "bob", "nobody else is touched"
        streams[1].cancel()
    context = ssl.create_default_context(cadata=ann.ca_pem.decode())
    context.load_cert_chain(tmp_path / "ann" / "cert.pem", tmp_path / "ann" / "key.pem")
    with pytest.raises(urllib.error.HTTPError) as page:
        urllib.request.urlopen(f"https://{coordinator.metrics}/metrics", context=context, timeout=10)
    assert Code.CERT_REVOKED in page.value.read().decode()
    with pytest.raises(ShoalError) as refused:
        renew(coordinator.enrol, tmp_path / "ann")
    assert refused.value.code is Code.RENEW_DENIED
    record("A09", "P", 1, role="operator", closed_after_s=round(closed_at - asked_at, 3))
    assert coordinator.end() == 0
    coordinator.start()
    with channel(coordinator.link, ann) as opened, pytest.raises(grpc.RpcError) as error:
        operator_pb2_grpc.OperatorStub(opened).WhoAmI(operator_pb2.WhoAmIRequest(), timeout=5)
    assert refusal_of(error.value).code is Code.CERT_REVOKED, "nor after a restart"
