"""The world of one run: virtual time, processes that can die at any step, and the record of all that happened.

A process is a set of tasks plus the ports they hold. Every port call passes `Process.gate`, before its effect and again
before its answer: there the process may be struck dead, so each await of the real code is a place to die. A dead
process's tasks are cancelled and its ports raise `Dead`; nothing it does afterwards has an effect.
"""

import asyncio
import contextvars
import hashlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.simulator.chance import Chance
from shoal.simulator.loop import VirtualLoop
from shoal.types.codes import ShoalError
from shoal.types.units import Elapsed, Seconds, Wall

EPOCH = 1_700_000_000.0
"""The wall clock at the start of every run."""


class Dead(asyncio.CancelledError):
    """A port of a process that has died: the code unwinds as if it were cancelled, without an effect."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. `kind` is dotted (`worker.ready`); the judge reads nothing but these."""

    at: float
    kind: str
    facts: Mapping[str, Any]

    def __str__(self) -> str:
        facts = " ".join(f"{name}={value}" for name, value in self.facts.items())
        return f"{self.at:10.4f}  {self.kind:<22} {facts}"


@dataclass
class History:
    """The event log; its digest is what two replays of one seed must agree on."""

    events: list[Event] = field(default_factory=list)
    _hash: Any = field(default_factory=hashlib.sha256)

    def add(self, event: Event) -> None:
        self.events.append(event)
        self._hash.update(f"{event.at!r} {event.kind} {sorted(event.facts.items())!r}\n".encode())

    def digest(self) -> str:
        return str(self._hash.hexdigest())


_running: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)


class Process:
    """Tasks that live and die together. `generation` tells one life from the next."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.fuse = 0
        """Port steps left to live; 0: no such plan."""
        self._awake: asyncio.Event | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._prune_at = 64
        self._on_death: list[Callable[[], None]] = []

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` as a task of this process; what it creates belongs to the process too."""
        if not self.alive:
            work.close()
            raise Dead(self.name)
        context = contextvars.copy_context()
        context.run(_running.set, self)
        # The task is created inside the context, so that `adopt` sees the owner.
        task = context.run(self.world.loop.create_task, work, name=f"{self.name}/{name}", context=context)
        task.add_done_callback(self._ended)
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
            raise Dead(self.name)

    def gate(self, where: str) -> None:
        """One step of a port. Raises Dead when the process is dead or dies right here."""
        if self.alive and self.fuse > 0:
            self.fuse -= 1
            if self.fuse == 0:
                self.world.record("fault.killed", process=self.name, where=where)
                self.die()
        self.check()

    def stop(self) -> None:
        """SIGSTOP: what waits for a port goes on waiting until `go_on`."""
        if self._awake is None:
            self._awake = asyncio.Event()

    @property
    def is_stopped(self) -> bool:
        return self._awake is not None

    def go_on(self) -> None:
        awake, self._awake = self._awake, None
        if awake is not None:
            awake.set()

    async def awake(self) -> None:
        """Returns at once unless the process is stopped."""
        while self._awake is not None:
            await self._awake.wait()

    def die(self) -> None:
        """SIGKILL: no task runs again but to unwind, and no port answers."""
        if not self.alive:
            return
        self.alive = False
        self.fuse = 0
        for task in self._tasks:
            task.cancel()
        acts, self._on_death = self._on_death, []
        for act in acts:
            act()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or not self.alive:
            return
        failure = task.exception()
        if failure is None:
            return
        self.world.record("process.failed", process=self.name, task=task.get_name(), error=repr(failure))
        if not isinstance(failure, ShoalError):
            self.world.fail(f"{task.get_name()} ended by itself with {failure!r}", failure)
        self.die()


class World:
    """Time, chance, processes and the record of one run."""

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop = loop
        self.chance = Chance(seed)
        self.history = History()
        self.failures: list[str] = []
        self.first_failure: BaseException | None = None
        self.failed = asyncio.Event()
        loop.on_task(_register)
        loop.set_exception_handler(self._unhandled)

    def now(self) -> float:
        return self.loop.time()

    def record(self, kind: str, **facts: Any) -> None:
        self.history.add(Event(self.loop.time(), kind, facts))

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """Something that must never happen: the run ends here, and is judged a failure."""
        self.failures.append(f"{self.loop.time():.4f} s: {reason}")
        self.failed.set()
        if self.first_failure is None:
            self.first_failure = cause

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Do `act` after `seconds`, owned by nobody: what the network and the disk do by themselves."""
        self.loop.call_later(seconds, act, context=contextvars.Context())

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, asyncio.CancelledError):
            return
        self.fail(f"{context.get('message')}: {error!r}", error)


def _register(task: asyncio.Task[Any]) -> None:
    owner = _running.get()
    if owner is not None:
        owner.adopt(task)


class Clock:
    """One machine's clocks: elapsed time never steps, the wall clock may."""

    def __init__(self, world: World, booted_at: float = 0.0, skew: float = 0.0) -> None:
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
        """The wall clock jumps."""
        self.skew += seconds

    def reboot(self, booted_at: float) -> None:
        """The machine starts anew: its elapsed time begins again, `booted_at` by now."""
        self._booted_at = booted_at - self._world.loop.time()
