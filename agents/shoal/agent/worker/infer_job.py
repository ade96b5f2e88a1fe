"""One request in a worker, from its arrival to its answer."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from shoal.agent.frames import Payload
from shoal.agent.worker.engine_run import EngineRun
from shoal.agent.worker.padding import PaddedAxis
from shoal.agent.worker.request_reader import InferRequest
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
        # As in `deadline_heap.Waiting`.
        self.due = deadline
        # True once the caller is gone, the deadline has passed, or it was answered. Nothing answers it any more.
        self.is_over = False
        # The request, where it was read before its turn.
        self.request: InferRequest | None = None
        # As in `job_queue.QueuedJob`.
        self.group: Hashable | None = None
        self.rows = 1
        # Along which it may be filled up, to share a batch with longer ones. None: it may not.
        self.axis: PaddedAxis | None = None
        self.place: list[Any] | None = None
        self.start_by = arrived_at
        # The run that it is part of. None before.
        self.run: EngineRun | None = None
        # Seconds of its run, if it ran alone.
        self.run_s = 0.0
        # It runs, or is to run, on the event loop.
        self.is_inline = False
        # `traceparent` if the request is traced; empty for nearly all.
        self.trace = trace
        # End time of each stage, and the batch size. None if the request is not traced.
        self.stages: dict[str, Any] | None = {"arrive": arrived_at} if trace else None

        self._on_answer = on_answer
        self._on_refusal = on_refusal

    def answer(self, parts: Parts) -> None:
        if not self.is_over:
            self.is_over = True
            self._on_answer(parts, {"stages": self.stages} if self.stages is not None else None)

    def refuse(self, refusal: Refusal) -> None:
        if not self.is_over:
            self.is_over = True
            self._on_refusal(refusal)

    def cancel(self) -> None:
        """Its caller is gone: end its run, unless others are part of it."""
        self.is_over = True
        if self.run is not None:
            self.run.on_job_over()
