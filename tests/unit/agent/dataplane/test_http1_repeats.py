"""Heads that a client of HTTP/1.1 sends again and again."""

import asyncio
import json
from typing import Any

import pytest

from harness.fakes.inference import EchoingService
from harness.fakes.wire import Wire
from harness.wait import until
from shoal.agent.dataplane.http1 import Http1Server
from shoal.agent.dataplane.http1_heads import read_usual_head
from shoal.agent.dataplane.ingress_admission import IngressAdmission
from shoal.agent.dataplane.rest import ClientIdentity, RestMethods
from shoal.agent.dataplane.transport import InboundCall
from shoal.host.connections import Connections


class Service(EchoingService):
    """Notes what each inference says of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, float | None]] = []

    async def infer(self, call: InboundCall, request: bytes) -> bytes:
        self.seen.append((call.request_id, call.remaining_s))
        return await super().infer(call, request)


def request(number: float, *fields: str) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [number]}
    body = json.dumps({"inputs": [tensor]}).encode()
    lines = ("POST /v2/models/up/infer HTTP/1.1", "host: x", f"content-length: {len(body)}", *fields)
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode() + body


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each head that was read."""
    found: list[int] = []

    def note(content: bytearray, most: int) -> Any:
        head = read_usual_head(content, most)
        found.append(0 if head is None else head.size)
        return head

    monkeypatch.setattr("shoal.agent.dataplane.http1.read_usual_head", note)
    return found


async def answers(service: Service, *requests: bytes) -> list[float]:
    """The numbers that one connection is answered with."""
    connections, wire = Connections(1, 1), Wire()
    place = connections.add("", wire.abort)
    assert place is not None
    server = Http1Server(RestMethods(service, IngressAdmission()), connections, lambda _: ClientIdentity())
    connection = server.protocol(place)
    connection.connection_made(wire)
    found = []
    for each in requests:
        wire.sent.clear()
        connection.data_received(each[:-5])
        await asyncio.sleep(0)  # noqa: TID251 - one turn of the loop
        connection.data_received(each[-5:])
        await until(lambda: wire.sent, 5.0, "an answer")
        found.append(json.loads(wire.sent.partition(b"\r\n\r\n")[2])["outputs"][0]["data"][0])
    connection.connection_lost(None)
    await asyncio.wait(server.tasks, timeout=5.0)
    return found


async def test_a_head_that_is_the_same_is_read_once_and_its_bodies_are_their_own(reads: list[int]) -> None:
    service = Service()
    assert await answers(service, *(request(float(number)) for number in range(1, 6))) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert len(reads) == 1


async def test_only_heads_of_admitted_requests_that_take_little_memory_are_kept(reads: list[int]) -> None:
    many = [f"f{number}: 1" for number in range(200)]
    await answers(Service(), *([request(1.0, *many)] * 3))
    assert len(reads) == 3, "few bytes on the wire, and many in memory"
    reads.clear()
    connections, wire = Connections(1, 1), Wire()
    place = connections.add("", wire.abort)
    assert place is not None
    server = Http1Server(RestMethods(Service(), IngressAdmission()), connections, lambda _: ClientIdentity())
    connection = server.protocol(place)
    connection.connection_made(wire)
    for _ in range(3):
        wire.sent.clear()
        connection.data_received(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: wire.sent, 5.0, "an answer")
    connection.connection_lost(None)
    await asyncio.wait(server.tasks, timeout=5.0)
    assert len(reads) == 3, "a stranger's, who needs no credential"


async def test_what_a_head_says_of_its_own_request_counts_for_no_other(reads: list[int]) -> None:
    service = Service()
    ids = [request(1.0, f"shoal-request-id: r{number}") for number in (1, 2, 2, 1)]
    await answers(service, *ids)
    assert [name for name, _ in service.seen] == ["r1", "r2", "r2", "r1"]
    service.seen.clear()
    await answers(service, *([request(1.0, "shoal-deadline-ms: 5000")] * 3))
    assert [left is not None and 0 < left <= 5.0 for _, left in service.seen] == [True] * 3
    assert len({left for _, left in service.seen}) == 3, "a deadline counts from its own head on"
