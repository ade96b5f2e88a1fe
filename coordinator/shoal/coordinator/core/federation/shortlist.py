"""Whom to ask: regions that may run it, by what they advertise, where they lie, how far they are and how they kept
their word. One that is too far is asked all the same, after the nearer ones: it may have a counter-offer."""

from collections.abc import Iterable
from typing import Final

from shoal.coordinator.core.negotiation.trust import fits
from shoal.types.offer import Advertisement, Member, Solicitation

ASKED_MOST: Final = 16


def shortlist(
    solicitation: Solicitation, members: Iterable[Member], *, standing: float = 1.0, most: int = ASKED_MOST
) -> tuple[Member, ...]:
    """The best first. How far they are the origin measured, and the solicitation carries it; else the member did.

    standing: the origin's: of whom nothing comes, fewer hold room at a time."""
    fitting = (member for member in members if _fits(solicitation, member))
    return tuple(sorted(fitting, key=lambda member: _rank(solicitation, member))[: max(1, round(most * standing))])


def _fits(solicitation: Solicitation, member: Member) -> bool:
    advertisement = member.advertisement
    if member.region == solicitation.origin or advertisement is None:
        return False
    if not fits(solicitation.to, member.region):
        return False
    if not solicitation.require.may_be_in(member.region, member.residency):
        return False
    return _has_room(solicitation, advertisement)


def _has_room(solicitation: Solicitation, advertisement: Advertisement) -> bool:
    """In one class, for the smallest of the models in one of the precisions asked for."""
    precisions = solicitation.require.precisions
    for each in advertisement.classes:
        wanted = [
            model
            for model in solicitation.models
            if (not each.precisions or model.precision in each.precisions)
            and (not precisions or model.precision in precisions)
        ]
        if any(model.size_bytes <= each.free_bytes for model in wanted):
            return True
    return False


def _distance(solicitation: Solicitation, member: Member) -> float | None:
    """Seconds there and back; None where nobody measured."""
    measured = solicitation.way_s.get(member.region)
    if measured is None and member.advertisement is not None:
        measured = member.advertisement.rtt_s.get(solicitation.origin)
    return measured


def _rank(solicitation: Solicitation, member: Member) -> tuple[float, float, str]:
    """Trust first, in coarse steps, then nearness, and the name so that the order is always the same."""
    way = _distance(solicitation, member)
    return -round(member.trust, 1), way if way is not None else float("inf"), member.region
