"""Code that may end its process, asked in a child."""

import os
import signal
import threading
import time
from pathlib import Path

from shoal.agent.worker.child import answer_of_child


def _descriptors() -> list[str]:
    return sorted(each.name for each in Path("/proc/self/fd").iterdir())


def test_a_child_answers_as_much_as_it_likes() -> None:
    wanted = os.urandom(2**20)
    assert answer_of_child(lambda: wanted, 30.0) == wanted


def test_a_child_that_crashes_or_raises_answers_nothing() -> None:
    def crash() -> bytes:
        os.kill(os.getpid(), signal.SIGSEGV)
        return b"never"

    def refuse() -> bytes:
        raise ValueError("no")

    assert answer_of_child(crash, 30.0) == b""
    assert answer_of_child(refuse, 30.0) == b""


def test_a_child_that_waits_in_vain_is_ended() -> None:
    begun = time.perf_counter()
    assert answer_of_child(lambda: bytes(threading.Event().wait(600)), 0.2) == b""
    assert time.perf_counter() - begun < 60


def test_no_child_and_no_descriptor_is_left() -> None:
    before = _descriptors()
    answer_of_child(lambda: b"", 30.0)
    answer_of_child(lambda: os._exit(3), 30.0)
    assert _descriptors() == before
