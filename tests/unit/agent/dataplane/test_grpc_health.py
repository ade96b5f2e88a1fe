"""grpc.health.v1: what is served, what is not, and each change of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from harness.wait import until
from shoal.agent.dataplane import grpc_health
from shoal.agent.dataplane.grpc_health import Response, check, watch
from shoal.agent.dataplane.transport import InboundCall, InferenceService
from shoal.types.codes import Code, ShoalError, refuse

INFERENCE = "inference.GRPCInferenceService"
NAMES = ["", INFERENCE, "grpc.health.v1.Health"]


class Front:
    """As much of a service as is asked."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.is_ready = is_ready
        self.denied: Code | None = None
        self.change = asyncio.Event()
        self.looks = 0

    def server_ready(self, _call: InboundCall) -> bool:
        self.looks += 1
        if self.denied is not None:
            raise refuse(self.denied)
        return self.is_ready

    def become(self, *, is_ready: bool) -> None:
        self.is_ready = is_ready
        self.announce()

    def announce(self) -> None:
        past, self.change = self.change, asyncio.Event()
        past.set()


def service(front: Front) -> InferenceService:
    return cast("InferenceService", front)


@pytest.mark.parametrize(("is_ready", "status"), [(True, Response.SERVING), (False, Response.NOT_SERVING)])
@pytest.mark.parametrize("name", NAMES)
def test_a_front_serves_when_it_is_ready(name: str, is_ready: bool, status: int) -> None:
    assert check(service(Front(is_ready=is_ready)), InboundCall(), name).status == status


@pytest.mark.parametrize("name", ["nothing", "inference", "x" * 2000])
def test_what_is_not_served_is_not_found(name: str) -> None:
    with pytest.raises(ShoalError) as refused:
        check(service(Front()), InboundCall(), name)
    assert refused.value.code is Code.NOT_FOUND


def test_who_may_not_ask_is_refused_whatever_it_asks_for() -> None:
    front = Front()
    front.denied = Code.ROLE_DENIED
    with pytest.raises(ShoalError) as refused:
        check(service(front), InboundCall(), "nothing")
    assert refused.value.code is Code.ROLE_DENIED


@asynccontextmanager
async def watching(front: Front, name: str = "") -> AsyncIterator[tuple[list[int], "asyncio.Task[None]"]]:
    """The statuses that came."""
    seen: list[int] = []

    async def send(response: Response) -> None:
        seen.append(response.status)

    task = asyncio.create_task(watch(service(front), InboundCall(), name, send))
    yield seen, task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("name", NAMES)
async def test_a_watch_is_told_each_change_once(name: str) -> None:
    front = Front()
    async with watching(front, name) as (seen, _):
        await until(lambda: seen == [Response.SERVING], 5.0, "the status now")
        looks = front.looks
        front.announce()
        await until(lambda: front.looks == looks + 1, 5.0, "a look at what changed")
        front.become(is_ready=False)
        await until(lambda: seen == [Response.SERVING, Response.NOT_SERVING], 5.0, "the change, and nothing else")
        front.become(is_ready=True)
        await until(lambda: len(seen) == 3, 5.0, "the change back")


async def test_a_change_during_a_send_is_not_missed() -> None:
    front, seen = Front(), list[int]()

    async def send(response: Response) -> None:
        seen.append(response.status)
        if len(seen) == 1:
            front.become(is_ready=False)

    task = asyncio.create_task(watch(service(front), InboundCall(), "", send))
    await until(lambda: seen == [Response.SERVING, Response.NOT_SERVING], 5.0, "both")
    task.cancel()


async def test_a_watch_of_what_is_not_served_stays_open_and_says_so() -> None:
    front = Front()
    async with watching(front, "nothing") as (seen, task):
        await until(lambda: seen == [Response.SERVICE_UNKNOWN], 5.0, "the status")
        front.become(is_ready=False)
        await until(lambda: front.looks == 2, 5.0, "a look")
        assert not task.done()
    assert seen == [Response.SERVICE_UNKNOWN]


async def test_a60_a_watch_ends_with_its_callers_rights() -> None:
    front = Front()
    async with watching(front) as (seen, task):
        await until(lambda: bool(seen), 5.0, "the status now")
        front.denied = Code.CERT_REVOKED
        front.announce()
        await until(task.done, 1.0, "its end")
        with pytest.raises(ShoalError) as ended:
            task.result()
        assert ended.value.code is Code.CERT_REVOKED


async def test_a_watch_notices_what_no_event_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a certificate has expired."""
    monkeypatch.setattr(grpc_health, "RECHECK_S", 0.01)
    front = Front()
    async with watching(front) as (seen, task):
        await until(lambda: bool(seen), 5.0, "the status now")
        front.denied = Code.CERT_EXPIRED
        await until(task.done, 5.0, "its end")
        with pytest.raises(ShoalError):
            task.result()
