"""Which regions to solicit: those that may run the workload, by advertisement, residency, distance and trust. A region
that is too far is asked too, after the nearer ones, because it may make a counter-offer."""

from collections.abc import Iterable
from typing import Final

from shoal.coordinator.core.negotiation.trust import matches_any
from shoal.types.offer import Advertisement, Member, Solicitation

ASKED_MOST: Final = 16


def shortlist(
    solicitation: Solicitation, members: Iterable[Member], *, standing: float = 1.0, most: int = ASKED_MOST
) -> tuple[Member, ...]:
    """The best regions first. The round-trip time is the one that the origin measured and put into the solicitation,
    else the one that the member measured.

    standing: the origin's. An origin whose holds lead to few agreements may solicit fewer regions at a time.
    """
    fitting = (member for member in members if _fits(solicitation, member))
    return tuple(sorted(fitting, key=lambda member: _rank(solicitation, member))[: max(1, round(most * standing))])


def _fits(solicitation: Solicitation, member: Member) -> bool:
    advertisement = member.advertisement
    if member.region == solicitation.origin or advertisement is None:
        return False
    if not matches_any(solicitation.to, member.region):
        return False
    if not solicitation.require.may_be_in(member.region, member.residency):
        return False
    return _has_room(solicitation, advertisement)


def _has_room(solicitation: Solicitation, advertisement: Advertisement) -> bool:
    """Whether one class has memory for the smallest of the models, in one of the precisions asked for."""
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


def _rtt_s(solicitation: Solicitation, member: Member) -> float | None:
    """Round-trip time in seconds; None where neither side measured it."""
    measured = solicitation.way_s.get(member.region)
    if measured is None and member.advertisement is not None:
        measured = member.advertisement.rtt_s.get(solicitation.origin)
    return measured


def _rank(solicitation: Solicitation, member: Member) -> tuple[float, float, str]:
    """Trust in coarse steps first, then round-trip time, then the name, so that the order is deterministic."""
    rtt_s = _rtt_s(solicitation, member)
    return -round(member.trust, 1), rtt_s if rtt_s is not None else float("inf"), member.region
