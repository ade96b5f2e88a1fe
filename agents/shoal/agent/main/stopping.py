"""SIGTERM and SIGINT, from before there is a supervisor that could be asked.

One that ended at once then would leave the front and the workers of the one before, which it came to adopt: they would
serve on with nobody there.
"""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

NUMBERS: Final = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Notes from now on that it was asked."""

    def __init__(self) -> None:
        self._asked = 0
        """By which signal."""
        self._before = self._note()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Meanwhile, or where it was asked before, a signal does what it does to any other process."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._asked:
            signal.raise_signal(self._asked)
        yield
        self._note()

    def hand_over(self, request: Callable[[], None]) -> None:
        """In a loop: it is called from now on, and now where it was asked before."""
        loop = asyncio.get_running_loop()
        for number in NUMBERS:
            loop.add_signal_handler(number, request)
        if self._asked:
            request()

    def _note(self) -> dict[int, Any]:
        """What each did so far."""
        return {number: signal.signal(number, self._ask) for number in NUMBERS}

    def _ask(self, number: int, _: object) -> None:
        self._asked = number
