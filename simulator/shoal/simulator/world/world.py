"""The world of one run: virtual time, processes that can die at any step, and the record of everything that happened.

A process is a set of tasks plus the ports they hold. Every port call passes `SimProcess.gate` before its effect and
again before its answer. The process may be killed there, so every await of the real code is a possible place to die.
The tasks of a dead process are cancelled and its ports raise `ProcessDead`; nothing it does afterwards has an effect.
"""

import asyncio
import contextvars
import hashlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.simulator.world.loop import VirtualLoop
from shoal.simulator.world.rng import Rng
from shoal.types.codes import ShoalError
from shoal.types.units import Elapsed, Seconds, Wall

EPOCH = 1_700_000_000.0
"""The wall clock at the start of every run."""


class ProcessDead(asyncio.CancelledError):
    """Raised by a port of a dead process: the code unwinds as if it were cancelled, without an effect."""


@dataclass(frozen=True, slots=True)
class SimEvent:
    """One thing that happened. `kind` is dotted (`worker.ready`); checkers read nothing but events."""

    at: float
    kind: str
    facts: Mapping[str, Any]

    def __str__(self) -> str:
        facts = " ".join(f"{name}={value}" for name, value in self.facts.items())
        return f"{self.at:10.4f}  {self.kind:<22} {facts}"


@dataclass
class SimHistory:
    """The event log; two replays of one seed must have the same digest."""

    events: list[SimEvent] = field(default_factory=list)
    _hash: Any = field(default_factory=hashlib.sha256)

    def add(self, event: SimEvent) -> None:
        self.events.append(event)
        self._hash.update(f"{event.at!r} {event.kind} {sorted(event.facts.items())!r}\n".encode())

    def digest(self) -> str:
        return str(self._hash.hexdigest())


_current_process: contextvars.ContextVar["SimProcess | None"] = contextvars.ContextVar("process", default=None)


class SimProcess:
    """Tasks that live and die together. `generation` distinguishes successive lives."""

    def __init__(self, world: "SimWorld", name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.steps_to_live = 0
        """Port steps until the process dies; 0: no death is planned."""
        self._resumed: asyncio.Event | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._prune_at = 64
        self._on_death: list[Callable[[], None]] = []

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` as a task of this process; tasks that it creates belong to the process too."""
        if not self.alive:
            work.close()
            raise ProcessDead(self.name)
        context = contextvars.copy_context()
        context.run(_current_process.set, self)
        # Create the task inside the context, so that `adopt` sees the owner.
        task = context.run(self.world.loop.create_task, work, name=f"{self.name}/{name}", context=context)
        task.add_done_callback(self._on_task_done)
        return task

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(task)
        if len(self._tasks) >= self._prune_at:
            self._tasks = [known for known in self._tasks if not known.done()]
            self._prune_at = 64 + 2 * len(self._tasks)

    def on_death(self, act: Callable[[], None]) -> None:
        self._on_death.append(act)

    def check(self) -> None:
        if not self.alive:
            raise ProcessDead(self.name)

    def gate(self, where: str) -> None:
        """One step of a port. Raises ProcessDead if the process is dead or dies here."""
        if self.alive and self.steps_to_live > 0:
            self.steps_to_live -= 1
            if self.steps_to_live == 0:
                self.world.record("fault.killed", process=self.name, where=where)
                self.die()
        self.check()

    def pause(self) -> None:
        """SIGSTOP: whatever waits for a port keeps waiting until `resume`."""
        if self._resumed is None:
            self._resumed = asyncio.Event()

    @property
    def is_paused(self) -> bool:
        return self._resumed is not None

    def resume(self) -> None:
        awake, self._resumed = self._resumed, None
        if awake is not None:
            awake.set()

    async def wait_resumed(self) -> None:
        """Returns at once unless the process is stopped."""
        while self._resumed is not None:
            await self._resumed.wait()

    def die(self) -> None:
        """SIGKILL: no task runs again except to unwind, and no port answers."""
        if not self.alive:
            return
        self.alive = False
        self.steps_to_live = 0
        for task in self._tasks:
            task.cancel()
        acts, self._on_death = self._on_death, []
        for act in acts:
            act()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or not self.alive:
            return
        failure = task.exception()
        if failure is None:
            return
        self.world.record("process.failed", process=self.name, task=task.get_name(), error=repr(failure))
        if not isinstance(failure, ShoalError):
            self.world.fail(f"{task.get_name()} ended by itself with {failure!r}", failure)
        self.die()


class SimWorld:
    """Time, randomness, processes and the record of one run."""

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop = loop
        self.rng = Rng(seed)
        self.history = SimHistory()
        self.failures: list[str] = []
        self.first_failure: BaseException | None = None
        self.failed = asyncio.Event()
        loop.on_task(_register)
        loop.set_exception_handler(self._on_unhandled)

    def now(self) -> float:
        return self.loop.time()

    def record(self, kind: str, **facts: Any) -> None:
        self.history.add(SimEvent(self.loop.time(), kind, facts))

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """Report something that must never happen: the run ends here as a failure."""
        self.failures.append(f"{self.loop.time():.4f} s: {reason}")
        self.failed.set()
        if self.first_failure is None:
            self.first_failure = cause

    def call_later(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` after `seconds`, owned by no process: what network and disk do by themselves."""
        self.loop.call_later(seconds, act, context=contextvars.Context())

    def _on_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, asyncio.CancelledError):
            return
        self.fail(f"{context.get('message')}: {error!r}", error)


def _register(task: asyncio.Task[Any]) -> None:
    owner = _current_process.get()
    if owner is not None:
        owner.adopt(task)


class SimClock:
    """The clocks of one machine: elapsed time never steps, the wall clock may."""

    def __init__(self, world: SimWorld, booted_at: float = 0.0, skew: float = 0.0) -> None:
        self._world = world
        self._booted_at = booted_at
        self.skew = skew

    def now(self) -> Elapsed:
        return Elapsed(self._world.loop.time() + self._booted_at)

    def wall(self) -> Wall:
        return Wall(EPOCH + self._world.loop.time() + self.skew)

    async def sleep(self, seconds: Seconds) -> None:
        await asyncio.sleep(max(0.0, seconds))

    def step(self, seconds: float) -> None:
        """Step the wall clock."""
        self.skew += seconds

    def reboot(self, booted_at: float) -> None:
        """The machine reboots: its elapsed time starts over, at `booted_at` now."""
        self._booted_at = booted_at - self._world.loop.time()
