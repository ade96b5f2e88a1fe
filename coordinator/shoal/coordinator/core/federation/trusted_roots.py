"""Which CAs of its federation a region trusts: those that it joined with, until the federation names others."""

from typing import Final

from shoal.coordinator.core.federation.rules import ROOT_BYTES_MOST, ROOTS_MOST
from shoal.types.codes import Code, Refusal
from shoal.types.offer import FederationRoots
from shoal.types.units import Seconds, Wall, show_seconds

AHEAD_MOST_S: Final = Seconds(86400.0)
"""A federation's clock may be this much ahead of the region's. Roots of a later time would outlast all that follow."""


def check_roots(told: FederationRoots, wall: Wall) -> Refusal | None:
    """FIELD_INVALID where these cannot be a federation's CAs. Whether each is a CA's certificate is checked by the
    module that reads certificates. wall: the region's clock."""
    if not 0 < len(told.pems) <= ROOTS_MOST:
        return _invalid(f"{len(told.pems)} CAs of the federation", f"1 to {ROOTS_MOST}")
    largest = max(len(pem) for pem in told.pems)
    if largest > ROOT_BYTES_MOST:
        return _invalid(f"a CA of {largest} bytes", f"at most {ROOT_BYTES_MOST}")
    if len(set(told.pems)) < len(told.pems):
        return _invalid("a CA of the federation twice", "each once")
    if not told.since >= 0:  # NaN too
        return _invalid(f"CAs since {told.since:g}", "a time")
    if (ahead := told.since - wall) > AHEAD_MOST_S:
        found = f"CAs of the federation that begin {show_seconds(ahead)} from now"
        asked = f"at most {show_seconds(AHEAD_MOST_S)}"
        return Refusal(Code.FIELD_INVALID, found, asked, "set the clocks of this region and of the federation")
    return None


def outdated_roots(held: FederationRoots, told: FederationRoots) -> Refusal | None:
    """Why roots are not adopted that are older than those held, and others; None where they are neither."""
    if told.since >= held.since or {*told.pems} == {*held.pems}:
        return None
    return Refusal(
        Code.FIELD_INVALID,
        "older CAs of the federation than this region trusts",
        "the same or newer ones",
        "nothing while its CA is rotated; if its ca/ was restored from an older copy: rotate its CA (shoal ca rotate)",
    )


def newer_roots(held: FederationRoots, told: FederationRoots) -> FederationRoots:
    """The roots to trust from now on. A replica of the federation that has yet to read the newest stage tells older
    ones, which do not count."""
    return told if told.since >= held.since else held


def _invalid(found: str, asked: str) -> Refusal:
    return Refusal(Code.FIELD_INVALID, found, asked, "look at the federation: shoal ca status")
