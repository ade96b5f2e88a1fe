"""One request in a worker, from its arrival to its answer."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnxruntime as ort

from shoal.agent.frames import Payload
from shoal.agent.worker.engine import run_options
from shoal.host.watchdog import Watchdog
from shoal.types.codes import Refusal

Parts = Sequence[bytes | memoryview]
OnAnswer = Callable[[Parts, Mapping[str, Any] | None], object]
"""Takes the answer's parts, and the stages of a traced request."""


class InferJob:
    """One request that waits or runs. It is answered once: what comes after its end is dropped."""

    def __init__(
        self,
        payload: Payload,
        origin: str,
        trace: str,
        arrived_at: float,
        deadline: float,
        on_answer: OnAnswer,
        on_refusal: Callable[[Refusal], object],
        *,
        is_metered: bool,
    ) -> None:
        self.payload = payload
        self.origin = origin
        self.is_metered = is_metered
        self.arrived_at = arrived_at
        self.deadline = deadline
        self.options: ort.RunOptions = run_options()
        # True once the caller is gone, the deadline has passed, or it was answered. Nothing answers it any more.
        self.is_over = False
        # (start of the run in the runtime, request size in elements). None outside a run. Written where it runs.
        self.current_run: tuple[float, int] | None = None
        # It runs, or is to run, on the event loop.
        self.is_inline = False
        # `traceparent` if the request is traced; empty for nearly all.
        self.trace = trace
        # End time of each stage, and the batch size. None if the request is not traced.
        self.stages: dict[str, Any] | None = {"arrive": arrived_at} if trace else None

        # Written by the thread that watches runs. Its watchdog is None until it sees the run.
        self.watchdog: Watchdog | None = None
        # The run exceeded its time limit and was told to terminate.
        self.is_stuck = False

        self._on_answer = on_answer
        self._on_refusal = on_refusal
        self._ended: threading.Event | None = None

    def answer(self, parts: Parts) -> None:
        if not self.is_over:
            self.is_over = True
            self._on_answer(parts, {"stages": self.stages} if self.stages is not None else None)

    def refuse(self, refusal: Refusal) -> None:
        if not self.is_over:
            self.is_over = True
            self._on_refusal(refusal)

    def cancel(self) -> None:
        """Its caller is gone: end the run, or never begin it."""
        self.is_over = True
        self.options.terminate = True
        if self._ended is not None:
            self._ended.set()

    def wait_cancelled(self, seconds: float) -> None:
        """Returns after `seconds`, or when the job is cancelled."""
        if seconds > 0:
            self._ended = threading.Event()
            if not self.is_over:
                self._ended.wait(seconds)
