"""The candidates of a large region that say most, for a page that shows some of them. Pure."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import nsmallest
from typing import Final

from shoal.coordinator.api.dashboard.parameters import Parameters, invalid_parameter
from shoal.v1 import operator_pb2

DIGITS_MOST: Final = 5
"""Of the number of candidates in a request."""


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
