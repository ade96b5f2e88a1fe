"""A13 to A16 and A55 on every method of every service of the control plane, generated from the descriptors.

A federation of two regions: where agents and operators call, where strangers do, where regions call each other, and the
federation's own ports. A method that no listener here has fails the test. What a front serves:
`test_every_front_method.py`.
"""

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from harness.attacks.message_fuzzer import corrupt_message, fill_message
from harness.attacks.repeated_fields import methods, repeated_fields
from harness.clients.http2 import Http2Connection, declare_4_gib
from harness.cluster.coordinator import CoordinatorServer
from harness.cluster.federation import NAME, FederationProcesses, federation_of
from harness.measure.process_usage import Usage
from harness.report import record
from shoal.coordinator.api.authorise import RULES
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.v1 import artifacts_pb2, enrolment_pb2, federation_pb2, link_pb2
from shoal.v1 import operator_pb2 as api
from shoal.wire.grpcio_status import refusal_of
from shoal.wire.identity import dns_of
from shoal.wire.limits import ENROL_BYTES, LINK_BYTES, channel_options
from shoal.wire.member_files import Enrolled

pytestmark = pytest.mark.alone

HOME, AWAY = "eu", "us"
MODULES = (link_pb2, artifacts_pb2, api, enrolment_pb2, federation_pb2)
METHODS = {
    method: kind
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method, kind in methods(service)
}
IN_TIME_S = 15.0
"""Ten seconds, and some for a machine that is busy."""
STRANGER_S = 24.0
OTHERS_S = 5.0
ANSWERED_S = 30.0
FUZZED = 12
"""Messages of each method; `tests/fuzz` has its hundred thousand of each kind of message."""
LOOP_S = 0.5
"""What A55 allows one request of any event loop."""
UNKNOWN = b"\x9a\x7d\x00"
"""Field 2003, empty, which nobody declared."""
ACT_WITHOUT_ARGUMENTS = {
    "/shoal.v1.Operator/LeaveFederation",
    "/shoal.v1.Operator/RotateAuthority",
    "/shoal.v1.Federation/Leave",
}
"""Whatever message they get, if it is one: they are sent what cannot be."""


@dataclass(frozen=True, slots=True)
class Caller:
    """One identity at one listener. server: the DNS name of its certificate. shown: none for a stranger."""

    address: str
    server: str
    ca: bytes
    shown: Enrolled | None
    most: int = LINK_BYTES

    def channel(self) -> grpc.aio.Channel:
        key, certificate = (self.shown.key_pem, self.shown.certificate_pem) if self.shown else (None, None)
        options = channel_options(-1, server_name=self.server)
        return grpc.aio.secure_channel(self.address, grpc.ssl_channel_credentials(self.ca, key, certificate), options)

    def context(self, folder: Path) -> ssl.SSLContext:
        found = ssl.create_default_context(cadata=self.ca.decode())
        if self.shown is not None:
            files = replace(self.shown, ca_pem=self.ca)
            files.write(folder)
            found.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        return found


@pytest.fixture(scope="module")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FederationProcesses]:
    """Two regions of one federation; no process may end before its time."""
    with federation_of(tmp_path_factory.mktemp("regions"), HOME, AWAY) as found:
        for name in (HOME, AWAY):
            found.join(name)
        found.wait_all_known()
        yield found
        for each in (found.federation, *found.regions.values()):
            assert each.process is not None
            assert each.process.poll() is None, "it must outlive every attack"


@pytest.fixture(scope="module")
def callers(regions: FederationProcesses) -> dict[str, Caller]:
    """By method, somebody who may call it where it is served."""
    home, away, federation = regions.regions[HOME], regions.regions[AWAY], regions.federation
    view = regions.federation_view(AWAY)
    assert view is not None
    peers = next(member.address for member in view.members if member.region == HOME)
    identities: dict[tuple[str, Role], Enrolled] = {}

    def certificate_of(process: CoordinatorServer, role: Role) -> Enrolled:
        key = (process.region, role)
        if key not in identities:
            name = "coordinator" if role is Role.COORDINATOR else "caller"
            identities[key] = process.certificate(role, name)
        return identities[key]

    def caller(method: str) -> Caller:
        service = method.split("/")[1].rpartition(".")[2]
        match service:
            case "Enrolment" | "Joining":
                process = home if service == "Enrolment" else federation
                return Caller(process.enrol, *server_of(process), None, ENROL_BYTES)
            case "Peer":
                return Caller(peers, *server_of(home), certificate_of(away, Role.COORDINATOR))
            case "Federation":
                return Caller(federation.link, *server_of(federation), certificate_of(home, Role.COORDINATOR))
            case "AgentLink" | "Artifacts" | "Operator":
                return Caller(home.link, *server_of(home), certificate_of(home, sorted(RULES[method])[0]))
            case other:
                pytest.fail(f"service {other} is called nowhere here")

    def server_of(process: CoordinatorServer) -> tuple[str, bytes]:
        role, name = (Role.FEDERATION, "federation") if process is federation else (Role.COORDINATOR, "coordinator")
        return dns_of(process.region, role, name), certificate_of(process, Role.VIEWER).ca_pem

    return {method: caller(method) for method in METHODS}


async def code_of(
    channel: grpc.aio.Channel, method: str, message: bytes, *, open_after_s: float = ANSWERED_S, **how: Any
) -> str:
    """What one message comes to: a code, `taken`, or `open` where the answer goes on after so long."""
    call = channel.unary_stream(method, None, None)(message, timeout=2 * ANSWERED_S, **how)
    try:
        async with asyncio.timeout(open_after_s):
            async for _ in call:
                pass
        return "taken"
    except TimeoutError:
        call.cancel()
        return "open"
    except grpc.aio.AioRpcError as error:
        return str(refusal_of(error).code)


def methods_by_caller(callers: dict[str, Caller]) -> dict[Caller, list[str]]:
    found = dict[Caller, list[str]]()
    for method, caller in callers.items():
        found.setdefault(caller, []).append(method)
    return found


class Others:
    """An operator of a region and one of the federation, who ask all the while. Everybody else's calls are theirs."""

    def __init__(self, regions: FederationProcesses) -> None:
        self._stubs = [regions.operator(HOME), regions.operator(NAME)]
        self.calls, self.longest_s = 0, 0.0

    async def __aenter__(self) -> "Others":
        self._asking = [asyncio.create_task(self._ask(stub)) for stub in self._stubs]
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self._asking:
            each.cancel()
        for found in await asyncio.gather(*self._asking, return_exceptions=True):
            assert isinstance(found, asyncio.CancelledError), found
        assert self.calls > 10
        assert self.longest_s < OTHERS_S

    async def _ask(self, stub: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.to_thread(partial(stub.WhoAmI, api.WhoAmIRequest(), timeout=30))
            self.calls, self.longest_s = self.calls + 1, max(self.longest_s, loop.time() - began)

    @property
    def figures(self) -> dict[str, Any]:
        return {"others_calls": self.calls, "others_longest_ms": round(self.longest_s * 1e3)}


async def test_a13_fuzzed_requests_on_every_method(regions: FederationProcesses, callers: dict[str, Caller]) -> None:
    """Every answer has a code, none is an error of ours, and nobody else waits."""
    rng = np.random.default_rng(13)
    seen: dict[str, int] = {}
    async with Others(regions) as others:
        for caller, mine in methods_by_caller(callers).items():
            async with caller.channel() as channel:
                for method in mine:
                    sent = [
                        corrupt_message(fill_message(METHODS[method], rng).SerializeToString(), rng)
                        for _ in range(FUZZED)
                    ]
                    if method in ACT_WITHOUT_ARGUMENTS:
                        sent = [b"\x07" + each for each in sent]
                    codes = await asyncio.gather(*(code_of(channel, method, each, open_after_s=2.0) for each in sent))
                    unwanted = {Code.INTERNAL, Code.COORDINATOR_UNREACHABLE, Code.UNAUTHENTICATED, Code.ROLE_DENIED}
                    assert unwanted.isdisjoint(codes), (method, codes)
                    assert set(codes) <= {*Code, "taken", "open"}, (method, codes)
                    for code in codes:
                        seen[code] = seen.get(code, 0) + 1
    record("A13", "P", sum(seen.values()), methods=len(METHODS), answers=seen, **others.figures)


async def test_a55_crowded_requests_where_regions_and_strangers_call(
    regions: FederationProcesses, callers: dict[str, Caller]
) -> None:
    """Where agents and operators call, `test_a55_fields.py` looks closer."""
    asked, longest_s = 0, 0.0
    usages = [Usage(each.process.pid) for each in (regions.federation, *regions.regions.values()) if each.process]
    async with Others(regions) as others:
        for caller, mine in methods_by_caller(callers).items():
            async with caller.channel() as channel:
                for method in mine:
                    ways = [each.message(caller.most - 1024) for each in repeated_fields(METHODS[method])]
                    for message in (*ways, UNKNOWN * (caller.most // len(UNKNOWN) - 1)):
                        before = [each.loop_s() for each in usages]
                        assert await code_of(channel, method, message) == Code.FIELD_TOO_MANY, method
                        took = [each.loop_s() - start for each, start in zip(usages, before, strict=True)]
                        assert max(took) < LOOP_S, (method, took)
                        asked, longest_s = asked + 1, max(longest_s, *took)
    record("A55", "P", asked, methods=len(METHODS), longest_loop_ms=round(longest_s * 1e3), **others.figures)


async def test_a14_a_byte_too_many_on_every_method(regions: FederationProcesses, callers: dict[str, Caller]) -> None:
    """As it is, and as what a small message expands to."""
    async with Others(regions) as others:
        for caller, mine in methods_by_caller(callers).items():
            async with caller.channel() as channel:
                for method in mine:
                    over = bytes(caller.most + 1)
                    assert await code_of(channel, method, over) == Code.TOO_LARGE, method
                    squeezed = await code_of(channel, method, over, compression=grpc.Compression.Gzip)
                    assert squeezed == Code.TOO_LARGE, method
    record("A14", "P", 2 * len(METHODS), methods=len(METHODS), **others.figures)


async def test_a14_four_gigabytes_declared_on_every_method(
    regions: FederationProcesses, callers: dict[str, Caller], tmp_path: Path
) -> None:
    async with Others(regions) as others:
        for number, (caller, mine) in enumerate(methods_by_caller(callers).items()):
            folder = tmp_path / str(number)
            context = caller.context(folder)
            for method in mine:
                answer = await asyncio.to_thread(declare_4_gib, caller.address, method, context, caller.server)
                assert b"larger than max" in answer, method
    record("A14", "P", len(METHODS), methods=len(METHODS), declared="4 GiB", **others.figures)


@pytest.mark.timeout(240)
async def test_a15_a_message_that_never_ends_on_every_method(
    regions: FederationProcesses, callers: dict[str, Caller], tmp_path: Path
) -> None:
    """All at once, since each has ten seconds. A stranger is told nothing: its connection ends."""
    loop = asyncio.get_running_loop()
    took: dict[str, float] = {}

    async def drip(caller: Caller, mine: list[str], folder: Path) -> None:
        connection = await Http2Connection.connect(caller.address, caller.context(folder), caller.server)
        streams = dict(zip(range(1, 2 * len(mine), 2), mine, strict=True))
        began = loop.time()
        for stream, method in streams.items():
            connection.open_stream(stream, method)
            connection.send_message(stream, b"", of=100)
        while not all(connection.is_ended(stream) for stream in streams):
            assert loop.time() < began + 2 * STRANGER_S, [
                streams[each] for each in streams if not connection.is_ended(each)
            ]
            for stream in streams:
                if not connection.is_ended(stream):
                    connection.send_data(stream, b"x")
            await asyncio.sleep(0.5)  # noqa: TID251 - the pace of the drip
        for stream, method in streams.items():
            assert caller.shown is None or b"TOO_SLOW" in connection.header_blocks(stream), method
        took["stranger" if caller.shown is None else mine[0]] = loop.time() - began
        await connection.close()

    async with Others(regions) as others, asyncio.TaskGroup() as group:
        for number, (caller, mine) in enumerate(methods_by_caller(callers).items()):
            group.create_task(drip(caller, mine, tmp_path / str(number)))
    assert took.pop("stranger") < STRANGER_S
    assert max(took.values()) < IN_TIME_S, took
    record("A15", "P", len(METHODS), methods=len(METHODS), longest_s=round(max(took.values()), 1), **others.figures)


async def test_a16_a_connection_for_each_call_of_every_method(
    regions: FederationProcesses, callers: dict[str, Caller]
) -> None:
    """Four for each method, each with half a message, and given up."""
    connections = 0
    async with Others(regions) as others:
        for method, caller in callers.items():
            for _ in range(4):
                async with caller.channel() as channel:
                    call = channel.unary_unary(method, None, None)(b"\xff", timeout=10)
                    with suppress(grpc.aio.AioRpcError):
                        await call
                connections += 1
    record("A16", "P", connections, methods=len(METHODS), **others.figures)
