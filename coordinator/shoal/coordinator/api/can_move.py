"""The reply to `shoal can-move`. Pure: values in, messages out."""

from shoal.coordinator.api.views import bid_view, estimate_view, key_view, refusal_view
from shoal.coordinator.controllers.queries.can_move import CanMoveResult
from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.migration.estimate import Estimate, PredictedFigures
from shoal.v1 import operator_pb2
from shoal.wire.nouns import to_wire


def can_move_view(result: CanMoveResult, fleet: Fleet) -> operator_pb2.CanMoveReply:
    reply = operator_pb2.CanMoveReply(
        workload=key_view(result.workload),
        answer=result.answer,
        source_region=result.region,
        refusal=refusal_view(result.refusal) if result.refusal is not None else None,
    )
    if (within := result.estimate) is not None:
        if within.source is not None:
            reply.source_node, reply.source_device = within.source
            reply.source_stand_in = fleet.stand_in(*within.source)
        reply.estimates.extend(_estimate(each) for each in within.estimates)
    reply.bids.extend(bid_view(bid, "") for bid in result.bids)
    return reply


def _estimate(estimate: Estimate) -> operator_pb2.MoveEstimate:
    return operator_pb2.MoveEstimate(
        node=estimate.node,
        device=estimate.device,
        stand_in=estimate.stand_in,
        model=estimate.model,
        precision=estimate.precision,
        provider=estimate.provider,
        answer=estimate.answer,
        needs=[operator_pb2.MoveNeed(need=need, what=what) for need, what in estimate.needs],
        refusal=refusal_view(estimate.refusal) if estimate.refusal is not None else None,
        nearest=estimate.nearest,
        fetch_bytes=estimate.fetch_bytes,
        load_s=estimate_view(estimate.load_s),
        transfer_s=estimate.transfer_s,
        link=to_wire(estimate.link) if estimate.link is not None else None,
        now=_figures(estimate.now),
        then=_figures(estimate.then),
        cost_of_both=estimate.cost_of_both,
        drift=[to_wire(each) for each in estimate.drift],
    )


def _figures(figures: PredictedFigures | None) -> operator_pb2.MoveFigures | None:
    if figures is None:
        return None
    return operator_pb2.MoveFigures(
        latency_p95_s=estimate_view(figures.latency_p95_s),
        joules=estimate_view(figures.joules),
        energy_source=figures.energy_source,
        cost_usd_per_h=figures.cost,
    )
