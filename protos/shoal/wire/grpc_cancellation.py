"""Tells a cancelled gRPC call from a cancelled task.

Another task may cancel a call or close its channel. In the task that waits for the call, grpc then raises
CancelledError, as if that task were cancelled itself. A loop that lets it pass would end silently.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from shoal.types.codes import Code, Refusal, ShoalError

_CALL_ENDED: Final = Refusal(Code.CANCELLED, "its call was ended from this side", "an answer", "it is tried again")


def is_task_cancelled() -> bool:
    """Whether the CancelledError that was just caught was meant for the current task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextmanager
def as_refusal() -> Iterator[None]:
    """Wraps a wait for a call. Raises ShoalError(CANCELLED) where the call was cancelled and this task was not."""
    try:
        yield
    except asyncio.CancelledError as cause:
        if is_task_cancelled():
            raise
        raise ShoalError(_CALL_ENDED) from cause
