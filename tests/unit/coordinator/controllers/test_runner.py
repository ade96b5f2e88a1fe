"""The loop of everything that is persisted: nothing follows from what is not stored."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from shoal.coordinator.controllers.runner import ATTEMPTS, Transition, TransitionRunner
from shoal.coordinator.ports import StaleRevision
from shoal.types.codes import Code, Refusal, ShoalError

FULL = ShoalError(Refusal(Code.STORE_FULL))
UNANSWERED = ShoalError(Refusal(Code.STORE_UNAVAILABLE))


def raises_code(code: Code) -> Any:
    return pytest.raises(ShoalError, match=code)


@dataclass
class Counters:
    """A machine per name that counts its events, and a store that fails as a test says."""

    memory: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    # Outcomes of the next commits: None is a success. An unanswered one takes effect.
    outcomes: list[Exception | None] = field(default_factory=list)
    # Whether reads fail.
    is_blind: bool = False
    # What was called, in order.
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = TransitionRunner[str, dict[str, int]](self.commit, self.read)

    async def commit(self, writes: dict[str, int]) -> int:
        self.calls.append("commit")
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is None or outcome is UNANSWERED:
            self.stored |= writes
        if outcome is not None:
            raise outcome
        return 7

    async def read(self, name: str, doubtful: Transition[dict[str, int], Any]) -> Callable[[], None]:
        self.calls.append(f"read {name}")
        if self.is_blind:
            raise UNANSWERED
        assert doubtful.writes is not None
        assert doubtful.writes.keys() == {name}
        return lambda: self.memory.update({name: self.stored.get(name, 0)})

    async def count(self, name: str = "a") -> str:
        return await self.runner.run(name, lambda: self.step(name))

    def step(self, name: str) -> Transition[dict[str, int], str]:
        self.calls.append("step")
        after = self.memory.get(name, 0) + 1

        def adopt(revision: int) -> None:
            assert self.stored[name] == after, "memory follows the store"
            assert revision == 7
            self.memory[name] = after

        return Transition(f"{name} is {after}", {name: after}, adopt)


@pytest.fixture
def counters() -> Counters:
    return Counters()


async def test_effects_come_after_the_commit_and_memory_follows_it(counters: Counters) -> None:
    assert await counters.count() == "a is 1"
    assert (counters.calls, counters.memory) == (["step", "commit"], {"a": 1})


async def test_a_step_without_writes_does_not_wait_for_the_store(counters: Counters) -> None:
    adopted = list[int]()
    assert await counters.runner.run("a", lambda: Transition("waits", adopt=adopted.append)) == "waits"
    assert (counters.calls, adopted) == ([], [0])


@pytest.mark.parametrize(("outcome", "after"), [(FULL, 1), (UNANSWERED, 2)])
async def test_a_failed_commit_changes_nothing_and_is_read_again_before_the_next_step(
    counters: Counters, outcome: ShoalError, after: int
) -> None:
    counters.outcomes = [outcome]
    with raises_code(outcome.code):
        await counters.count()
    assert (counters.memory, list(counters.runner.uncertain)) == ({}, ["a"])
    assert await counters.count() == f"a is {after}"
    assert counters.calls == ["step", "commit", "read a", "step", "commit"]
    assert not counters.runner.uncertain


async def test_nothing_is_decided_while_the_outcome_cannot_be_read(counters: Counters) -> None:
    counters.outcomes, counters.is_blind = [UNANSWERED], True
    with raises_code(Code.STORE_UNAVAILABLE):
        await counters.count()
    with raises_code(Code.STORE_UNAVAILABLE):
        await counters.count()
    assert counters.calls == ["step", "commit", "read a"]
    assert await counters.count("b") == "b is 1", "others go on"
    counters.is_blind = False
    assert await counters.count() == "a is 2"


async def test_a_stale_commit_is_read_and_decided_again(counters: Counters) -> None:
    counters.stored = {"a": 5}
    counters.outcomes = [StaleRevision("a")]
    assert await counters.count() == "a is 6"
    assert counters.calls == ["step", "commit", "read a", "step", "commit"]


async def test_what_is_always_stale_is_refused(counters: Counters) -> None:
    counters.outcomes = [StaleRevision("a")] * ATTEMPTS
    with raises_code(Code.CONFLICT):
        await counters.count()
    assert counters.calls.count("commit") == ATTEMPTS
    assert (counters.memory, list(counters.runner.uncertain)) == ({"a": 0}, ["a"])


async def test_all_that_is_uncertain_can_be_read_at_once(counters: Counters) -> None:
    for name in "ba":
        counters.outcomes = [UNANSWERED]
        with raises_code(Code.STORE_UNAVAILABLE):
            await counters.count(name)
    counters.calls.clear()
    await counters.runner.reload_all()
    assert (counters.calls, counters.memory) == (["read a", "read b"], {"a": 1, "b": 1})
