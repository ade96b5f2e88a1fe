"""What a page of a large region loads of an explanation: the candidates that say most, without what it does not show.
Pure."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import nsmallest
from typing import Final

from shoal.coordinator.api.dashboard.parameters import Parameters, invalid_parameter, is_set
from shoal.v1 import operator_pb2

BRIEF_DIGITS: Final = 4
"""Of each figure in a brief reply; the page shows three."""
DIGITS_MOST: Final = 5
"""Of the number of candidates in a request."""


def shorten(reply: operator_pb2.ExplainReply, given: Parameters) -> Mapping[str, int]:
    """`keep_most`; with `brief` of each candidate only its place, p95, energy, cost and carbon, and why it is excluded.

    Raises ShoalError(INVALID_ARGUMENT).
    """
    beside = keep_most(reply, given)
    if is_set(given, "brief"):
        for unshown in ("placements", "workload", "signals"):
            reply.ClearField(unshown)
        for each in reply.plan.candidates:
            _strip(each)
    return beside


def _strip(candidate: operator_pb2.Candidate) -> None:
    candidate.ClearField("terms")
    if candidate.HasField("prediction"):
        for unshown in ("latency_p50_s", "memory_bytes", "load_s", "energy_source", "basis"):
            candidate.prediction.ClearField(unshown)
        for shown in ("latency_p95_s", "joules"):
            if candidate.prediction.HasField(shown):
                _round(getattr(candidate.prediction, shown), ("low", "mid", "high"))
    if candidate.HasField("refusal"):
        candidate.refusal.ClearField("asked")
        candidate.refusal.ClearField("remedy")
    _round(candidate, ("score", "cost_usd_per_h", "carbon_g_per_h"))


def _round(message: operator_pb2.Candidate | operator_pb2.Estimate, names: Sequence[str]) -> None:
    for name in names:
        setattr(message, name, float(f"{getattr(message, name):.{BRIEF_DIGITS}g}"))


def keep_most(reply: operator_pb2.ExplainReply, given: Parameters) -> Mapping[str, int]:
    """Keeps as many candidates as `most` says, all without it. Returns how many are left out.

    Raises ShoalError(INVALID_ARGUMENT).
    """
    asked = given.get("most", "")
    if not asked:
        return {}
    if not (asked.isascii() and asked.isdecimal() and len(asked) <= DIGITS_MOST):
        raise invalid_parameter(f"most {asked!r:.40}", f"a number of at most {DIGITS_MOST} digits")
    listed = list(reply.plan.candidates)
    kept = best_candidates(listed, int(asked))
    if len(kept) == len(listed):
        return {}
    del reply.plan.candidates[:]
    reply.plan.candidates.extend(kept)
    return {"left_out": len(listed) - len(kept)}


def best_candidates(listed: Sequence[operator_pb2.Candidate], most: int) -> list[operator_pb2.Candidate]:
    """So many of them, in their order: where it runs and goes to; then what fits, first where no other place is better
    in every term, then by score; then what does not, each reason in turn. Of what is equal one comes before the second
    of anything."""
    seen = Counter[tuple[str, float]]()
    ranks: list[tuple[bool, bool, bool, int, float, int]] = []
    for at, each in enumerate(listed):
        is_place = each.current or each.chosen or each.standby
        # One without a score has NaN, which equals nothing and has no order.
        score = 0.0 if each.refusal.code or math.isnan(each.score) else each.score
        kind = each.refusal.code, score
        ranks.append((not is_place, bool(each.refusal.code), not each.pareto, seen[kind], score, at))
        seen[kind] += 1
    return [listed[at] for at in sorted(rank[-1] for rank in nsmallest(most, ranks))]
