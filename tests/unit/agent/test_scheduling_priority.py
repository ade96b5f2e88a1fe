"""A supervisor is behind what it starts."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from shoal.agent import scheduling_priority

_ITSELF = "os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)"


def output_of(program: str, command: Sequence[str] = ()) -> list[list[int]]:
    """What a process of its own printed: a policy and a nice value for each that it looked at."""
    imports = "import json, os, subprocess, sys, threading\nfrom shoal.agent import scheduling_priority"
    whole = f"{imports}\nseen = []\n{program}\n"
    done = subprocess.run(
        [*command, sys.executable, "-c", whole + "print(json.dumps(seen))"], capture_output=True, text=True, check=True
    )
    found: list[list[int]] = json.loads(done.stdout)
    return found


CHILD = f"""
def child(first):
    held = subprocess.Popen(
        [sys.executable, "-c", "import json, os; input(); print(json.dumps([{_ITSELF}]))"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if first:
        scheduling_priority.restore_child_priority(held.pid)
    seen.append(json.loads(held.communicate("go\\n")[0]))
"""


@pytest.mark.skipif(
    not scheduling_priority.may_restore_priority(), reason="needs a limit for nice values that allows coming back"
)
def test_the_supervisor_and_its_threads_go_behind_and_its_children_do_not() -> None:
    program = f"""{CHILD}
scheduling_priority.lower_own_priority()
seen.append([{_ITSELF}])
thread = threading.Thread(target=lambda: seen.append([{_ITSELF}]))
thread.start()
thread.join()
child(first=True)
child(first=False)
"""
    own, thread, first, inherits = output_of(program)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    assert own == thread == inherits == [os.SCHED_BATCH, nice + scheduling_priority.SUPERVISOR_NICE]
    assert first == [os.SCHED_OTHER, nice]


def test_who_may_not_come_back_only_interrupts_nobody() -> None:
    program = f"""{CHILD}
scheduling_priority.may_restore_priority = lambda: False
scheduling_priority.lower_own_priority()
seen.append([{_ITSELF}])
child(first=True)
"""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    assert output_of(program) == [[os.SCHED_BATCH, nice], [os.SCHED_OTHER, nice]]


@pytest.mark.parametrize(("option", "policy"), [("--idle", os.SCHED_IDLE), ("--batch", os.SCHED_BATCH)])
def test_who_was_started_under_another_policy_stays_there(option: str, policy: int) -> None:
    program = f"""{CHILD}
scheduling_priority.lower_own_priority()
seen.append([{_ITSELF}])
child(first=True)
"""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    assert output_of(program, ("chrt", option, "0")) == [[policy, nice]] * 2


def test_a_child_that_is_gone_is_no_error() -> None:
    assert (
        output_of("scheduling_priority.lower_own_priority()\nscheduling_priority.restore_child_priority(2**22)") == []
    )


def test_who_never_went_behind_leaves_its_children_alone() -> None:
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    assert output_of(f"{CHILD}\nchild(first=True)") == [[os.SCHED_OTHER, nice]]
