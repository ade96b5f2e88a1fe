"""The one loop of everything that is persisted and then acted upon: step, commit, adopt, and only then act.

A step decides from memory alone what is to be stored, and what follows from it. Memory takes over the new state once it
is stored, and the caller gets the effects after that. So nothing acts before its commit, and what the store does not
take has not happened.
"""

from collections.abc import Awaitable, Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from shoal.coordinator.ports import StaleRevision
from shoal.host import gc_freeze
from shoal.types.codes import Code, ShoalError, refuse

ATTEMPTS: Final = 3
"""Steps from a state that turned out to be stale, before the caller is refused."""

K = TypeVar("K", bound=Hashable)
W = TypeVar("W")
E = TypeVar("E")
T = TypeVar("T")


class Compute(Protocol):
    """Runs a pure function without blocking the caller's loop for long; raises what the function raises."""

    async def __call__(self, work: Callable[[], T], /) -> T: ...


async def inline(work: Callable[[], T], /) -> T:
    """Runs the function at once, in the caller's task."""
    return work()


def keep_state(revision: int) -> None:
    """`Transition.adopt` of a step that changes nothing in memory."""


def keep_all() -> None:
    """`Transition.settle` of a step after which nothing of it takes long."""


@dataclass(frozen=True, slots=True)
class Transition(Generic[W, E]):
    """What one step of a machine decided."""

    # What follows from it, for the caller to perform.
    effects: E
    # One transaction: state, ledger and events; None: there is nothing to store.
    writes: W | None = None
    # Takes over the state after the step, given the revision of its commit; 0 if nothing was stored.
    adopt: Callable[[int], None] = keep_state
    # Part of it that takes long, and comes first. It may run beside the loop.
    settle: Callable[[], None] = keep_all


class TransitionRunner(Generic[K, W]):
    """Runs the steps of the machines of one kind, by key.

    It has no lock: its caller holds the one that guards the machines' state, and releases it before it performs effects
    that call other regions.
    """

    def __init__(
        self,
        commit: Callable[[W], Awaitable[int]],
        read: Callable[[K, Transition[W, Any]], Awaitable[Callable[[], None]]],
    ) -> None:
        """commit: raises StaleRevision, ShoalError. read: reads from the store what became of a key after a failed
        commit of that transition; raises ShoalError. It returns what makes memory follow the store, which cannot fail.
        """
        self._commit = commit
        self._read = read
        self._uncertain: dict[K, Transition[W, Any]] = {}

    @property
    def uncertain(self) -> Collection[K]:
        """Keys whose last commit failed, so that memory and store may differ."""
        return self._uncertain.keys()

    async def run(self, key: K, step: Callable[[], Transition[W, E]]) -> E:
        """Runs one step and returns its effects. If its commit fails, memory is unchanged, and the key is read again
        before its next step. step: decides from memory; it is called again after a stale commit.

        Raises ShoalError(STORE_FULL | STORE_UNAVAILABLE | NOT_LEADER | CONFLICT), and what `step` raises.
        """
        return await self.run_beside(key, lambda: step, inline)

    async def run_beside(self, key: K, begin: Callable[[], Callable[[], Transition[W, E]]], compute: Compute) -> E:
        """The same of a step that takes long. begin: reads what memory has; what it returns decides, and runs in
        `compute`. That may read and change only what nobody changes meanwhile but under the lock."""
        for _ in range(ATTEMPTS):
            await self.reload(key)
            step = begin()

            def decide() -> Transition[W, E]:
                with gc_freeze.pause():
                    return step()  # noqa: B023

            transition = await compute(decide)
            revision = 0
            if transition.writes is not None:
                try:
                    revision = await self._commit(transition.writes)
                except StaleRevision:
                    self._uncertain[key] = transition
                    continue
                except ShoalError:
                    self._uncertain[key] = transition  # it may have taken effect
                    raise
            if transition.settle is not keep_all:
                await compute(transition.settle)
            transition.adopt(revision)
            return transition.effects
        raise refuse(Code.CONFLICT, f"{key} is written by another", "one writer", "ask again")

    async def reload(self, key: K) -> None:
        """Reads a key again if its last commit failed. Raises ShoalError: then it is read again later."""
        if (doubtful := self._uncertain.get(key)) is not None:
            follow_store = await self._read(key, doubtful)
            del self._uncertain[key]
            follow_store()

    async def reload_all(self) -> None:
        """As `reload`, for all keys: before steps that depend on more than one of them."""
        for key in sorted(self._uncertain, key=str):
            await self.reload(key)
