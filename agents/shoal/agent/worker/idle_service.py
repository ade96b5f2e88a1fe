"""A worker until its first order: it answers what a spare is asked, and imports the runtime with the order.

The runtime and numpy make up more than half of a spare's memory (decision 0026). A spare of an idle node does without
them; one of a node that serves is told to import them.
"""

import asyncio
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from shoal.agent.frames import FrameMessage, FrameServer, Handler, InferCall
from shoal.agent.packing import pack
from shoal.agent.worker.messages import WorkerReport
from shoal.host import gc_freeze
from shoal.types.codes import Code, refuse

if TYPE_CHECKING:
    from shoal.agent.worker.service import WorkerService

ORDERS: Final = (
    "load", "unload", "answer", "draw", "packed", "record", "compare", "metadata", "probe", "probe_memory", "support",
)  # fmt: skip
"""Kinds of frames that are for the runtime."""

_log = structlog.get_logger(__name__)


class IdleService:
    """Handlers by frame kind, as `WorkerService` has them, which takes their place with the first order.

    `stop_requested` is set when the process must end.
    """

    def __init__(self, busy: mmap.mmap) -> None:
        self.stop_requested = asyncio.Event()
        self._busy = busy
        self._server: FrameServer | None = None
        self._service: WorkerService | None = None

    def serve_on(self, server: FrameServer) -> None:
        self._server = server

    def handlers(self) -> dict[str, Handler]:
        orders: dict[str, Handler] = {kind: partial(self._on_order, kind) for kind in ORDERS}
        return {**orders, "import": self._import, "ping": self._ping, "status": self._status, "stop": self._stop}

    def on_infer(self, call: InferCall) -> None:
        """Raises ShoalError(MODEL_NOT_READY)."""
        raise refuse(
            Code.MODEL_NOT_READY, f"{call.header.assignment} is not held here", "a ready replica", "retry elsewhere"
        )

    async def _on_order(self, kind: str, message: FrameMessage) -> FrameMessage:
        if self._service is None:
            self._service = self._import_service()
        return await self._service.handlers()[kind](message)

    async def _import(self, _: FrameMessage) -> FrameMessage:
        """Import the runtime before there is an order."""
        if self._service is None:
            self._service = self._import_service()
        return FrameMessage("imported")

    async def _ping(self, _: FrameMessage) -> FrameMessage:
        return FrameMessage("pong")

    async def _status(self, _: FrameMessage) -> FrameMessage:
        return FrameMessage("status", {}, pack(WorkerReport(())))

    async def _stop(self, _: FrameMessage) -> FrameMessage:
        self.stop_requested.set()
        return FrameMessage("stopping")

    def _import_service(self) -> "WorkerService":
        """The service, which answers from now on."""
        with _capture_stderr():
            # starts threads, so only after isolation
            from shoal.agent.worker.service import WorkerService

        service = WorkerService(self._busy, self.stop_requested)
        gc_freeze.freeze()
        if self._server is not None:
            service.serve_on(self._server)
            self._server.handlers = service.handlers()
            self._server.on_infer = service.on_infer
        return service


@contextmanager
def _capture_stderr() -> Iterator[None]:
    """Turn what native code writes to standard error meanwhile into events: the runtime prints coloured warnings as it
    loads."""
    own, held = os.dup(2), os.memfd_create("stderr")
    os.dup2(held, 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)
        os.lseek(held, 0, os.SEEK_SET)
        with os.fdopen(held, errors="replace") as lines:
            for line in lines:
                _log.warning("runtime_message_logged", message=line.rstrip("\n"))
