"""An asyncio event loop on virtual time: nothing waits, the clock jumps to the next timer.

The real controllers and supervisor run on it unchanged. There are no sockets, no threads and no child processes here:
code that asks for one fails at once and loudly, because it would escape the seed. Tasks and futures hash by the order
of their creation, so that a set of them is walked in the same order in every replay.
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
    """No task can run and no timer is set, yet the run has not ended."""


class Livelock(RuntimeError):
    """Tasks keep waking each other and time stands still."""


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
        self._number = number  # first of all: asyncio puts the task into a set while it is made
        super().__init__(coro, **named)

    def __hash__(self) -> int:
        return self._number


class _Jump:
    """Stands where the selector stands: waiting is a jump of the clock."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        self._loop.jump(timeout)
        return []

    def close(self) -> None:
        return None


class VirtualLoop(asyncio.BaseEventLoop):
    """Raises Deadlock, Livelock or EscapedSimulation out of `run_until_complete`."""

    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._stalled = 0
        self._created = 0
        self._clock_resolution = 1e-9
        self._selector = _Jump(self)
        self._on_task: Callable[[asyncio.Task[Any]], None] | None = None

    def time(self) -> float:
        return self._now

    def jump(self, timeout: float | None) -> None:
        """Called once an iteration with the time to the next timer; None: there is nothing left to run."""
        if timeout is None:
            raise Deadlock(f"at {self._now:.6f} s nothing can run: {_waiting(self)}")
        if timeout > 0:
            self._now = max(self._now, self._scheduled[0].when())
            self.moved()
            return
        self._stalled += 1
        if self._stalled > STEPS_WITHOUT_TIME:
            raise Livelock(f"{self._stalled} steps at {self._now:.6f} s: {_waiting(self)}")

    def moved(self) -> None:
        self._stalled = 0

    def on_task(self, observe: Callable[[asyncio.Task[Any]], None]) -> None:
        """`observe` sees every new task, in the context of whoever creates it."""
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
        return self.call_soon(callback, *args, context=context)  # there is one thread; asyncio ends generators this way

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


def _waiting(loop: asyncio.AbstractEventLoop) -> str:
    names = sorted(task.get_name() for task in asyncio.all_tasks(loop) if not task.done())
    return f"{len(names)} tasks wait: {', '.join(names[:12])}"


def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run `main` to its end on a fresh loop; whatever it leaves behind is cancelled."""
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
        loop.moved()
        loop.run_until_complete(_yield())
    raise RuntimeError(f"tasks that ignore their cancellation: {_waiting(loop)}")


async def _yield() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
