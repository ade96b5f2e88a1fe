"""Tasks of the worker pool that run beside its callers."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import structlog

_log = structlog.get_logger(__name__)


class BackgroundTasks:
    """Keeps each task until it is done, because the event loop does not, and logs an error that nobody awaits."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    async def cancel(self) -> None:
        """Cancel the tasks that run now, and wait until they are done."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        with suppress(asyncio.CancelledError):
            error = task.exception()
            if error is not None:
                _log.error("task_failed", error=repr(error))
