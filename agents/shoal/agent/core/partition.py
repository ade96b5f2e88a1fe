"""What a node that is cut off from its coordinator may keep running, may start, and until when."""

from dataclasses import dataclass

from shoal.types.assignment import Assignment
from shoal.types.units import Elapsed


@dataclass(frozen=True, slots=True)
class Linked:
    pass


@dataclass(frozen=True, slots=True)
class CutOff:
    """No session with the coordinator. `since` is when this was noticed, or this process's start if there was none."""

    since: Elapsed


LinkState = Linked | CutOff


def may_run(assignment: Assignment, link_state: LinkState, now: Elapsed, *, running: bool) -> bool:
    """Whether `assignment` may continue (`running`) or be started from the persisted set (not `running`)."""
    match link_state:
        case Linked():
            return True
        case CutOff(since):
            rule = assignment.partition
            allowed = running or rule.cold_boot_serve
            return allowed and (rule.serve_s is None or now < since + rule.serve_s)


def next_serve_deadline(assignments: tuple[Assignment, ...], link_state: LinkState, now: Elapsed) -> Elapsed | None:
    """When the next assignment must stop because the node was cut off too long; None for no such time."""
    match link_state:
        case Linked():
            return None
        case CutOff(since):
            ends = [
                Elapsed(since + each.partition.serve_s) for each in assignments if each.partition.serve_s is not None
            ]
            return min((end for end in ends if end > now), default=None)
