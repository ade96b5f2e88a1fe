"""Requests to a model `relu` at a steady rate, each with its own right answer, recorded for the checker."""

import asyncio
import struct
from collections.abc import Awaitable, Callable, Hashable
from typing import Final

from harness.clients.oip import GrpcClient, InferenceError, Tensor
from harness.measure.history import CallHistory, CallOutcome, HistoryVerdict, check_histories
from shoal.types.workload import WorkloadKey

KEY: Final = WorkloadKey("acme", "relu")
AT_ONCE: Final = 64
_AMBIGUOUS: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN", "INTERNAL"})
"""Statuses after which a request without a code may have been executed or not."""


def answer_of(asked: Hashable) -> Hashable:
    """The right answer for request n: max(x, 0) of [-n, n, n + 0.5, 0]."""
    assert isinstance(asked, int)
    return struct.pack("<4f", 0.0, asked, asked + 0.5, 0.0)


async def send_request(client: GrpcClient, history: CallHistory, number: int, timeout: float = 15.0) -> None:
    """Request `number`, recorded in `history`."""
    clock = asyncio.get_running_loop().time
    call = history.begin(number, clock())
    x = Tensor("x", "FP32", (1, 4), struct.pack("<4f", -number, number, number + 0.5, 0.0))
    try:
        answer = await client.infer("relu", (x,), timeout=timeout)
        history.end(call, CallOutcome.OK, answer.outputs[0].raw, clock())
    except InferenceError as error:
        is_refused = error.code or error.status not in _AMBIGUOUS
        history.end(
            call, CallOutcome.REFUSED if is_refused else CallOutcome.UNKNOWN, error.code or error.status, clock()
        )


async def send_load(
    clients: list[GrpcClient], count: int, rate: float, at: int, strike: Callable[[], Awaitable[None]]
) -> HistoryVerdict:
    """`count` requests at `rate` a second, whatever the answers do, at most `AT_ONCE` in flight. `strike` runs once
    request `at` is sent."""
    loop = asyncio.get_running_loop()
    history = CallHistory()
    room = asyncio.Semaphore(AT_ONCE)
    start = loop.time()

    async def one(number: int) -> None:
        async with room:
            await send_request(clients[number % len(clients)], history, number)

    tasks: list[asyncio.Task[None]] = []
    fired = asyncio.Event()

    def fire(number: int) -> None:
        tasks.append(asyncio.create_task(one(number)))
        if number == at:
            tasks.append(asyncio.ensure_future(strike()))
        if number == count:
            fired.set()

    for number in range(1, count + 1):
        loop.call_at(start + number / rate, fire, number)
    await fired.wait()
    await asyncio.gather(*tasks)
    return check_histories([history], answer_of)
