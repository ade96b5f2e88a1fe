"""Code that may end its process, asked in a child."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from shoal.agent.worker.child import answer_of_child


def _descriptors() -> list[str]:
    return sorted(each.name for each in Path("/proc/self/fd").iterdir())


def _open_files() -> list[str]:
    """What each descriptor is of, but the one that lists them."""
    with os.scandir("/proc/self/fd") as listed:
        names = [each.path for each in listed]
    return [str(Path(each).readlink()) for each in names if os.path.lexists(each)]


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


def test_a_child_holds_no_end_of_the_pipe_but_its_own() -> None:
    """Else its answer to a parent that is gone would never fail, but fill the pipe and wait."""
    before = Counter(_open_files())
    answer = answer_of_child(lambda: "\n".join(_open_files()).encode(), 30.0).decode().split("\n")
    assert [file.split(":")[0] for file in (Counter(answer) - before).elements()] == ["pipe"]


ORPHAN = """
import os, signal, threading
from shoal.agent.worker.child import answer_of_child

def orphan_itself():
    os.kill(os.getppid(), signal.SIGKILL)
    return bytes(threading.Event().wait(300))

answer_of_child(orphan_itself, 1.0)
"""


def test_a_child_ends_by_itself_where_its_parent_was_killed() -> None:
    """Its end is that of the pipe which it inherits; within the limit, or `run` raises."""
    done = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
