"""What a node keeps for its region while there is no link, and what of it is sent again."""

import asyncio
from typing import cast

import pytest

from harness.fakes.clock import ManualClock
from harness.fakes.log import RecordingLog
from shoal.agent.ports import LinkSession
from shoal.agent.supervisor.outbox import MAX_QUERIES, Outbox
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.link import FromAgent, LogLines, NodeEvents


class Session:
    """Keeps what it sends, or refuses it with `code`."""

    def __init__(self, code: Code | None = None) -> None:
        self.code = code
        self.sent: list[FromAgent] = []

    async def send(self, message: FromAgent) -> None:
        if self.code is not None:
            raise ShoalError(Refusal(self.code))
        self.sent.append(message)


class Node:
    def __init__(self) -> None:
        self.log = RecordingLog()
        self.answer_count = 0
        self.tasks: list[asyncio.Task[None]] = []
        self.outbox = Outbox(ManualClock(), self.log, self.spawn, self.on_answer)

    def spawn(self, work: object, name: str) -> "asyncio.Task[None]":
        assert asyncio.iscoroutine(work)
        self.tasks.append(asyncio.create_task(work, name=name))
        return self.tasks[-1]

    def on_answer(self) -> None:
        self.answer_count += 1

    async def send(self, code: Code | None = None) -> list[FromAgent]:
        session = Session(code)
        await self.outbox.send(cast(LinkSession, session))
        return session.sent

    async def subjects(self) -> list[str]:
        return [event.subject for sent in await self.send() if isinstance(sent, NodeEvents) for event in sent.events]


async def test_an_event_that_a_lost_link_did_not_take_is_sent_again_once() -> None:
    node = Node()
    node.outbox.report_event(Code.DISK_FULL, "cache", "no space")
    node.outbox.report_event(Code.DISK_FULL, "cache", "no space still")
    node.outbox.report_event(Code.DISK_FULL, "journal", "no space")
    with pytest.raises(ShoalError):
        await node.send(Code.COORDINATOR_UNREACHABLE)
    assert await node.subjects() == ["cache", "journal"]
    assert await node.subjects() == []
    assert node.log.events == ["node_event_reported"] * 3


async def test_events_that_no_session_takes_are_dropped() -> None:
    node = Node()
    node.outbox.report_event(Code.DISK_FULL, "cache", "no space")
    assert await node.send(Code.TOO_LARGE) == []
    assert node.log.events[-1] == "events_dropped"
    assert await node.subjects() == []


async def test_a_query_beyond_the_limit_gets_no_answer() -> None:
    node = Node()
    is_read = asyncio.Event()

    async def read() -> LogLines:
        await is_read.wait()
        return LogLines(7, ("line",), "", False)

    for _ in range(MAX_QUERIES + 1):
        node.outbox.answer(read)
    is_read.set()
    await asyncio.gather(*node.tasks)
    assert node.answer_count == len(node.tasks) == MAX_QUERIES
    assert await node.send() == [LogLines(7, ("line",), "", False)] * MAX_QUERIES
    node.outbox.answer(read)  # there is room again
    await asyncio.gather(*node.tasks)
    assert len(await node.send()) == 1


async def test_a_query_that_cannot_be_read_is_not_answered() -> None:
    node = Node()

    async def read() -> LogLines:
        raise ShoalError(Refusal(Code.DISK_FULL))

    node.outbox.answer(read)
    await asyncio.gather(*node.tasks)
    assert node.log.events == ["query_failed"]
    assert await node.send() == []
