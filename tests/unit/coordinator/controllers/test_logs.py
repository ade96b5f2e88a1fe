"""What nodes logged: asked over their links, waited for a bounded time, for few at once."""

import asyncio
from contextlib import aclosing

import pytest

from harness.fakes.clock import ManualClock
from shoal.coordinator.controllers.queries import logs
from shoal.coordinator.controllers.queries.logs import NodeLogs
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.link import LogLines, LogsAsked, ToAgent


class Links:
    """A node that answers at once, with lines of its own; `mute` says nothing."""

    def __init__(self) -> None:
        self.asked: list[LogsAsked] = []
        self.logs = NodeLogs(self, ManualClock())

    async def send(self, node: str, message: ToAgent) -> None:
        assert isinstance(message, LogsAsked)
        self.asked.append(message)
        number = len(self.asked)
        if node != "mute":
            self.logs.on_answer("another", LogLines(message.request, ("forged",), "", False))
            answer = LogLines(message.request, (f"line {number}\n\x1b[2J",), f"place-{number}", number % 2 == 0)
            self.logs.on_answer(node, answer)
            self.logs.on_answer(node, answer)

    async def end(self, node: str, refusal: Refusal, *, fatal: bool) -> None: ...


async def test_the_past_then_what_comes_each_from_where_the_one_before_ended() -> None:
    links = Links()
    async with aclosing(links.logs.read("a", 7, follow=True)) as pages:  # type: ignore[type-var]
        seen = [await anext(pages) for _ in range(4)]
    assert seen == [(f"line {number}\\n\\x1b[2J",) for number in range(1, 5)], "as text, and of nobody else"
    assert [each.after for each in links.asked] == ["", "place-1", "place-2", "place-3"]
    assert {each.lines for each in links.asked} == {7}
    assert [page async for page in links.logs.read("a", 10**9, follow=False)] == [("line 5\\n\\x1b[2J",)]
    assert links.asked[-1].lines == 1000


async def test_a_node_that_says_nothing_is_given_up_and_few_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links()
    monkeypatch.setattr(logs, "ANSWERS_S", 0.05)
    readers = [asyncio.ensure_future(anext(links.logs.read("mute", 1, follow=False))) for _ in range(logs.READERS)]
    await asyncio.wait(readers, timeout=0.0)
    with pytest.raises(ShoalError) as many:
        await anext(links.logs.read("a", 1, follow=False))
    assert many.value.code is Code.OVERLOADED
    done = await asyncio.gather(*readers, return_exceptions=True)
    assert {error.code for error in done if isinstance(error, ShoalError)} == {Code.DEADLINE_EXCEEDED}
    assert [page async for page in links.logs.read("a", 1, follow=False)], "and now there is room"
