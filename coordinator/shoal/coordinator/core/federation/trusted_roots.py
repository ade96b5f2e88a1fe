"""Which CAs of its federation a region trusts: those that it joined with, until the federation names others."""

from typing import Final

from shoal.coordinator.core.federation.rules import ROOTS_MOST
from shoal.types.codes import Code, Refusal
from shoal.types.offer import FederationRoots

ROOT_BYTES_MOST: Final = 4096
"""Of one certificate in PEM. Those that a federation makes have about 700."""


def check_roots(told: FederationRoots) -> Refusal | None:
    """FIELD_INVALID where these cannot be a federation's CAs. Whether each is a CA's certificate is checked by the
    module that reads certificates."""
    if not 0 < len(told.pems) <= ROOTS_MOST:
        return _invalid(f"{len(told.pems)} CAs of the federation", f"1 to {ROOTS_MOST}")
    largest = max(len(pem) for pem in told.pems)
    if largest > ROOT_BYTES_MOST:
        return _invalid(f"a CA of {largest} bytes", f"at most {ROOT_BYTES_MOST}")
    if len(set(told.pems)) < len(told.pems):
        return _invalid("a CA of the federation twice", "each once")
    if not told.since >= 0:  # NaN too
        return _invalid(f"CAs since {told.since:g}", "a time")
    return None


def newer_roots(held: FederationRoots, told: FederationRoots) -> FederationRoots:
    """The roots to trust from now on. A replica of the federation that has yet to read the newest stage tells older
    ones, which do not count."""
    return told if told.since >= held.since else held


def _invalid(found: str, asked: str) -> Refusal:
    return Refusal(Code.FIELD_INVALID, found, asked, "look at the federation: shoal ca status")
