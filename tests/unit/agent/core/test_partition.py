"""Cut off from the coordinator."""

import pytest

from harness.builders.agent_values import assignment, at
from shoal.agent.core.partition import CutOff, Linked, may_run, next_serve_deadline
from shoal.types.assignment import Assignment
from shoal.types.units import Seconds
from shoal.types.workload import PartitionRule

FOR_EVER = assignment("a-1")
AN_HOUR = assignment("a-2", partition=PartitionRule(serve_s=Seconds(3600.0)))
NO_BOOT = assignment("a-3", partition=PartitionRule(cold_boot_serve=False))


@pytest.mark.parametrize(
    ("asked", "now", "running", "allowed"),
    [
        (FOR_EVER, 1e9, True, True),
        (FOR_EVER, 1e9, False, True),
        (AN_HOUR, 3699.0, True, True),
        (AN_HOUR, 3699.0, False, True),
        (AN_HOUR, 3700.0, True, False),
        (NO_BOOT, 200.0, False, False),
        (NO_BOOT, 200.0, True, True),
    ],
)
def test_the_rule_decides_while_cut_off(asked: Assignment, now: float, running: bool, allowed: bool) -> None:
    assert may_run(asked, CutOff(at(100)), at(now), running=running) is allowed
    assert may_run(asked, Linked(), at(now), running=running) is True


def test_the_next_end_is_known_beforehand() -> None:
    both = (FOR_EVER, AN_HOUR, assignment("a-4", partition=PartitionRule(serve_s=Seconds(60.0))))
    assert next_serve_deadline(both, CutOff(at(100)), at(100)) == 160.0
    assert next_serve_deadline(both, CutOff(at(100)), at(160)) == 3700.0
    assert next_serve_deadline(both, CutOff(at(100)), at(3700)) is None
    assert next_serve_deadline(both, Linked(), at(100)) is None
    assert next_serve_deadline((FOR_EVER,), CutOff(at(100)), at(100)) is None
