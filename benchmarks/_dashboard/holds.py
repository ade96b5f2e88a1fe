"""For how long the coordinator's loop gave nobody else a turn, and where it was meanwhile."""

import asyncio
import gc
import sys
import threading
import time
from types import FrameType
from typing import Any, Final

from _dashboard.figures import LoopHold

TURN_S: Final = 0.005
LOOK_S: Final = 0.01
"""How often a thread looks where a loop is that is held."""
HELD_S: Final = 0.02
"""Processor time from which on it looks."""
FRAMES: Final = 6


class HoldMonitor:
    """Of the loop of the main thread. A thread of its own looks where that is; a collection of garbage lets no thread
    look, so it is measured by itself."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident or 0
        self._clock = time.pthread_getcpuclockid(self._main)
        self._used = 0.0
        """The loop's processor time at its last turn."""
        self._seen = (0.0, "")
        """Since then: the latest look, with the processor time until it."""
        self._collecting = 0.0
        """The loop's processor time when the collection under way began."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="holds", daemon=True)
        self.reset()

    def reset(self) -> None:
        self.found = LoopHold()

    async def run(self) -> None:
        """Until cancelled."""
        gc.callbacks.append(self._on_collection)
        self._used = time.thread_time()
        self._thread.start()
        try:
            while True:
                began = time.monotonic()
                await asyncio.sleep(TURN_S)
                now = time.thread_time()
                self._on_turn(now - self._used, time.monotonic() - began - TURN_S)
                self._used, self._seen = now, (0.0, "")
        finally:
            self._is_over.set()
            gc.callbacks.remove(self._on_collection)

    def _on_turn(self, cpu_s: float, clock_s: float) -> None:
        before = self.found
        is_longest = 1e3 * cpu_s > before.cpu_ms
        self.found = LoopHold(
            max(before.cpu_ms, 1e3 * cpu_s),
            max(before.clock_ms, 1e3 * clock_s),
            before.collection_ms,
            self._seen[1] if is_longest else before.held_in,
        )

    def _on_collection(self, phase: str, _: dict[str, Any]) -> None:
        if threading.get_ident() != self._main:
            return
        if phase == "start":
            self._collecting = time.thread_time()
        else:
            took, before = 1e3 * (time.thread_time() - self._collecting), self.found
            longest = max(before.collection_ms, took)
            self.found = LoopHold(before.cpu_ms, before.clock_ms, longest, before.held_in)

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_S):
            held = time.clock_gettime(self._clock) - self._used
            frame = sys._current_frames().get(self._main) if held >= HELD_S else None
            # One that waits for events again is held no more, and has only not come to its next turn yet.
            if frame is not None and frame.f_code.co_name != "select":
                self._seen = held, where(frame)


def where(frame: FrameType) -> str:
    """`frame` and its callers. Reads no source: each file read gives the interpreter up, and a loop that is held gives
    it back only after a switch interval."""
    named: list[str] = []
    at: FrameType | None = frame
    while at is not None and len(named) < FRAMES:
        named.append(f"{at.f_code.co_name}:{at.f_lineno}")
        at = at.f_back
    return " < ".join(named)
