"""Could it move there? A what-if of placement for a node of this region, a round of indicative bids for another."""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.controllers.catalog import Catalog
from shoal.coordinator.controllers.outlook import NOT_JOINED, Bid, bids_of
from shoal.coordinator.controllers.trades import TradesController
from shoal.coordinator.controllers.workloads import WorkloadsController
from shoal.coordinator.core.migration.estimate import Answer, Outlook, outlook
from shoal.coordinator.core.negotiation.trust import may_delegate, policy_forbids
from shoal.coordinator.core.placement.model import Aim
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.offer import Decline
from shoal.types.workload import Delegation, DelegationMode, Intent, WorkloadKey

WHAT_IF: Final = "can-move"
"""Name of the workload that a pushed model is thought of as."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """within: of a node of this region. bids: of another region."""

    workload: WorkloadKey
    answer: Answer
    within: Outlook | None = None
    bids: tuple[Bid, ...] = ()


async def prospect(
    workloads: WorkloadsController, trades: TradesController | None, regions: Collection[str], key: WorkloadKey, to: str
) -> Prospect:
    """key: a workload; else its name is that of a pushed model. to: NODE, NODE/DEVICE, or one of `regions`.

    Raises ShoalError(FIELD_INVALID | WORKLOAD_UNKNOWN | NODE_UNKNOWN | NOT_FOUND | FEDERATION_UNREACHABLE).
    """
    catalog, intent = _subject(workloads, key)
    aim = Aim.parse(to)
    inputs = workloads.inputs(catalog)
    if aim.node in inputs.fleet.nodes or aim.node not in regions:
        if aim.node not in inputs.fleet.nodes:
            raise refuse(
                Code.NODE_UNKNOWN,
                f"{to!r:.120}",
                "NODE, NODE/DEVICE or REGION",
                "see `shoal get devices`, `shoal federation regions`",
            )
        found = outlook(inputs, intent.key, aim)
        return Prospect(key, found.answer, within=found)
    if trades is None or not trades.may_trade:
        raise ShoalError(NOT_JOINED)
    asked = replace(intent, delegation=Delegation(DelegationMode.WHEN_INFEASIBLE, to=(aim.node,)))
    indicative = await trades.indicative(asked, catalog.profiles, None)
    bids = (
        [bid for bid in bids_of(indicative) if bid.judged.answer.region == aim.node] if indicative is not None else []
    )
    if not may_delegate(intent.delegation, aim.node):
        bids = [
            replace(bid, judged=replace(bid.judged, refusal=policy_forbids(intent.delegation, aim.node)))
            for bid in bids
        ]
    feasible = any(bid.judged.refusal is None and not isinstance(bid.judged.answer, Decline) for bid in bids)
    return Prospect(key, Answer.YES if feasible else Answer.NO, bids=tuple(bids))


def _subject(workloads: WorkloadsController, key: WorkloadKey) -> tuple[Catalog, Intent]:
    """The workload; or a model as a workload with no policy, under documents that are proposed for this alone."""
    catalog = workloads.catalog
    known = next((intent for intent in catalog.intents if intent.key == key), None)
    if known is not None:
        return catalog, known
    digest = catalog.digest_of(key.name)
    if digest is None:
        raise refuse(
            Code.WORKLOAD_UNKNOWN,
            f"{key}",
            "an applied workload or a pushed model",
            "see `shoal get workloads`, `shoal model ls`",
        )
    document = {
        "apiVersion": "shoal/v1",
        "kind": "Workload",
        "metadata": {"name": WHAT_IF, "tenant": key.tenant},
        "spec": {"model": {"source": digest}},
    }
    proposal = workloads.proposed([(WHAT_IF, json.dumps(document))])
    if proposal.problems:
        raise ShoalError(proposal.problems[0].refusal)
    thought = WorkloadKey(key.tenant, WHAT_IF)
    return proposal.catalog, next(intent for intent in proposal.catalog.intents if intent.key == thought)
