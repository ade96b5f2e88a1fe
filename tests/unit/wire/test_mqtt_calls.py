"""Calls of a broker's client that is cancelled."""

import asyncio
from typing import Any

import pytest

from shoal.wire import mqtt


class Broker:
    """Stands in for aiomqtt's client: acknowledges when the test says so, and waits as that one does."""

    def __init__(self) -> None:
        self.acknowledged = asyncio.Event()

    async def subscribe(self, topics: list[Any]) -> list[int]:
        await asyncio.wait_for(self.acknowledged.wait(), 10.0)
        return [1 for _ in topics]

    async def publish(self, *_: object, **__: object) -> None:
        await asyncio.wait_for(self.acknowledged.wait(), 10.0)


@pytest.mark.parametrize(
    "call", [lambda client: mqtt.subscribe(client, ["a"]), lambda client: mqtt.publish(client, "a", b"")]
)
async def test_a_cancellation_that_comes_with_the_answer_is_not_lost(call: Any) -> None:
    broker = Broker()
    calling = asyncio.create_task(call(broker))
    await asyncio.sleep(0)  # noqa: TID251 - one turn of the loop
    await asyncio.sleep(0)  # noqa: TID251 - one turn of the loop
    broker.acknowledged.set()
    await asyncio.sleep(0)  # noqa: TID251 - the answer is there, and the caller was not told yet
    calling.cancel()
    await asyncio.wait([calling])
    assert calling.cancelled()


async def test_a_call_is_answered_although_its_task_was_cancelled_before() -> None:
    """Such as while a task that was cancelled says goodbye."""
    broker = Broker()
    broker.acknowledged.set()

    async def say_goodbye() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            client: Any = broker
            await mqtt.publish(client, "a", b"")
        return "said"

    task = asyncio.create_task(say_goodbye())
    await asyncio.sleep(0)  # noqa: TID251 - one turn of the loop
    task.cancel()
    assert await task == "said"
