"""The part of three coordinators' operator API that shows who leads, scripted: real gRPC on loopback, no store."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import grpc

from harness.crypto.pki import Authority
from harness.ports import free_ports
from shoal.types.codes import Code, Refusal
from shoal.types.device import Role
from shoal.v1 import operator_pb2, operator_pb2_grpc
from shoal.wire.grpcio_status import status_code
from shoal.wire.status import trailers

NOT_LEADER = Refusal(Code.NOT_LEADER, "this coordinator follows", "the leader", "call it there")


@dataclass
class ApiStub(operator_pb2_grpc.OperatorServicer):
    """One coordinator's operator API, scripted."""

    # host:port that it serves.
    address: str
    # The gRPC server.
    server: Any
    # Addresses of all coordinators.
    coordinators: list[str]
    # Address that it names as leader; its own if it leads, empty if it knows none.
    leader: str = ""
    # How many more writes take effect, but whose answer is lost.
    lost_writes: int = 0
    # Calls are answered once this is set.
    may_answer: Event = field(default_factory=Event)
    # Leader term that it reports.
    term: int = 1
    # Calls so far.
    who_am_i_calls: int = 0
    # Name in every CreateToken that reached it as leader.
    created_tokens: list[str] = field(default_factory=list)

    def WhoAmI(self, request: operator_pb2.WhoAmIRequest, context: Any) -> operator_pb2.WhoAmIReply:
        self.who_am_i_calls += 1
        leads = self.leader == self.address
        leader = "" if leads else self.leader
        return operator_pb2.WhoAmIReply(
            leader=leader, follows=not leads, coordinators=self.coordinators, term=self.term
        )

    def Get(self, request: operator_pb2.GetRequest, context: Any) -> operator_pb2.GetReply:
        self._check(context)
        return operator_pb2.GetReply(regions=[operator_pb2.RegionView(name="eu", leader=self.address)])

    def CreateToken(self, request: operator_pb2.CreateTokenRequest, context: Any) -> operator_pb2.CreateTokenReply:
        self._check(context)
        self.created_tokens.append(request.name)
        if self.lost_writes:
            self.lost_writes -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        return operator_pb2.CreateTokenReply(id=self.address)

    def Events(self, request: operator_pb2.EventsRequest, context: Any) -> Iterator[operator_pb2.Event]:
        for sequence in range(request.after + 1, request.after + 3):
            yield operator_pb2.Event(sequence=sequence, subject=self.address)
        if self.lost_writes:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    def _check(self, context: Any) -> None:
        self.may_answer.wait()
        if self.leader != self.address:
            context.set_trailing_metadata(trailers(NOT_LEADER))
            context.abort(status_code(NOT_LEADER.code), str(NOT_LEADER))


@contextmanager
def api_stubs(authority: Authority, operator: Path) -> Iterator[list[ApiStub]]:
    """Three stubs, the second of which leads. operator: the folder that gets an operator's files."""
    certificate, key, ca = authority.issue(Role.COORDINATOR, "coordinator").read()
    operator.mkdir()
    for name, content in zip(
        ("cert.pem", "key.pem", "ca.pem"), authority.issue(Role.OPERATOR, "ann").read(), strict=True
    ):
        (operator / name).write_bytes(content)
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    found = []
    for address in addresses:
        server = grpc.server(ThreadPoolExecutor(4))
        one = ApiStub(address, server, addresses, leader=addresses[1])  # type: ignore[abstract]  # no more is called
        one.may_answer.set()
        operator_pb2_grpc.add_OperatorServicer_to_server(one, server)
        credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
        server.add_secure_port(address, credentials)
        server.start()
        found.append(one)
    yield found
    for one in found:
        one.may_answer.set()
        one.server.stop(None).wait()
