"""An asyncio event loop on virtual time: nothing waits, the clock jumps to the next timer.

The real controllers and supervisor run on it unchanged. It has no sockets, threads or child processes: code that asks
for one fails at once with EscapedSimulation, because the seed would not determine the result. Tasks and futures hash by
the order of their creation, so that iterating over a set of them has the same order in every replay.
"""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from typing import Any, NoReturn, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STEPS_WITHOUT_TIME = 200_000


class Deadlock(RuntimeError):
    """No task can run and no timer is set, but the run has not ended."""


class Livelock(RuntimeError):
    """Tasks keep waking each other while time stands still."""


class EscapedSimulation(RuntimeError):
    """Code under simulation asked for a thread, a socket or a child process."""


class _Future(asyncio.Future[Any]):
    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class _Task(asyncio.Task[Any]):
    def __init__(self, number: int, coro: Any, **named: Any) -> None:
        self._number = number  # first: asyncio adds the task to a set during construction
        super().__init__(coro, **named)

    def __hash__(self) -> int:
        return self._number


class _VirtualSelector:
    """Replaces the selector: waiting advances the clock."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        self._loop.advance(timeout)
        return []

    def close(self) -> None:
        return None


class VirtualLoop(asyncio.BaseEventLoop):
    """Raises Deadlock, Livelock or EscapedSimulation out of `run_until_complete`."""

    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._steps_at_this_time = 0
        self._created = 0
        self._clock_resolution = 1e-9
        self._selector = _VirtualSelector(self)
        self._on_task: Callable[[asyncio.Task[Any]], None] | None = None

    def time(self) -> float:
        return self._now

    def advance(self, timeout: float | None) -> None:
        """Called once per iteration with the seconds to the next timer; None: nothing is left to run."""
        if timeout is None:
            raise Deadlock(f"at {self._now:.6f} s nothing can run: {_describe_waiting(self)}")
        if timeout > 0:
            self._now = max(self._now, self._scheduled[0].when())
            self.reset_stall()
            return
        self._steps_at_this_time += 1
        if self._steps_at_this_time > STEPS_WITHOUT_TIME:
            raise Livelock(f"{self._steps_at_this_time} steps at {self._now:.6f} s: {_describe_waiting(self)}")

    def reset_stall(self) -> None:
        self._steps_at_this_time = 0

    def on_task(self, observe: Callable[[asyncio.Task[Any]], None]) -> None:
        """`observe` sees every new task, in the context of its creator."""
        self._on_task = observe

    def create_future(self) -> asyncio.Future[Any]:
        self._created += 1
        return _Future(self._created, self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        self._created += 1
        label = str(name) if name is not None else f"task-{self._created}"
        task: Any = _Task(self._created, coro, loop=self, name=label, context=context)
        if self._on_task is not None:
            self._on_task(task)
        return task  # type: ignore[no-any-return]

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(
            callback, *args, context=context
        )  # there is only one thread; asyncio closes generators this way

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        raise EscapedSimulation(f"a thread for {func}: blocking work belongs in an adapter")

    async def getaddrinfo(self, *args: Any, **named: Any) -> NoReturn:
        raise EscapedSimulation("a name lookup")

    async def create_connection(self, *args: Any, **named: Any) -> NoReturn:
        raise EscapedSimulation("a connection")

    async def create_server(self, *args: Any, **named: Any) -> NoReturn:
        raise EscapedSimulation("a listening socket")

    async def subprocess_exec(self, *args: Any, **named: Any) -> NoReturn:
        raise EscapedSimulation("a child process")

    async def subprocess_shell(self, *args: Any, **named: Any) -> NoReturn:
        raise EscapedSimulation("a child process")

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        return None


def _describe_waiting(loop: asyncio.AbstractEventLoop) -> str:
    names = sorted(task.get_name() for task in asyncio.all_tasks(loop) if not task.done())
    return f"{len(names)} tasks wait: {', '.join(names[:12])}"


def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run `main` to its end on a fresh loop and cancel whatever tasks it leaves behind."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(loop.create_task(main(loop), name="main"))
    finally:
        try:
            _cancel_all(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    for _ in range(50):
        pending = sorted(asyncio.all_tasks(loop), key=hash)
        if not pending:
            return
        for task in pending:
            task.cancel()
        loop.reset_stall()
        loop.run_until_complete(_yield())
    raise RuntimeError(f"tasks that ignore their cancellation: {_describe_waiting(loop)}")


async def _yield() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
