"""Answers `shoal can-move`: a what-if of placement for a node of this region, a round of indicative bids for another
region.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.controllers.federation.origin import OriginController
from shoal.coordinator.controllers.queries.delegation import NOT_JOINED, IndicativeBid, indicative_bids
from shoal.coordinator.controllers.runner import Compute, inline
from shoal.coordinator.controllers.workloads.apply import DocumentsController
from shoal.coordinator.controllers.workloads.placement_queries import PlacementQueries
from shoal.coordinator.core.catalog.model import Catalog
from shoal.coordinator.core.migration.estimate import MoveAnswer, MoveEstimates, check_aim
from shoal.coordinator.core.migration.movable import region_aim_refusal
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
        """Why not, where the answer is no; `shoal migrate` to the same place is refused with it. Home from another
        region it begins all the same, and waits for a place."""
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
    """key: a workload; else its name is that of a pushed model. to: NODE, NODE/DEVICE, this region (home again; of a
    model: any place of it), or one of `regions`. compute: where the computation runs.

    Raises ShoalError(FIELD_INVALID | WORKLOAD_UNKNOWN | NODE_UNKNOWN | NOT_FOUND | FEDERATION_UNREACHABLE).
    """
    catalog, intent = _subject(documents, key)
    aim = Aim.parse(to)
    away = placement.region_of(intent.key)
    if aim.node in placement.fleet.nodes or aim.node not in {*regions, placement.region}:
        check_aim(placement.fleet, aim)
        if (stuck := placement.elsewhere_refusal(intent.key)) is not None:
            return CanMoveResult(key, MoveAnswer.NO, region=away, stuck=stuck)
        found = await compute(placement.move_estimator(intent.key, aim, catalog))
        return CanMoveResult(key, found.answer, estimate=found)
    stuck, is_model_here = region_aim_refusal(aim), intent.key != key and aim.node == placement.region
    if stuck is None and not is_model_here:
        stuck = placement.cross_region_refusal(intent, aim.node)
    # What the other region would bid is told although the workload's own policy keeps it from there.
    if stuck is not None and stuck.code is not Code.TRADE_DENIED:
        return CanMoveResult(key, MoveAnswer.NO, region=away, stuck=stuck)
    if aim.node == placement.region:
        home = placement.return_estimator(key)
        found = await compute(placement.move_estimator(intent.key, Aim(), catalog) if is_model_here else home)
        return CanMoveResult(key, found.answer, estimate=found, region=away)
    bids = await _bids_of(aim.node, intent, catalog, trades)
    if stuck is not None:
        bids = [replace(bid, assessment=replace(bid.assessment, refusal=stuck)) for bid in bids]
    is_feasible = any(bid.assessment.refusal is None and not isinstance(bid.assessment.answer, Decline) for bid in bids)
    return CanMoveResult(key, MoveAnswer.YES if is_feasible else MoveAnswer.NO, bids=tuple(bids), stuck=stuck)


async def _bids_of(
    region: str, intent: Intent, catalog: Catalog, trades: OriginController | None
) -> list[IndicativeBid]:  # fmt: skip
    """What that region would bid for the workload now; nothing is held. Raises ShoalError(FEDERATION_UNREACHABLE)."""
    if trades is None or not trades.may_trade:
        raise ShoalError(NOT_JOINED)
    asked = replace(intent, delegation=DelegationRule(DelegationMode.WHEN_INFEASIBLE, to=(region,)))
    indicative = await trades.preview_offers(asked, catalog.profiles, None)
    if indicative is None:
        return []
    return [bid for bid in indicative_bids(indicative) if bid.assessment.answer.region == region]


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
