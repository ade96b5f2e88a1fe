"""The time by which dates are judged: the machine's clock when it was last trusted, plus elapsed time.

The machine's clock is only a claim. It is followed while it stays near what elapsed time predicts. When it jumps, the
agent continues from its own time and reports the jump. It accepts the new time once two independent sources agree on
it, or an operator confirms it. The clock that jumped is one of the sources, because somebody has set it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shoal.types.units import Elapsed, Seconds, Wall

ALLOWANCE_S: Final = 30.0
DRIFT: Final = 5e-4
"""Seconds per second: the fastest that time services adjust a clock without a step."""
OPERATOR: Final = "operator"
MACHINE: Final = "machine"
REQUIRED_SOURCES: Final = 2


@dataclass(frozen=True, slots=True)
class ClockAnchor:
    """The wall time at one moment of the elapsed clock."""

    at: Elapsed
    wall: Wall


@dataclass(frozen=True, slots=True)
class SavedClock:
    """Clock state that the next run of the agent needs."""

    # The system's id of the boot at which this was saved; empty where it has none.
    boot: str
    # Seconds since that boot.
    ticks: Seconds
    # The agent's elapsed clock when this was saved.
    elapsed: Elapsed
    # The trusted wall time when this was saved.
    wall: Wall
    # Elapsed time of the coordinator's last message; None before the first.
    last_contact: Elapsed | None = None
    # For a node that is cut off, the wall time when that began; None while it is linked.
    cutoff_wall: Wall | None = None


def resume_elapsed(saved: SavedClock | None, boot: str, ticks: Seconds) -> Elapsed:
    """The elapsed clock at the start of a run.

    It is exact within one boot. After another boot it adds the machine's uptime only: nothing that can be trusted has
    measured how long the machine was off.
    """
    if saved is None:
        return Elapsed(0.0)
    same = boot == saved.boot != "" and ticks >= saved.ticks
    return Elapsed(saved.elapsed + (ticks - saved.ticks if same else ticks))


def initial_anchor(saved: SavedClock | None, boot: str, now: Elapsed, machine: Wall, least: Wall) -> ClockAnchor:
    """The anchor at the start of a run: the machine's clock, unless that is behind what was already seen or has jumped
    within one boot.

    `least` is a lower bound: when this node's certificate was issued.
    """
    if saved is None:
        return ClockAnchor(now, max(machine, least))
    expected = Wall(saved.wall + (now - saved.elapsed))
    behind = machine < expected - ALLOWANCE_S
    jumped = boot == saved.boot != "" and machine > expected + ALLOWANCE_S
    return ClockAnchor(now, max(expected if behind or jumped else machine, saved.wall, least))


def trusted_wall(anchor: ClockAnchor, machine: Wall, now: Elapsed) -> Wall:
    """The machine's time while it is near what the anchor predicts, else the prediction; never before the anchor."""
    return max(_expected_wall(anchor, now) if clock_jump(anchor, machine, now) else machine, anchor.wall)


def clock_jump(anchor: ClockAnchor, machine: Wall, now: Elapsed) -> Seconds | None:
    """Machine's clock minus the predicted time, seconds; None where it is within the allowance."""
    difference = machine - _expected_wall(anchor, now)
    allowed = ALLOWANCE_S + DRIFT * (now - anchor.at)
    return Seconds(difference) if abs(difference) > allowed else None


def next_anchor(claims: Mapping[str, ClockAnchor], anchor: ClockAnchor, now: Elapsed) -> ClockAnchor | None:
    """The anchor to continue from once enough claims contradict the current one and agree; None until then.

    `claims` holds the newest claim of each source. An operator's claim is enough alone.
    """
    if OPERATOR in claims:
        return ClockAnchor(now, _expected_wall(claims[OPERATOR], now))
    said = sorted(_expected_wall(claim, now) for claim in claims.values())
    for earliest, latest in zip(said, said[REQUIRED_SOURCES - 1 :], strict=False):
        if latest - earliest <= ALLOWANCE_S and clock_jump(anchor, earliest, now):
            return ClockAnchor(now, earliest)
    return None


def _expected_wall(anchor: ClockAnchor, now: Elapsed) -> Wall:
    return Wall(anchor.wall + (now - anchor.at))
