"""A57: calls held open and unfinished messages. What messages may hold of a front's memory, in all and for one
tenant; large requests too."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from harness.wait import until
from shoal.agent.core.sequences import SessionLimits, check_room, check_size
from shoal.agent.dataplane import ingress_admission as intake_module
from shoal.agent.dataplane import memory as module
from shoal.agent.dataplane.call_places import CALLS, CALLS_PER_CALLER
from shoal.agent.dataplane.ingress_admission import ANONYMOUS_CALLS, ANONYMOUS_PER_ADDRESS, IngressAdmission
from shoal.agent.dataplane.memory import (
    CHECK_EVERY_S,
    COPIES,
    DEFAULT_EXPECTED_BYTES,
    MIN_READ_AGE_S,
    MessageMemory,
    budget_bytes,
    session_budget_bytes,
)
from shoal.agent.dataplane.transport import CallRefused
from shoal.agent.main.options import MIN_FRONT_MEMORY
from shoal.host import memory as machine
from shoal.types.codes import Code, ShoalError
from shoal.types.units import Bytes
from shoal.types.workload import SESSION_BYTES

MIB = 2**20


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def machine_of(root: Path, cgroup: str) -> Path:
    write(root, "proc/meminfo", "MemTotal:  8388608 kB\nMemFree: 1 kB\n")
    write(root, "proc/self/cgroup", cgroup)
    return root


def test_a57_the_limit_is_the_least_of_all_groups_above(tmp_path: Path) -> None:
    root = machine_of(tmp_path, "0::/shoal/agent\n")
    assert machine.limit_bytes(root) == 8192 * MIB
    write(root, "sys/fs/cgroup/shoal/agent/memory.max", "max\n")
    write(root, "sys/fs/cgroup/shoal/memory.max", f"{512 * MIB}\n")
    write(root, "sys/fs/cgroup/memory.max", f"{2048 * MIB}\n")
    assert machine.limit_bytes(root) == 512 * MIB


def test_a57_the_limit_of_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    root = machine_of(tmp_path, "0::/kubepods/pod1/x\n")
    write(root, "sys/fs/cgroup/memory.max", f"{512 * MIB}\n")
    assert machine.limit_bytes(root) == 512 * MIB


def test_a57_the_limit_of_control_groups_of_version_1(tmp_path: Path) -> None:
    root = machine_of(tmp_path, "5:cpu:/x\n4:memory:/pod\n")
    write(root, "sys/fs/cgroup/memory/pod/memory.limit_in_bytes", f"{256 * MIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    assert machine.limit_bytes(root) == 256 * MIB


def test_a57_the_budget_follows_the_limit() -> None:
    assert budget_bytes(512 * MIB) == (256 - 80) * MIB
    assert budget_bytes(64 * MIB) == module.MIN_BUDGET_BYTES, "one message always has room"
    assert budget_bytes(2**50) == module.MAX_BUDGET_BYTES


@pytest.mark.parametrize("limit", [MIN_FRONT_MEMORY, 384 * MIB, 512 * MIB, 2**30, 2**40])
def test_a57_messages_and_sessions_together_stay_within_the_limit(limit: int) -> None:
    messages = budget_bytes(limit)
    sessions = session_budget_bytes(limit, messages)
    assert module.BASELINE_BYTES + messages + sessions <= limit
    assert SESSION_BYTES <= sessions <= messages // 2
    assert session_budget_bytes(128 * MIB, budget_bytes(128 * MIB)) == SESSION_BYTES, "at least"


@pytest.mark.parametrize("limit", [128 * MIB, 192 * MIB, 240 * MIB, MIN_FRONT_MEMORY])
def test_a57_the_sessions_of_one_tenant_leave_as_much_to_another(limit: int) -> None:
    limits = SessionLimits().within(Bytes(session_budget_bytes(limit, budget_bytes(limit))))
    largest = limits.session_bytes
    assert largest >= SESSION_BYTES // 2
    assert check_size(largest, 0, 0, limits) is None
    assert check_size(largest, 0, limits.tenant_bytes, limits) is None, "of another tenant"
    assert check_room(1, 0, limits.tenant_bytes, limits) is None
    assert check_size(1, limits.tenant_bytes, limits.tenant_bytes, limits) is not None, "of the same"


def test_a57_one_tenant_takes_no_more_than_half_and_no_one_more_than_all() -> None:
    memory = MessageMemory(budget=100 * MIB)
    with memory.hold("a", 20 * MIB):
        with pytest.raises(ShoalError) as refused, memory.hold("a", 6 * MIB):
            raise AssertionError
        assert refused.value.code is Code.OVERLOADED
        with memory.hold("b", 25 * MIB):
            assert memory.held_bytes == 90 * MIB == COPIES * 45 * MIB
            with pytest.raises(ShoalError), memory.hold("c", 6 * MIB):
                raise AssertionError
    with memory.hold("a", 200 * MIB):
        pass
    assert memory.held_bytes == 0


def test_a57_who_gets_no_answer_for_want_of_memory_hears_that_the_request_was_right() -> None:
    memory = MessageMemory(budget=100 * MIB)
    intake = IngressAdmission(memory)
    with memory.hold("others", 25 * MIB), memory.hold("more", 24 * MIB), intake.places.take("a", "acme") as place:
        with pytest.raises(CallRefused, match="the request, which its model has run") as refused:
            place.hold_answer(2 * MIB, "acme")
        assert "an answer of 2097152 bytes beside 0 of this tenant" in str(refused.value)
        assert (refused.value.code, refused.value.retry_after_s) == (Code.OVERLOADED, 1.0)
        with pytest.raises(CallRefused, match="fewer or smaller messages"):
            intake.places.hold_request("a", 2 * MIB, "acme")


async def test_a57_a_caller_of_large_messages_waits_for_room_and_one_of_small_ones_does_not() -> None:
    memory = MessageMemory(budget=100 * MIB)
    intake = IngressAdmission(memory)
    with intake.places.take("big"):
        with intake.places.hold_request("big", 20 * MIB):
            assert memory.expected_bytes("big") == 20 * MIB
            waiting = asyncio.ensure_future(_read(intake, "big"))
            assert not (await asyncio.wait((waiting,), timeout=0.05))[0]
            with intake.places.take("small"):
                async with asyncio.timeout(1):
                    await _read(intake, "small")
        await waiting
    for _ in range(60):
        memory.record_size("big", 10)
    assert memory.expected_bytes("big") == DEFAULT_EXPECTED_BYTES, "what was long ago is forgotten"


async def test_a57_the_first_messages_of_a_caller_come_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once one has arrived, its size tells how many fit. A first message that does not arrive delays the others."""
    monkeypatch.setattr(intake_module, "FIRST_READ_SPACING_S", 0.2)
    memory = MessageMemory(budget=100 * MIB)
    intake = IngressAdmission(memory)
    open_: Counter[str] = Counter()
    most: Counter[str] = Counter()

    async def one(caller: str, size: int) -> None:
        with intake.places.take(caller):
            async with intake.read_slot(caller):
                open_[caller] += 1
                most[caller] = max(most[caller], open_[caller])
                await asyncio.sleep(0.01)  # noqa: TID251 - it arrives
                open_[caller] -= 1
            with intake.places.hold_request(caller, size):
                await asyncio.sleep(0.01)  # noqa: TID251 - it is answered

    loop = asyncio.get_running_loop()
    await asyncio.gather(*(one("large", 20 * MIB) for _ in range(8)), *(one("small", 10) for _ in range(8)))
    assert most["large"] == 1, "none was refused, and two at once would be more than the share"
    assert most["small"] == 7, "all that came after the first"
    began = loop.time()
    with intake.places.take("slow"):
        silent = asyncio.create_task(_read(intake, "slow", asyncio.Event()))
        await asyncio.sleep(0)  # noqa: TID251 - it is open
        others = [asyncio.create_task(_read(intake, "slow", asyncio.Event())) for _ in range(2)]
        await until(lambda: len(memory._readings) == 3, 5, "all are open")
        assert loop.time() - began >= 2 * 0.2, "one after another"
        for each in (silent, *others):
            each.cancel()
        await asyncio.gather(silent, *others, return_exceptions=True)
        async with asyncio.timeout(0.1):
            await _read(intake, "slow")


async def _read(intake: IngressAdmission, caller: str, until_set: asyncio.Event | None = None) -> None:
    async with intake.read_slot(caller):
        if until_set is not None:
            await until_set.wait()


async def test_a57_reads_that_take_the_memory_are_ended_and_young_ones_go_on() -> None:
    """Eight of one caller, that bring as much each; what they took is free once they are ended."""
    open_ = 0

    def memory_used() -> int:
        return 40 * MIB + 30 * MIB * open_

    memory = MessageMemory(budget=100 * MIB, resident_bytes=memory_used, allocated_bytes=lambda: None)
    intake = IngressAdmission(memory)
    watching = asyncio.create_task(memory.watch())
    codes = []

    async def hold_read(caller: str) -> None:
        nonlocal open_
        try:
            async with intake.stream_read(caller):
                open_ += 1
                try:
                    await asyncio.Event().wait()
                finally:
                    open_ -= 1
        except ShoalError as error:
            codes.append(error.code)

    await asyncio.wait((watching,), timeout=0.01)
    with intake.places.take("slow"), intake.places.take("other"):
        other = asyncio.create_task(hold_read("other"))
        tasks = [asyncio.create_task(hold_read("slow")) for _ in range(8)]
        await asyncio.wait(tasks, timeout=MIN_READ_AGE_S + 4 * CHECK_EVERY_S)
        assert codes == [Code.OVERLOADED] * 6, "until the three that are left fit"
        assert not other.done(), "who has fewest goes last"
        for task in (other, *tasks):
            task.cancel()
        await asyncio.gather(other, *tasks, return_exceptions=True)
    watching.cancel()


async def _first_ended(*reads: tuple[str, str, bool], charged: Sequence[tuple[str, str]] = ()) -> str:
    """The payer of the read that is ended where messages take too much. reads: caller, payer, whether it has begun.
    charged: others, with a size that was charged."""
    taken, ended = [40 * MIB], list[str]()
    memory = MessageMemory(budget=100 * MIB, resident_bytes=lambda: taken[-1], allocated_bytes=lambda: None)

    class Ended:
        def __init__(self, payer: str) -> None:
            self._payer = payer

        def end_by(self, when: float) -> None:
            ended.append(self._payer)
            taken.append(40 * MIB)

    watching = asyncio.create_task(memory.watch())
    await asyncio.wait((watching,), timeout=0.01)
    for caller, payer, has_begun in reads:
        memory.begin_read(caller, payer, Ended(payer), partial(bool, has_begun))
    for caller, payer in charged:
        memory.begin_read(caller, payer, Ended(payer), is_charged=True)
    taken.append(150 * MIB)
    await until(lambda: ended, 5.0, "one to be ended")
    watching.cancel()
    return ended[0]


async def test_a57_reads_of_the_tenant_with_most_are_ended_whatever_its_credentials() -> None:
    """Its credentials have one each, the other tenant's has two."""
    shop = ("s", "shop", True)
    assert await _first_ended(shop, shop, *((f"a-{n}", "acme", True) for n in range(3))) == "acme"


async def test_a57_streams_that_wait_for_their_next_message_have_brought_nothing() -> None:
    assert await _first_ended(*(("s", "shop", False) for _ in range(8)), ("a", "acme", True)) == "acme"


async def test_a57_reads_of_a_charged_size_bring_nothing_that_is_not_held() -> None:
    many = [("s", "shop")] * 20
    assert await _first_ended(("a", "acme", True), charged=many) == "acme"
    assert await _first_ended(charged=many) == "shop", "where there are no others"


@pytest.mark.parametrize("has_heap", [False, True])
async def test_a57_no_read_is_ended_for_what_sessions_hold(has_heap: bool) -> None:
    sessions = 0

    def bytes_taken() -> int:
        return 40 * MIB + sessions

    memory = MessageMemory(
        budget=100 * MIB,
        resident_bytes=bytes_taken,
        allocated_bytes=bytes_taken if has_heap else lambda: None,
        session_bytes=lambda: sessions,
    )
    intake = IngressAdmission(memory)
    watching = asyncio.create_task(memory.watch())
    forever = asyncio.Event()
    await asyncio.wait((watching,), timeout=0.01)
    with intake.places.take("shop"):
        reading = asyncio.create_task(_read(intake, "shop", forever))
        await until(lambda: memory._readings, 5, "it is open")
        sessions = 200 * MIB
        await asyncio.wait((reading,), timeout=MIN_READ_AGE_S + 4 * CHECK_EVERY_S)
        assert not reading.done()
        assert memory.shed_count == 0
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    watching.cancel()


async def test_a57_calls_without_credentials_are_counted_apart() -> None:
    intake = IngressAdmission()
    held = [intake.anonymous(f"ipv4:10.0.0.{n // ANONYMOUS_PER_ADDRESS}") for n in range(ANONYMOUS_CALLS)]
    for each in held:
        each.__enter__()
    with pytest.raises(ShoalError), intake.anonymous("ipv4:10.0.1.1"):
        raise AssertionError
    with intake.places.take("known"):
        pass
    held[0].__exit__(None, None, None)
    with pytest.raises(ShoalError), intake.anonymous("ipv4:10.0.0.1"):
        raise AssertionError("this address has its share")
    with intake.anonymous("ipv4:10.0.0.0"):
        pass
    for each in held[1:]:
        each.__exit__(None, None, None)


def test_a57_all_known_callers_together_are_bounded() -> None:
    intake = IngressAdmission()
    held = [intake.places.take(f"c{n // CALLS_PER_CALLER}") for n in range(CALLS)]
    for each in held:
        each.__enter__()
    with pytest.raises(ShoalError) as refused, intake.places.take("new"):
        raise AssertionError
    assert refused.value.code is Code.OVERLOADED
    for each in held:
        each.__exit__(None, None, None)
    assert not intake.places.usage
