"""What time it is, where dates must be judged: the machine's clock when it was last trusted, and elapsed time since.

The machine's clock is a claim. It is followed while it stays near what elapsed time says; when it jumps, the agent goes
on from what it believed, tells it, and believes the new time once two sources that do not depend on each other say the
same, or an operator does. The clock that jumped is one of them: somebody has set it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shoal.types.units import Elapsed, Seconds, Wall

ALLOWANCE_S: Final = 30.0
DRIFT: Final = 5e-4
"""Seconds a second: the fastest that time services turn a clock without a step."""
OPERATOR: Final = "operator"
MACHINE: Final = "machine"
CONFIRMING: Final = 2


@dataclass(frozen=True, slots=True)
class Anchor:
    """At `at` it was `wall`."""

    at: Elapsed
    wall: Wall


@dataclass(frozen=True, slots=True)
class Kept:
    """What the next run must know. boot: the system's id of this boot. ticks: seconds since that boot.

    elapsed, wall: both as of then. heard: the coordinator's last word; None when there never was one. cut_wall: what
    time it was then, for a node that is cut off; None while it is linked.
    """

    boot: str
    ticks: Seconds
    elapsed: Elapsed
    wall: Wall
    heard: Elapsed | None = None
    cut_wall: Wall | None = None


def resume(kept: Kept | None, boot: str, ticks: Seconds) -> Elapsed:
    """The elapsed clock at the start of a run: within one boot exact, after another what the machine was up since. The
    time for which it was off is not counted: nothing that can be trusted has measured it."""
    if kept is None:
        return Elapsed(0.0)
    same = boot == kept.boot != "" and ticks >= kept.ticks
    return Elapsed(kept.elapsed + (ticks - kept.ticks if same else ticks))


def first(kept: Kept | None, boot: str, now: Elapsed, machine: Wall, least: Wall) -> Anchor:
    """What to believe at the start of a run. least: it cannot be earlier (when this node's certificate was issued).

    The machine's clock, unless it is behind what was already seen, or has jumped within one boot.
    """
    if kept is None:
        return Anchor(now, max(machine, least))
    expected = Wall(kept.wall + (now - kept.elapsed))
    behind = machine < expected - ALLOWANCE_S
    jumped = boot == kept.boot != "" and machine > expected + ALLOWANCE_S
    return Anchor(now, max(expected if behind or jumped else machine, kept.wall, least))


def believed(anchor: Anchor, machine: Wall, now: Elapsed) -> Wall:
    """The machine's time while it is near the anchor's, else the anchor's; never before the anchor."""
    return max(_expected(anchor, now) if jump(anchor, machine, now) else machine, anchor.wall)


def jump(anchor: Anchor, machine: Wall, now: Elapsed) -> Seconds | None:
    """How far the machine's clock is from what it should be, where that is beyond the allowance."""
    difference = machine - _expected(anchor, now)
    allowed = ALLOWANCE_S + DRIFT * (now - anchor.at)
    return Seconds(difference) if abs(difference) > allowed else None


def told(claims: Mapping[str, Anchor], anchor: Anchor, now: Elapsed) -> Anchor | None:
    """The anchor to go on from, once enough of the claims (by their source, each its newest) contradict this one and
    agree; None while they do not. An operator is enough alone."""
    if OPERATOR in claims:
        return Anchor(now, _expected(claims[OPERATOR], now))
    said = sorted(_expected(claim, now) for claim in claims.values())
    for earliest, latest in zip(said, said[CONFIRMING - 1 :], strict=False):
        if latest - earliest <= ALLOWANCE_S and jump(anchor, earliest, now):
            return Anchor(now, earliest)
    return None


def _expected(anchor: Anchor, now: Elapsed) -> Wall:
    return Wall(anchor.wall + (now - anchor.at))
