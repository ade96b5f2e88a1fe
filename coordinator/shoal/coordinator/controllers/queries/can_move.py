"""Answers `shoal can-move`: a what-if of placement for a node of this region, a round of indicative bids for another
region.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.controllers.federation.origin import OriginController
from shoal.coordinator.controllers.queries.delegation import NOT_JOINED, IndicativeBid, indicative_bids
from shoal.coordinator.controllers.workloads.apply import Compute, DocumentsController, inline
from shoal.coordinator.controllers.workloads.placement_queries import PlacementQueries
from shoal.coordinator.core.catalog.model import Catalog
from shoal.coordinator.core.migration.estimate import MoveAnswer, MoveEstimates
from shoal.coordinator.core.migration.movable import is_delegated, runs_elsewhere, runs_here
from shoal.coordinator.core.negotiation.trust import delegation_refusal, may_delegate
from shoal.coordinator.core.placement.model import Aim
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.offer import Decline
from shoal.types.workload import DelegationMode, DelegationRule, Intent, WorkloadKey

WHAT_IF: Final = "can-move"
"""Name of the hypothetical workload for a pushed model."""


@dataclass(frozen=True, slots=True)
class CanMoveResult:
    """Whether a workload could move to the given place, and why not."""

    # The workload, or the pushed model as a workload.
    workload: WorkloadKey
    # Whether it could move there.
    answer: MoveAnswer
    # For a node of this region; None for another region.
    estimate: MoveEstimates | None = None
    # Indicative bids of another region; empty for a node of this one.
    bids: tuple[IndicativeBid, ...] = ()
    # The region that runs it now; empty: this one, or none.
    region: str = ""
    # Why it cannot move from where it is, whatever the place; None: nothing is in the way there.
    stuck: Refusal | None = None

    @property
    def refusal(self) -> Refusal | None:
        """Why not, where the answer is no; `shoal migrate` to the same place is refused with it."""
        if self.answer is not MoveAnswer.NO:
            return None
        if self.stuck is not None:
            return self.stuck
        if self.estimate is not None:
            return self.estimate.refusal
        refused = (_refusal_of(bid) for bid in self.bids)
        return next((each for each in refused if each is not None), _NO_ANSWER)


_NO_ANSWER: Final = Refusal(Code.PEER_UNREACHABLE, "no answer came from it", "a bid", "see `shoal federation regions`")


def _refusal_of(bid: IndicativeBid) -> Refusal | None:
    answer = bid.assessment.answer
    return bid.assessment.refusal or (answer.refusal if isinstance(answer, Decline) else None)


async def can_move(
    documents: DocumentsController,
    placement: PlacementQueries,
    trades: OriginController | None,
    regions: Collection[str],
    key: WorkloadKey,
    to: str,
    compute: Compute = inline,
) -> CanMoveResult:
    """key: a workload; else its name is that of a pushed model. to: NODE, NODE/DEVICE, this region (home again), or one
    of `regions`. compute: where the computation runs.

    Raises ShoalError(FIELD_INVALID | WORKLOAD_UNKNOWN | NODE_UNKNOWN | NOT_FOUND | FEDERATION_UNREACHABLE).
    """
    catalog, intent = _subject(documents, key)
    aim = Aim.parse(to)
    nodes = placement.fleet.nodes
    away = placement.region_of(intent.key)
    if aim.node not in nodes and aim.node == placement.region:
        if not away:
            return CanMoveResult(key, MoveAnswer.NO, stuck=runs_here(key))
        found = await compute(placement.return_estimator(intent.key))
        return CanMoveResult(key, found.answer, estimate=found, region=away)
    if away and aim.node in nodes and not placement.runs_here(intent.key):
        return CanMoveResult(key, MoveAnswer.NO, region=away, stuck=runs_elsewhere(key, away, placement.region))
    if away and aim.node not in nodes and aim.node in regions:
        return CanMoveResult(key, MoveAnswer.NO, region=away, stuck=is_delegated(key, away, placement.region))
    if aim.node in nodes or aim.node not in regions:
        if aim.node not in nodes:
            raise refuse(
                Code.NODE_UNKNOWN,
                f"no node {aim.node!r:.80}",
                "NODE, NODE/DEVICE or REGION",
                "see `shoal get devices`, `shoal federation regions`",
            )
        found = await compute(placement.move_estimator(intent.key, aim, catalog))
        return CanMoveResult(key, found.answer, estimate=found)
    if trades is None or not trades.may_trade:
        raise ShoalError(NOT_JOINED)
    asked = replace(intent, delegation=DelegationRule(DelegationMode.WHEN_INFEASIBLE, to=(aim.node,)))
    indicative = await trades.preview_offers(asked, catalog.profiles, None)
    bids = (
        [bid for bid in indicative_bids(indicative) if bid.assessment.answer.region == aim.node]
        if indicative is not None
        else []
    )
    if not may_delegate(intent.delegation, aim.node):
        bids = [
            replace(bid, assessment=replace(bid.assessment, refusal=delegation_refusal(intent.delegation, aim.node)))
            for bid in bids
        ]
    feasible = any(bid.assessment.refusal is None and not isinstance(bid.assessment.answer, Decline) for bid in bids)
    return CanMoveResult(key, MoveAnswer.YES if feasible else MoveAnswer.NO, bids=tuple(bids))


def _subject(documents: DocumentsController, key: WorkloadKey) -> tuple[Catalog, Intent]:
    """The workload with the applied documents; or a model as a workload without a policy, in a catalog proposed for
    this query only.
    """
    catalog = documents.catalog
    known = next((intent for intent in catalog.intents if intent.key == key), None)
    if known is not None:
        return catalog, known
    digest = catalog.digest_of(key.name)
    if digest is None:
        raise refuse(
            Code.WORKLOAD_UNKNOWN,
            f"neither a workload nor a model {key}",
            "an applied workload or a pushed model",
            "see `shoal get workloads`, `shoal model ls`",
        )
    document = {
        "apiVersion": "shoal/v1",
        "kind": "Workload",
        "metadata": {"name": WHAT_IF, "tenant": key.tenant},
        "spec": {"model": {"source": digest}},
    }
    proposal = documents.propose([(WHAT_IF, json.dumps(document))])
    if proposal.problems:
        raise ShoalError(proposal.problems[0].refusal)
    thought = WorkloadKey(key.tenant, WHAT_IF)
    return proposal.catalog, next(intent for intent in proposal.catalog.intents if intent.key == thought)
