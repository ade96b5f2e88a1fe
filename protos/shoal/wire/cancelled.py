"""What grpc tells a task that waits for a call when another one cancels that call, or closes its channel: the same
CancelledError as if the task were cancelled itself. A loop that lets it pass ends without a word."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from shoal.types.codes import Code, Refusal, ShoalError

_CALL_ENDED: Final = Refusal(Code.CANCELLED, "its call was ended from this side", "an answer", "it is tried again")


def is_this_task() -> bool:
    """Whether the CancelledError at hand is meant for who caught it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextmanager
def as_refusal() -> Iterator[None]:
    """Around a wait for a call. Raises ShoalError(CANCELLED) where the call was cancelled and this task was not."""
    try:
        yield
    except asyncio.CancelledError as cause:
        if is_this_task():
            raise
        raise ShoalError(_CALL_ENDED) from cause
