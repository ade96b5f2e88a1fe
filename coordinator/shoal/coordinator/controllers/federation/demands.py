"""What each workload of this region needs of other regions now."""

from functools import partial

from shoal.coordinator.controllers.federation.intents import IntentIndex
from shoal.coordinator.controllers.federation.local_region import LocalRegion
from shoal.coordinator.controllers.federation.observations import ServiceObservations
from shoal.coordinator.core.negotiation import trade
from shoal.coordinator.core.negotiation.model import (
    Active,
    DelegationDemand,
    DelegationNeed,
    IdleTrade,
    TradePhase,
    WorkloadTrade,
)
from shoal.coordinator.core.workloads.cross_region_state import (
    DrainingHere,
    DrainingThere,
    MoveBackFailed,
    MovedForGood,
    MoveOutFailed,
    MovingBack,
    MovingOut,
    ReturnCooldown,
)
from shoal.coordinator.ports import Clock
from shoal.types.workload import DelegationMode, Intent, WorkloadKey


class DelegationDemands:
    """Read from the local region, the trade, and what gateways observed of the service elsewhere."""

    def __init__(
        self, local_region: LocalRegion, intents: IntentIndex, observations: ServiceObservations, clock: Clock
    ) -> None:
        self._local_region = local_region
        self._intents = intents
        self._observations = observations
        self._clock = clock

    def demand(self, state: WorkloadTrade, intent: Intent | None) -> DelegationDemand:
        """The demand of the trade's workload now. intent: None where it must not be delegated."""
        key = state.workload
        if intent is None:
            return DelegationDemand(
                DelegationNeed.NOTHING,
                "",
                is_served_locally=self._intents.get(key) is None or self._serves_or_has_no_place(key),
            )
        local, move = self._local_region.placement(key), self._local_region.cross_region_state(key)
        better = intent.delegation.mode is DelegationMode.WHEN_BETTER
        asked, live = self._intents.request_hash(intent), self._local_region.moves_live
        fails = self._observations.is_failing(state.active_agreement)
        unmet = self._failing_agreement(state) if local.is_placeable else ""
        phase = state.phase
        # The workload returned here recently: it leaves again only if it must, or if its documents changed since.
        if isinstance(move, ReturnCooldown):
            better = better and (isinstance(phase, Active) or move.request_hash not in ("", asked))
        if better and local.is_placeable and isinstance(phase, IdleTrade):
            better = self._local_region.may_leave(intent)
        demand = partial(
            DelegationDemand,
            request_hash=asked,
            is_served_locally=local.serves,
            is_failing=fails,
            failing_agreement=unmet,
        )
        match move:
            case MoveOutFailed() | DrainingThere() if local.is_placeable:
                return demand(DelegationNeed.HOME)
            # An outbound migration whose agreement has ended says nothing: another agreement belongs to another one.
            case MovingOut() if move.agreement in ("", _agreement(phase)):
                return demand(DelegationNeed.MOVED, to=move.region)
            case DrainingHere(is_permanent=permanent) if move.agreement == _agreement(phase):
                return demand(DelegationNeed.MOVED, to=move.region, is_permanent=permanent)
            case MovedForGood() if move.agreement == _agreement(phase):
                return demand(DelegationNeed.MOVED, to=move.region, is_permanent=True)
            case MovingBack() | MoveBackFailed():
                return demand(DelegationNeed.HELD)
            case (
                None
                | ReturnCooldown()
                | MoveOutFailed()
                | DrainingThere()
                | MovingOut()
                | DrainingHere()
                | MovedForGood()
            ):
                pass
        if isinstance(phase, Active) and phase.stays:
            return demand(DelegationNeed.MOVED, to=phase.agreement.region)
        if not local.is_placeable:
            return demand(DelegationNeed.SHORT, by_live_move=live)
        return demand(DelegationNeed.BETTER if better else DelegationNeed.CONTENT, by_live_move=live)

    def _failing_agreement(self, state: WorkloadTrade) -> str:
        return self._observations.failing_agreement(trade.serving_agreements(state, self._clock.now()))

    def _serves_or_has_no_place(self, key: WorkloadKey) -> bool:
        """Whether there is nothing to wait for in this region."""
        local = self._local_region.placement(key)
        return local.serves or not local.is_placeable


def _agreement(phase: TradePhase) -> str:
    return phase.agreement.id if isinstance(phase, Active) else ""
