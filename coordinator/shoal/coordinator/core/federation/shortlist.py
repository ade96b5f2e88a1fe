"""Which regions to solicit: those that may run the workload, by advertisement, residency, distance and trust. A region
that is too far is asked too, after the nearer ones, because it may make a counter-offer."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from shoal.coordinator.core.negotiation.trust import matches_any
from shoal.types.codes import Code, Refusal
from shoal.types.offer import Advertisement, Member, Solicitation
from shoal.types.units import show_bytes, show_seconds

ASKED_MOST: Final = 16


def shortlist(
    solicitation: Solicitation, members: Iterable[Member], *, standing: float = 1.0, most: int = ASKED_MOST
) -> tuple[Member, ...]:
    """The best regions first. The round-trip time is the one that the origin measured and put into the solicitation,
    else the one that the member measured.

    standing: the origin's. An origin whose holds lead to few agreements may solicit fewer regions at a time.
    """
    sizes = _smallest_sizes(solicitation)
    fitting = (member for member in members if _fits(solicitation, member, sizes))
    return tuple(sorted(fitting, key=lambda member: _rank(solicitation, member))[: max(1, round(most * standing))])


def silence_reasons(
    solicitation: Solicitation, members: Iterable[Member], answered: Collection[str], *, most: int = ASKED_MOST
) -> Mapping[str, Refusal]:
    """Why nothing came from the members that the policy would delegate to, by name, `most` of them: not asked, as far
    as their last advertisements tell, or no answer in time. answered: those that something came from."""
    mine = [each for each in members if _is_rival(solicitation, each)]
    sizes = _smallest_sizes(solicitation)
    asked = {each.region for each in shortlist(solicitation, mine)}
    crowd = Refusal(Code.NO_BID, f"not asked: {ASKED_MOST} others came before it", "a place among those")
    silent = Refusal(Code.PEER_UNREACHABLE, "no answer", f"one within {show_seconds(solicitation.answer_s)}")
    found = {
        each.region: silent if each.region in asked else _exclusion(solicitation, each, sizes) or crowd
        for each in sorted(mine, key=lambda member: _rank(solicitation, member))
        if each.region not in answered
    }
    return dict(list(found.items())[:most])


def _exclusion(solicitation: Solicitation, member: Member, sizes: Mapping[str, int]) -> Refusal | None:
    """Why another region that the policy delegates to is not asked; None: it may be."""
    if member.advertisement is None:
        return Refusal(Code.PEER_UNREACHABLE, "not asked: it advertises nothing now", "capacity that it advertises")
    if not solicitation.require.may_be_in(member.region, member.residency):
        lies = member.residency or "nowhere that it declares"
        return Refusal(Code.RESIDENCY, f"not asked: it lies in {lies}", ", ".join(solicitation.require.residency))
    return _room_refusal(solicitation, member.advertisement, sizes)


def _is_rival(solicitation: Solicitation, member: Member) -> bool:
    return member.region != solicitation.origin and matches_any(solicitation.to, member.region)


def _fits(solicitation: Solicitation, member: Member, sizes: Mapping[str, int]) -> bool:
    return _is_rival(solicitation, member) and _exclusion(solicitation, member, sizes) is None


def _smallest_sizes(solicitation: Solicitation) -> Mapping[str, int]:
    """By precision that is asked for, bytes of the smallest model."""
    precisions, sizes = solicitation.require.precisions, dict[str, int]()
    for model in solicitation.models:
        if not precisions or model.precision in precisions:
            sizes[model.precision] = min(model.size_bytes, sizes.get(model.precision, model.size_bytes))
    return sizes


def _room_refusal(solicitation: Solicitation, advertisement: Advertisement, sizes: Mapping[str, int]) -> Refusal | None:
    """Why no class has memory for the smallest of the models in one of the precisions asked for; None: one has."""
    smallest, rows = min(sizes.values(), default=math.inf), list[tuple[float, int]]()
    for each in advertisement.classes:
        runs = each.precisions
        needed = smallest if not runs else min((sizes[name] for name in runs if name in sizes), default=math.inf)
        if needed <= each.free_bytes:
            return None
        if needed < math.inf:
            rows.append((needed, each.free_bytes))
    if not rows:
        wanted = ", ".join(sorted({model.precision for model in solicitation.models}))
        return Refusal(Code.PRECISION_DENIED, "not asked: no class of devices that it advertises runs it", wanted)
    free, needed = max(free for _, free in rows), min(needed for needed, _ in rows)
    return Refusal(Code.MEMORY_SHORT, f"not asked: {show_bytes(free)} free at most", show_bytes(needed))


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
