"""Refusals of callers over their limits wait for their turn at the event loop."""

import asyncio

from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.core.refusal_pace import AT_ONCE, SPACING_S
from shoal.agent.dataplane.paced_refusals import PacedRefusals


async def test_refusals_beyond_a_few_take_their_time_and_another_caller_hears_soon() -> None:
    clock = SystemClock()
    refusals, order, count = PacedRefusals(clock), list[str](), 200

    async def refuse(caller: str) -> None:
        await refusals.wait(caller)
        order.append(caller)

    began = clock.now()
    flood = [asyncio.create_task(refuse("loud")) for _ in range(count)]
    await until(lambda: len(order) >= AT_ONCE, 5.0, "a few to leave at once")
    before = len(order)
    assert before < count
    await refuse("quiet")
    assert order.index("quiet") <= before + 2
    await asyncio.gather(*flood)
    assert clock.now() - began >= (count - AT_ONCE - 1) * SPACING_S
    assert refusals.waiting == 0


async def test_whose_caller_is_gone_waits_no_longer() -> None:
    refusals = PacedRefusals(SystemClock())
    flood = [asyncio.create_task(refusals.wait("loud")) for _ in range(200)]
    await until(lambda: refusals.waiting > 0, 5.0, "most of them wait")
    for each in flood:
        each.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    assert refusals.waiting == 0
    await asyncio.wait_for(refusals.wait("quiet"), 5.0)
