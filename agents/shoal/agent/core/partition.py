"""Cut off from the coordinator: what may go on, what may start, and until when."""

from dataclasses import dataclass

from shoal.types.assignment import Assignment
from shoal.types.units import Elapsed


@dataclass(frozen=True, slots=True)
class Linked:
    pass


@dataclass(frozen=True, slots=True)
class CutOff:
    """since: the last word from the coordinator, or this process's start when there was none."""

    since: Elapsed


Sight = Linked | CutOff


def may_run(asked: Assignment, sight: Sight, now: Elapsed, *, running: bool) -> bool:
    """Whether `asked` may go on (running) or be started from the persisted set (not running)."""
    match sight:
        case Linked():
            return True
        case CutOff(since):
            rule = asked.partition
            allowed = running or rule.cold_boot_serve
            return allowed and (rule.serve_s is None or now < since + rule.serve_s)


def ends_at(assignments: tuple[Assignment, ...], sight: Sight, now: Elapsed) -> Elapsed | None:
    """When the next of them must stop for being cut off too long."""
    match sight:
        case Linked():
            return None
        case CutOff(since):
            ends = [
                Elapsed(since + each.partition.serve_s) for each in assignments if each.partition.serve_s is not None
            ]
            return min((end for end in ends if end > now), default=None)
