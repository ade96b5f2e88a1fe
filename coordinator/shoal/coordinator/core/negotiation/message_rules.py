"""What counts of another region's messages in a trade: no time that is none, and no more gateways than a region has.

What it says goes to every gateway of this region, for all tenants.
"""

import re
from collections.abc import Iterator
from typing import Final

from shoal.types.address import is_dialable
from shoal.types.agreement import Award, GatewayRef, Grant, Notice, Renewal, Renewed
from shoal.types.codes import Code, Refusal
from shoal.types.identity import NAME_PATTERN
from shoal.types.offer import Offer
from shoal.types.units import Seconds

GATEWAYS_MOST: Final = 64
"""Gateways of one delegate that this region's gateways connect to, under one agreement and under all."""
CALLERS_MOST: Final = 256
"""Gateways of one other region that this region's gateways know."""
REVOKED_MOST: Final = 256
"""Revoked certificates of one other region's gateways."""

_SERIAL: Final = re.compile(r"[0-9]{1,49}")
"""Of a certificate, in decimal: at most 20 octets (RFC 5280, section 4.1.2.2)."""
_DIGEST: Final = re.compile(r"(?:[0-9a-f]{64})?")


def message_refusal(message: object) -> Refusal | None:
    """MESSAGE_INVALID for what no honest region of any version says; None: the message may count.

    The wire admits a duration that is NaN. Every comparison with it is False, so a deadline made of it would never be
    over.
    """
    for name, value in _durations(message):
        if not value >= 0:
            return _invalid(f"{name} of {value:g} s", "0 or more")
    if isinstance(message, Renewal | Renewed):
        if len(message.revoked) > REVOKED_MOST:
            return _invalid(f"{len(message.revoked)} revoked certificates", f"at most {REVOKED_MOST}")
        if not all(map(_SERIAL.fullmatch, message.revoked)):
            return _invalid("serial numbers that are none", "decimal numbers of certificates")
        if not _DIGEST.fullmatch(message.ledger_head):  # it is passed on to the federation
            return _invalid("a head of a ledger that is no digest", "a SHA-256, or nothing")
    return None


def duration_that_counts(said: Seconds, most: Seconds) -> Seconds:
    """Of a duration that another region said: at most `most`, and 0 for one that `message_refusal` refuses. Older
    versions stored such ones."""
    return Seconds(min(said, most)) if said >= 0 else Seconds(0.0)


def gateways_to_call(gateways: tuple[GatewayRef, ...]) -> tuple[GatewayRef, ...]:
    """Those of a delegate's gateways that requests may go to."""
    return tuple(each for each in _named(gateways, GATEWAYS_MOST) if is_dialable(each.address))


def gateways_that_call(gateways: tuple[GatewayRef, ...]) -> tuple[GatewayRef, ...]:
    """Those of an origin's gateways that requests may come from. Nobody connects to them."""
    return _named(gateways, CALLERS_MOST)


def _named(gateways: tuple[GatewayRef, ...], most: int) -> tuple[GatewayRef, ...]:
    """The first ones, each name once, without those that have no name that a certificate could prove."""
    return tuple({each.name: each for each in gateways[:most] if NAME_PATTERN.fullmatch(each.name)}.values())


def _invalid(found: str, asked: str) -> Refusal:
    return Refusal(Code.MESSAGE_INVALID, found, asked, "update the sender")


def _durations(message: object) -> Iterator[tuple[str, Seconds]]:
    match message:
        case Offer(hold_s=hold_s):
            yield "a hold", hold_s
        case Award(term_s=term_s):
            yield "a term", term_s
        case Grant(lease_s=lease_s) | Renewed(lease_s=lease_s):
            yield "a lease", lease_s
        case Notice(ends_s=ends_s):
            yield "a notice", ends_s
        case _:
            pass
