"""SIGTERM and SIGINT, from before there is a supervisor that could be asked.

One that ended at once then would leave the front and the workers of the one before, which it came to adopt: they would
serve on with nobody there.
"""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

NUMBERS: Final = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Notes from now on that it was asked."""

    def __init__(self) -> None:
        self._asked = False
        self._note()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Meanwhile, or where it was asked before, the process ends as any other. Raises KeyboardInterrupt."""
        for number in NUMBERS:
            signal.signal(number, _interrupt)
        if self._asked:
            raise KeyboardInterrupt
        yield
        self._note()

    def hand_over(self, request: Callable[[], None]) -> None:
        """In a loop: it is called from now on, and now where it was asked before."""
        loop = asyncio.get_running_loop()
        for number in NUMBERS:
            loop.add_signal_handler(number, request)
        if self._asked:
            request()

    def _note(self) -> None:
        for number in NUMBERS:
            signal.signal(number, lambda *_: self._ask())

    def _ask(self) -> None:
        self._asked = True


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
