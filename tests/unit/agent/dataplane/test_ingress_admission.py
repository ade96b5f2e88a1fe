"""What one caller may hold of a transport: it is bounded, and others do not wait for it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest

from harness.wait import until
from shoal.agent.dataplane import ingress_admission as module
from shoal.agent.dataplane.call_places import BYTES_PER_CALLER, CALLS_PER_CALLER, STREAMS_PER_CALLER
from shoal.agent.dataplane.ingress_admission import (
    READ_SLOTS,
    READ_SLOTS_PER_CALLER,
    READ_SLOTS_PER_PAYER,
    WATCHES,
    WATCHES_PER_CALLER,
    WATCHES_PER_PAYER,
    IngressAdmission,
    MessagePlace,
    ReadLimits,
)
from shoal.agent.dataplane.memory import MessageMemory
from shoal.agent.metrics import FRONT_LIMIT_REFUSALS
from shoal.types.codes import Code, ShoalError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    monkeypatch.setattr(module, "SLOT_WAIT_S", 0.15)
    monkeypatch.setattr(module, "MAX_READ_S", 30.0)


async def drip(
    intake: IngressAdmission,
    caller: str,
    inside: asyncio.Event | None = None,
    *,
    read_s: float = 30.0,
    payer: str = "",
) -> Code:
    """A message that never comes; how that ends."""
    with intake.places.take(caller):
        try:
            async with intake.read_slot(caller, read_s, size=1, payer=payer):
                if inside is not None:
                    inside.set()
                await asyncio.Event().wait()
        except ShoalError as error:
            return error.code
    raise AssertionError


def refusals(intake: IngressAdmission) -> dict[str, object]:
    """What the front's page says of them, by limit."""
    return {limit: count for (limit,), count in intake.readings()[FRONT_LIMIT_REFUSALS].items()}


async def quickly(intake: IngressAdmission, caller: str) -> float:
    """Seconds until a message that is there at once has been read."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    with intake.places.take(caller):
        async with intake.read_slot(caller):
            pass
    return loop.time() - start


@asynccontextmanager
async def running(*work: Coroutine[Any, Any, Code]) -> AsyncIterator[list[asyncio.Task[Code]]]:
    tasks = [asyncio.create_task(each) for each in work]
    await asyncio.gather(*(asyncio.wait([task], timeout=0) for task in tasks))
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_drips_keeps_its_place_until_somebody_waits() -> None:
    intake = IngressAdmission()
    async with running(*(drip(intake, "slow", read_s=2.0) for _ in range(READ_SLOTS_PER_CALLER))) as tasks:
        await asyncio.wait(tasks, timeout=0.3)
        assert not any(task.done() for task in tasks), "nobody waits, so it may take its time"
        await quickly(intake, "slow")
        assert {await task for task in tasks} == {Code.TOO_SLOW}
    assert not intake.places.usage, "nothing is left of callers that are gone"


async def test_a_slow_caller_costs_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 1.0)
    intake = IngressAdmission()
    async with running(*(drip(intake, "slow") for _ in range(CALLS_PER_CALLER))):
        assert await quickly(intake, "victim") < 0.5


async def test_many_slow_callers_give_way_within_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The victim is neither refused nor behind those who came before it and already have places."""
    monkeypatch.setattr(module, "SLOT_WAIT_S", 30.0)
    monkeypatch.setattr(module, "GRACE_S", 1.0)
    intake = IngressAdmission()
    async with running(*(drip(intake, f"slow-{n % 8}") for n in range(8 * READ_SLOTS_PER_CALLER))) as tasks:
        await quickly(intake, "victim")
        assert sum(task.done() for task in tasks) <= module.READ_SLOTS, "only those of the first turn have gone"


async def test_who_stops_waiting_takes_no_place_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOT_WAIT_S", 30.0)
    intake = IngressAdmission()
    for _ in range(3):
        async with running(*(drip(intake, f"slow-{n % 8}") for n in range(8 * READ_SLOTS_PER_CALLER))):
            pass
    async with running(*(drip(intake, f"slow-{n % 8}") for n in range(module.READ_SLOTS - 1))) as tasks:
        await quickly(intake, "victim")
        assert not any(task.done() for task in tasks), "there was a place for everybody"


async def test_slow_messages_of_one_tenants_credentials_cost_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOT_WAIT_S", 30.0)
    monkeypatch.setattr(module, "GRACE_S", 30.0)
    intake = IngressAdmission()
    slow = [drip(intake, f"token-{n}", payer="acme") for n in range(2 * READ_SLOTS)]
    async with running(*slow) as tasks:
        assert await quickly(intake, "victim") < 5.0
        assert not any(task.done() for task in tasks)


async def test_only_reads_of_a_tenant_that_has_its_share_make_way_for_its_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SLOT_WAIT_S", 30.0)
    intake = IngressAdmission()
    others = [drip(intake, "token-of-shop", payer="shop") for _ in range(READ_SLOTS - READ_SLOTS_PER_PAYER - 1)]
    slow = [drip(intake, f"token-{n}", payer="acme") for n in range(READ_SLOTS_PER_PAYER)]
    more = drip(intake, "token-late", payer="acme")
    async with running(*others) as of_shop, running(*slow) as of_acme, running(more) as (late,):
        assert {await each for each in of_acme} == {Code.TOO_SLOW}
        assert not any(each.done() for each in (*of_shop, late))


async def test_a_slot_goes_to_the_tenant_with_fewest_and_there_to_the_credential_with_fewest() -> None:
    slots = module._ReadSlots(4, 3, IngressAdmission().places)
    reader = module._Reader
    order = list[str]()

    def wait(caller: str, payer: str) -> None:
        slots.begin_wait(reader(caller, payer)).add_done_callback(lambda _: order.append(caller))

    inside = [reader("s-1", "shop"), reader("s-1", "shop"), reader("a-1", "acme"), reader("a-1", "acme")]
    for each in inside:
        slots._take(each)
    for caller, payer in (("a-1", "acme"), ("a-2", "acme"), ("m-1", "mill")):
        wait(caller, payer)
    for each in inside[:3]:
        slots._release(each)
        await asyncio.sleep(0)  # noqa: TID251 - who gets it is told
    assert order == ["m-1", "a-2", "a-1"]


async def test_who_finds_no_place_is_told_in_time() -> None:
    intake = IngressAdmission()
    async with running(*(drip(intake, "slow", read_s=2.0) for _ in range(5 * READ_SLOTS_PER_CALLER))) as tasks:
        codes = [await task for task in tasks]
    assert set(codes) == {Code.TOO_SLOW, Code.OVERLOADED}
    assert refusals(intake) == {"messages": codes.count(Code.OVERLOADED)}


def test_calls_and_streams_are_counted_by_caller() -> None:
    intake = IngressAdmission()
    held = [intake.places.take("a") for _ in range(CALLS_PER_CALLER)]
    for each in held:
        each.__enter__()
    with pytest.raises(ShoalError) as refused, intake.places.take("a"):
        pass
    assert refused.value.code is Code.OVERLOADED
    with intake.places.take("b"):
        pass
    held.pop().__exit__(None, None, None)
    with intake.places.take("a"):
        pass
    streams = [intake.places.take("b", stream=True) for _ in range(STREAMS_PER_CALLER)]
    for each in streams:
        each.__enter__()
    with pytest.raises(ShoalError), intake.places.take("b", stream=True):
        pass
    with intake.places.take("b"):
        pass


def test_calls_are_counted_by_payer() -> None:
    """A tenant's credentials together leave calls to others."""
    intake = IngressAdmission()
    intake.places.most, intake.places.most_per_payer = 8, 6
    held = [intake.places.take(f"token-{number}", "acme") for number in range(6)]
    with pytest.raises(ShoalError, match="6 calls of this tenant") as refused:
        intake.places.take("token-7", "acme")
    assert refused.value.code is Code.OVERLOADED
    assert intake.begin_read("token-7", 1, "acme", lambda _: None, lambda _: None) is None
    assert refusals(intake) == {"calls": 1}, "a read without a task is asked for again by one"
    others = [intake.places.take("token-of-shop", "shop"), intake.places.take("unknown")]
    with pytest.raises(ShoalError, match="8 calls of all callers"):
        intake.places.take("token-of-shop", "shop")
    held.pop().leave()
    held.append(intake.places.take("token-7", "acme"))
    for each in (*held, *others):
        each.leave()
    assert not intake.places.usage
    assert not intake.places.by_payer


def test_calls_that_are_answered_from_their_head_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others are inside; but a caller that takes no response gets no more of them."""
    monkeypatch.setattr(module, "HEAD_CALLS", 8)
    monkeypatch.setattr(module, "HEAD_CALLS_PER_PAYER", 6)
    monkeypatch.setattr(module, "HEAD_CALLS_PER_CALLER", 3)
    intake = IngressAdmission()
    intake.places.most = 0
    with ExitStack() as held:
        last = held.enter_context(ExitStack())
        last.enter_context(intake.head_call("token-1", "acme"))
        for number in (1, 1, 2, 2, 2):
            held.enter_context(intake.head_call(f"token-{number}", "acme"))
        for caller, payer in (("token-1", "acme"), ("token-1", ""), ("token-3", "acme")):
            with pytest.raises(ShoalError) as refused, intake.head_call(caller, payer):
                raise AssertionError
            assert refused.value.code is Code.OVERLOADED
        for caller in ("viewer", "viewer"):
            held.enter_context(intake.head_call(caller, ""))
        with pytest.raises(ShoalError, match="8 of all"), intake.head_call("token-of-shop", "shop"):
            raise AssertionError
        last.close()
        held.enter_context(intake.head_call("token-3", "acme"))
    assert not intake._head_calls
    assert not intake._head_calls_by_payer


def test_answers_that_are_not_read_are_bounded() -> None:
    memory = MessageMemory()
    intake = IngressAdmission(memory)
    with intake.places.take("a") as only:
        only.hold_answer(2 * BYTES_PER_CALLER)
    with intake.places.take("a") as one, intake.places.take("a") as other, intake.places.take("a") as third:
        one.hold_answer(BYTES_PER_CALLER - 1)
        other.hold_answer(1)
        with pytest.raises(ShoalError) as refused:
            third.hold_answer(1)
        assert refused.value.code is Code.OVERLOADED
        one.release_answer()
        third.hold_answer(1)
    third.hold_answer(1)
    assert memory.held_bytes == 0, "a place that was left holds nothing"


async def wait_for_news(intake: IngressAdmission, caller: str, payer: str = "") -> Code:
    """A watch that nothing ends but the intake; how that ends it."""
    try:
        async with intake.watch(caller, payer):
            await asyncio.Event().wait()
    except ShoalError as error:
        return error.code
    raise AssertionError


async def test_watches_are_counted_by_caller_and_take_no_calls() -> None:
    intake = IngressAdmission()
    async with running(*(wait_for_news(intake, "a") for _ in range(WATCHES_PER_CALLER))) as tasks:
        assert await wait_for_news(intake, "a") is Code.OVERLOADED
        assert not any(task.done() for task in tasks)
        for _ in range(CALLS_PER_CALLER):
            with intake.places.take("a"):
                pass
    async with running(wait_for_news(intake, "a")) as (task,):
        assert not task.done(), "those that ended hold nothing"


async def test_a_caller_with_few_watches_gets_the_place_of_one_with_many() -> None:
    intake = IngressAdmission()
    many = WATCHES // WATCHES_PER_CALLER
    every = [wait_for_news(intake, f"c{n % many}") for n in range(WATCHES)]
    async with running(*every) as tasks, running(wait_for_news(intake, "late")) as (late,):
        assert await tasks[0] is Code.OVERLOADED, "the oldest of the first of those with most"
        assert not late.done()
        assert sum(task.done() for task in tasks) == 1
        async with running(*(wait_for_news(intake, "late") for _ in range(WATCHES_PER_CALLER))) as more:
            await asyncio.wait(more, timeout=0.1)
            held = WATCHES - sum(task.done() for task in tasks)
            assert held + 1 + sum(not task.done() for task in more) == WATCHES
            assert any(task.done() for task in more), "who has as many as others takes from nobody"


async def test_watches_of_one_tenants_credentials_leave_places_to_others() -> None:
    """A watch each: none is the credential with most. Beyond the tenant's share nobody else loses one."""
    intake = IngressAdmission()
    every = [wait_for_news(intake, f"token-{n}", "acme") for n in range(WATCHES)]
    async with running(*every) as tasks:
        assert [task.done() for task in tasks] == [n >= WATCHES_PER_PAYER for n in range(WATCHES)]
        others = [wait_for_news(intake, "token-of-shop", "shop") for _ in range(WATCHES_PER_CALLER)]
        async with running(*others) as of_shop, running(wait_for_news(intake, "late", "mill")) as (late,):
            assert await tasks[0] is Code.OVERLOADED, "all are taken: the oldest of the tenant with most"
            assert not any(each.done() for each in (*of_shop, late))
    assert not intake.watch_count


async def test_a_caller_that_names_many_tenants_has_the_watches_of_one_caller() -> None:
    """An operator's certificate, or another node's, may name any."""
    intake = IngressAdmission()
    every = [wait_for_news(intake, "operator", f"tenant-{n}") for n in range(WATCHES_PER_CALLER + 9)]
    async with running(*every) as tasks:
        assert [task.done() for task in tasks] == [n >= WATCHES_PER_CALLER for n in range(len(every))]
        async with running(wait_for_news(intake, "token", "acme")) as (other,):
            assert not other.done()
    async with running(wait_for_news(intake, "operator", "acme")) as (again,):
        assert not again.done(), "those that ended hold nothing"


async def test_of_one_that_forwards_no_tenant_waits_for_another() -> None:
    """One whose own credentials hold all places of its tenant waits with what it sends through another node."""
    intake = IngressAdmission()
    direct = [drip(intake, f"token-{n}", payer="acme", read_s=0.5) for n in range(READ_SLOTS_PER_PAYER)]
    through = [drip(intake, "front", payer="acme", read_s=0.5) for _ in range(2 * READ_SLOTS_PER_CALLER)]
    async with running(*direct, *through):
        loop = asyncio.get_running_loop()
        start = loop.time()
        with intake.places.take("front"):
            async with intake.read_slot("front", payer="shop"):
                assert loop.time() - start < module.GRACE_S / 2
            async with intake.small_read_slot("front", "shop"):
                pass


async def test_within_a_tenant_the_credential_with_most_watches_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WATCHES_PER_PAYER", 4)
    intake = IngressAdmission()
    every = [wait_for_news(intake, caller, "acme") for caller in ("a", "b", "b", "b")]
    async with running(wait_for_news(intake, "shop")) as (other,), running(*every) as (first, oldest, *rest):
        assert await wait_for_news(intake, "b", "acme") is Code.OVERLOADED
        assert refusals(intake) == {"watches": 1}
        async with running(wait_for_news(intake, "c", "acme")) as (late,):
            assert await oldest is Code.OVERLOADED
            assert refusals(intake) == {"watches": 2}
            assert not any(each.done() for each in (other, first, late, *rest))


class Reads:
    """Messages that no task reads."""

    def __init__(self, intake: IngressAdmission) -> None:
        self.intake = intake
        self.turns: list[bool] = []
        self.ended: list[Code] = []

    def begin(self, caller: str = "a", size: int = 1000) -> MessagePlace:
        found = self.find(caller, caller, size)
        assert found is not None
        return found

    def find(self, caller: str, payer: str, size: int = 1000) -> MessagePlace | None:
        return self.intake.begin_read(
            caller, size, payer, lambda error: self.ended.append(error.code), self.turns.append
        )

    def fill(self, caller: str = "a") -> list[MessagePlace]:
        """All slots of the caller."""
        found = [self.begin(caller) for _ in range(READ_SLOTS_PER_CALLER)]
        assert not any(each.is_waiting for each in found)
        return found


async def until_turn(reads: Reads, count: int = 1) -> None:
    await until(lambda: len(reads.turns) + len(reads.ended) >= count, 5.0, f"{count} to hear")


async def test_a_read_without_a_task_waits_for_a_slot_and_is_charged_from_then_on() -> None:
    memory = MessageMemory()
    reads = Reads(IngressAdmission(memory))
    inside = reads.fill()
    held = memory.held_bytes
    waiting = reads.begin()
    assert waiting.is_waiting
    assert memory.held_bytes == held
    inside[0].leave()
    await until_turn(reads)
    assert reads.turns == [True]
    assert not waiting.is_waiting
    assert memory.held_bytes == held
    for each in (*inside[1:], waiting):
        each.leave()
    assert memory.held_bytes == 0
    assert not reads.intake.places.usage
    assert reads.intake._slots._free == READ_SLOTS
    assert not reads.intake._limits._open


async def test_a_read_that_waits_gives_up_its_turn_when_it_leaves() -> None:
    """Before the turn came, and at the same moment."""
    reads = Reads(IngressAdmission())
    inside = reads.fill()
    first, second, third = (reads.begin() for _ in range(3))
    first.leave()
    inside[0].leave()
    second.leave()  # the slot is its own by now
    await until_turn(reads)
    assert reads.turns == [True]
    assert not third.is_waiting
    for each in (*inside[1:], third):
        each.leave()
    assert not reads.intake.places.usage
    assert reads.intake._slots._free == READ_SLOTS


async def test_slow_reads_without_a_task_end_where_others_wait() -> None:
    reads = Reads(IngressAdmission())
    inside = reads.fill()
    last = reads.begin()
    await until(lambda: len(reads.ended) == len(inside), 5.0, "all that are inside to end")
    assert set(reads.ended) == {Code.TOO_SLOW}
    for each in inside:
        each.leave()
    await until(lambda: bool(reads.turns), 5.0, "its turn")
    assert reads.turns == [True]
    last.leave()
    assert not reads.intake.places.usage


async def test_a_read_without_a_task_waits_for_a_slot_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 30.0)
    reads = Reads(IngressAdmission())
    inside = reads.fill()
    waiting = reads.begin()
    await until_turn(reads)
    assert reads.ended == [Code.OVERLOADED]
    waiting.leave()
    inside[0].leave()
    assert not reads.begin().is_waiting
    assert not reads.turns


async def test_a_read_that_finds_no_slot_of_all_at_its_turn_is_left_to_a_task() -> None:
    reads = Reads(IngressAdmission())
    inside = reads.fill()
    waiting = reads.begin()
    others = [each for n in range(READ_SLOTS // READ_SLOTS_PER_CALLER - 1) for each in reads.fill(f"other-{n}")]
    inside[0].leave()
    others.append(reads.begin("late"))  # it takes the place that is free now
    await until_turn(reads)
    assert reads.turns == [False]
    waiting.leave()
    for each in (*inside[1:], *others):
        each.leave()
    assert not reads.intake.places.usage
    assert reads.intake._slots._free == READ_SLOTS


async def test_reads_without_a_task_are_counted_by_payer() -> None:
    reads = Reads(IngressAdmission())
    inside = [reads.find(f"token-{n}", "acme") for n in range(READ_SLOTS_PER_PAYER)]
    assert reads.find("token-late", "acme") is None, "it is left to a task"
    inside += [reads.find(f"token-of-shop-{n}", "shop") for n in range(READ_SLOTS - READ_SLOTS_PER_PAYER)]
    for each in inside:
        assert each is not None
        assert not each.is_waiting
        each.leave()
    assert not reads.intake.places.usage
    assert reads.intake._slots._free == READ_SLOTS
    assert not reads.intake._slots._by_payer


async def test_a_read_whose_end_fails_delays_no_others() -> None:
    """Neither those whose time is over at the same moment, nor those after it; it is logged."""
    loop = asyncio.get_running_loop()
    logged: list[object] = []
    loop.set_exception_handler(lambda _, context: logged.append(context["exception"]))
    limits, ended, error = ReadLimits(), list[str](), RuntimeError()

    def fail() -> None:
        raise error

    now = loop.time()
    limits.add(now, fail)
    limits.add(now, lambda: ended.append("with it"))
    limits.add(now + 0.05, lambda: ended.append("after it"))
    await until(lambda: len(ended) == 2, 5.0, "the others")
    assert ended == ["with it", "after it"]
    assert logged == [error]


async def test_reads_end_after_one_whose_end_is_cancelled() -> None:
    """What is no `Exception` ends the turn of the timer, not the timer."""
    limits, ended = ReadLimits(), list[str]()

    def stop() -> None:
        raise asyncio.CancelledError

    now = asyncio.get_running_loop().time()
    limits.add(now, stop)
    limits.add(now, lambda: ended.append("with it"))
    await until(lambda: bool(ended), 5.0, "the other")
