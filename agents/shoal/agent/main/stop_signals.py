"""SIGTERM and SIGINT before there is a supervisor that could stop cleanly.

An agent that exited at once would leave running the front and the workers of the previous agent, which it should have
adopted. Nothing would supervise them.
"""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Records stop signals from its construction on."""

    def __init__(self) -> None:
        # The signal received last; 0: none.
        self._signal_number = 0
        self._previous_handlers = self._install()

    @contextmanager
    def default_handlers(self) -> Iterator[None]:
        """Inside the block, signals have their previous effect. A signal received before it takes that effect now."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        if self._signal_number:
            signal.raise_signal(self._signal_number)
        yield
        self._install()

    def hand_over(self, request: Callable[[], None]) -> None:
        """Call `request` on each signal from now on, and now if one was received before. Call this in an event loop."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, request)
        if self._signal_number:
            request()

    def _install(self) -> dict[int, Any]:
        """Install the handlers. Returns the previous ones."""
        return {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def _on_signal(self, number: int, _: object) -> None:
        self._signal_number = number
