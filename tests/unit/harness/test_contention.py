"""What is taken for the doing of other programs: waiting for a processor, and nothing else."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from harness.measure.contention import RunDelay
from harness.wait import wait_until

SPIN = "print(flush=True)\nwhile True: pass"
SLEEP = "import sys\nprint(flush=True)\nsys.stdin.read()"


@contextmanager
def program(text: str, processor: int) -> Iterator[int]:
    """Its process, which runs on this processor alone."""
    begun = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        os.sched_setaffinity(begun.pid, {processor})
        assert begun.stdout is not None
        begun.stdout.readline()
        yield begun.pid
    finally:
        begun.kill()
        begun.communicate()


def test_who_shares_a_processor_waits_for_it_and_who_sleeps_does_not() -> None:
    processor = min(os.sched_getaffinity(0))
    with ExitStack() as opened:
        busy = [opened.enter_context(program(SPIN, processor)) for _ in range(2)]
        asleep = opened.enter_context(program(SLEEP, processor))
        shared, idle = RunDelay(*busy), RunDelay(asleep)
        wait_until(lambda: shared.seconds() > 0.5, 60.0, "half a second of waiting for each other")
        assert idle.seconds() < 0.1
        since_their_start = RunDelay()
        since_their_start.add(*busy)
        assert since_their_start.seconds() > shared.seconds()


def test_what_has_ended_counts_as_it_was_last_seen() -> None:
    processor = min(os.sched_getaffinity(0))
    with program(SPIN, processor), program(SPIN, processor) as ending:
        delay = RunDelay(ending)
        seen = wait_until(lambda: delay.seconds() > 0.1 and delay.seconds(), 60.0, "some waiting")
    assert delay.seconds() >= seen
