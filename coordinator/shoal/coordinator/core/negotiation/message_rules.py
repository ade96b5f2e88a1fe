"""What no honest region of any version says in a trade, so that no deadline is ever computed from it."""

from collections.abc import Iterator

from shoal.types.agreement import Award, Grant, Notice, Renewed
from shoal.types.codes import Code, Refusal
from shoal.types.offer import Offer
from shoal.types.units import Seconds


def message_refusal(message: object) -> Refusal | None:
    """MESSAGE_INVALID for a duration that is negative or NaN, which the wire admits; None: the message may count. Every
    comparison with a NaN is False, so that a deadline made of it would never be over."""
    for name, value in _durations(message):
        if not value >= 0:
            return Refusal(Code.MESSAGE_INVALID, f"{name} of {value:g} s", "0 or more", "update the sender")
    return None


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
