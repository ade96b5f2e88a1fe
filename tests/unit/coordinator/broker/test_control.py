"""What a hostile broker can do to the coordinator that manages its rights."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import aiomqtt
import pytest

from shoal.coordinator.broker.control import MOST_ANSWER_BYTES, MOST_LISTED_BYTES, MOST_OTHERS, PAGE, _ControlClient
from shoal.types.codes import Code, ShoalError
from shoal.wire import mqtt


class Broker:
    """An aiomqtt client; each command is answered as `answer` says."""

    def __init__(self, answer: Callable[[dict[str, Any]], bytes]) -> None:
        self.sent = asyncio.Queue[bytes]()
        self._answer = answer

    @property
    async def messages(self) -> AsyncIterator[Any]:
        while True:
            yield SimpleNamespace(payload=await self.sent.get())

    async def publish(self, client: object, topic: str, content: bytes) -> None:
        (command,) = json.loads(content)["commands"]
        self.sent.put_nowait(self._answer(command))


def page_of(command: dict[str, Any], size: int, padding: int = 0) -> bytes:
    items = [{"username": f"u{number}", "roles": []} for number in range(size)]
    answer = {"correlationData": command["correlationData"], "data": {"clients": items}, "x": "x" * padding}
    return json.dumps({"responses": [answer]}).encode()


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Callable[[Broker], _ControlClient]:
    def control_of(broker: Broker) -> _ControlClient:
        monkeypatch.setattr(mqtt, "publish", broker.publish)
        return _ControlClient(cast(aiomqtt.Client, broker))

    return control_of


async def test_what_nobody_asked_for_is_not_kept_and_ends_the_connection(
    connect: Callable[[Broker], _ControlClient],
) -> None:
    broker = Broker(lambda command: b"")
    client = connect(broker)
    for _ in range(MOST_OTHERS + 1):
        broker.sent.put_nowait(b'{"responses": [{"correlationData": "1"}]}')
    with pytest.raises(ShoalError) as ended:
        await client.read()
    assert ended.value.code is Code.CONFLICT


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda command: page_of(command, PAGE, MOST_ANSWER_BYTES // 2), f"{MOST_LISTED_BYTES >> 20} MiB"),
        (lambda command: page_of(command, 1, MOST_ANSWER_BYTES), "an answer of"),
    ],
    ids=["pages without end", "one of a megabyte"],
)
async def test_a_list_is_no_larger_than_a_region_s(
    connect: Callable[[Broker], _ControlClient], answer: Callable[[dict[str, Any]], bytes], told: str
) -> None:
    client = connect(Broker(answer))

    async def count() -> int:
        return len([item async for item in client.list("listClients", "clients")])

    parts = [asyncio.create_task(client.read()), asyncio.create_task(count())]
    done, left = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
    for part in left:
        part.cancel()
    (ended,) = done
    assert told in str(ended.exception())


async def test_a_list_of_several_pages_is_whole(connect: Callable[[Broker], _ControlClient]) -> None:
    def answer(command: dict[str, Any]) -> bytes:
        return page_of(command, min(PAGE, 450 - command["offset"]))

    client = connect(Broker(answer))
    reading = asyncio.create_task(client.read())
    assert len([item async for item in client.list("listClients", "clients")]) == 450
    reading.cancel()
