"""Which workloads other regions run for this one and what they cost, as its step and its gateways need to know."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

from shoal.coordinator.controllers.federation.access import FederationAccess
from shoal.coordinator.controllers.federation.intents import IntentIndex
from shoal.coordinator.core.negotiation import trade
from shoal.coordinator.core.negotiation.message_rules import GATEWAYS_MOST
from shoal.coordinator.core.negotiation.model import Active, OriginAgreement, WorkloadTrade
from shoal.coordinator.core.negotiation.peering import merge_peers
from shoal.coordinator.core.workloads.model import DelegatedWorkload
from shoal.coordinator.ports import Clock
from shoal.types.agreement import GatewayRef
from shoal.types.assignment import PeerTrust
from shoal.types.codes import Code
from shoal.types.offer import Offer
from shoal.types.units import Elapsed, Seconds, UsdPerHour
from shoal.types.workload import Intent, WorkloadKey


class DelegationPublisher:
    """Derives them from the trades, and says when they have changed."""

    def __init__(
        self,
        trades: Mapping[WorkloadKey, WorkloadTrade],
        intents: IntentIndex,
        access: FederationAccess,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        """trades: of all workloads, as they are at any time."""
        self.delegations: Mapping[WorkloadKey, DelegatedWorkload] = {}
        self.awarded_prices: Mapping[WorkloadKey, UsdPerHour | None] = {}
        """USD/h of every workload with an award or agreement that is not over; None: the offer named no price."""
        self.peers: tuple[PeerTrust, ...] = ()
        """Regions whose gateways this region's gateways may connect to, because they run its workloads."""
        self._trades = trades
        self._intents = intents
        self._access = access
        self._clock = clock
        self._on_change = on_change
        self._called = _CalledGateways()

    def publish(self) -> None:
        """Publishes what follows from all trades, from the region's next step on."""
        now, keys = self._clock.now(), dict.fromkeys((*self.delegations, *self._trades))
        delegated = {key: each for key in keys if (each := self._delegation(key, now)) is not None}
        awarded = {key: trade.price_of(state) for key, state in self._trades.items() if trade.is_awarded(state)}
        self._replace(delegated, awarded, self._peer_trust())

    def publish_one(self, key: WorkloadKey, before: WorkloadTrade) -> None:
        """Publishes after a change of this one trade only, because there may be very many trades."""
        state = self._trades.get(key, WorkloadTrade(key))
        each = self._delegation(key, self._clock.now())
        delegated = self.delegations
        if each != delegated.get(key):
            delegated = {other: one for other, one in delegated.items() if other != key}
            delegated |= {key: each} if each is not None else {}
        awarded = self.awarded_prices
        if trade.is_awarded(state) != (key in awarded) or trade.price_of(state) != awarded.get(key):
            awarded = {other: price for other, price in awarded.items() if other != key}
            awarded |= {key: trade.price_of(state)} if trade.is_awarded(state) else {}
        peers = self.peers if _peers_of(state) == _peers_of(before) else self._peer_trust()
        self._replace(delegated, awarded, peers)

    def _delegation(self, key: WorkloadKey, now: Elapsed) -> DelegatedWorkload | None:
        """To be published in place of what is."""
        state, known = self._trades.get(key, WorkloadTrade(key)), self.delegations.get(key)
        found = delegation_of(state, now, self._intents.get(key), self._access.rtt())
        return found if found == known else self._called.replace(known, found)

    def _replace(
        self,
        delegated: Mapping[WorkloadKey, DelegatedWorkload],
        awarded: Mapping[WorkloadKey, UsdPerHour | None],
        peers: tuple[PeerTrust, ...],
    ) -> None:
        if (delegated, awarded, peers) != (self.delegations, self.awarded_prices, self.peers):
            self.delegations, self.awarded_prices, self.peers = delegated, awarded, peers
            self._on_change()

    def _peer_trust(self) -> tuple[PeerTrust, ...]:
        roots = {each.region: each.roots for each in self._access.members}
        met = sorted({each for state in self._trades.values() for each in _peers_of(state)})
        return merge_peers(
            PeerTrust(region, roots[region], names, (), revoked) for region, names, revoked in met if region in roots
        )


class _CalledGateways:
    """Gateways of each other region that requests go to: over all its agreements as many as under one.

    A region names the same in all, unless it means to fill this region's gateways, which connect to each. Those that
    are called stay before others, which are called once there is room.
    """

    def __init__(self) -> None:
        self._uses = defaultdict[str, Counter[GatewayRef]](Counter)
        """By region: the number of workloads that each is called for."""

    def replace(self, before: DelegatedWorkload | None, after: DelegatedWorkload | None) -> DelegatedWorkload | None:
        """`after`, with those of its gateways that there is room for. before: what this returned for the same
        workload."""
        if before is not None:
            self._release(before)
        if after is None:
            return None
        uses, kept = self._uses[after.region], list[GatewayRef]()
        for gateway in after.gateways:
            if gateway in uses or len(uses) < GATEWAYS_MOST:
                uses[gateway] += 1
                kept.append(gateway)
        return replace(after, gateways=tuple(kept))

    def _release(self, before: DelegatedWorkload) -> None:
        uses = self._uses[before.region]
        for gateway in before.gateways:
            uses[gateway] -= 1
            if not uses[gateway]:
                del uses[gateway]


def may_go(intent: Intent, offer: Offer) -> bool:
    """Whether residency allows the data of this workload in the region of that offer."""
    return intent.require.may_be_in(offer.region, offer.residency)


def delegation_of(
    state: WorkloadTrade, now: Elapsed, intent: Intent | None, rtt_s: Mapping[str, Seconds]
) -> DelegatedWorkload | None:  # fmt: skip
    """intent: as the documents are now; they may forbid what was agreed before, and then nothing waits for its end."""
    wanted = trade.is_relied_on(state, now)
    returns = state.phase.returns if isinstance(state.phase, Active) and wanted else ""
    noticed = [each for each in state.leaving if each.code is not Code.BREACHED]
    ends = {each.agreement.id: f"notice was given ({each.code})" for each in noticed}

    def entry(agreement: OriginAgreement, *, ready: bool) -> DelegatedWorkload:
        return DelegatedWorkload(
            agreement.id,
            agreement.region,
            agreement.gateways,
            is_ready=ready,
            is_wanted=wanted,
            model=agreement.offer.model,
            precision=agreement.offer.precision,
            return_reason=ends.get(agreement.id, returns),
            rtt_s=Seconds(round(rtt_s.get(agreement.region, 0.0), 3)),  # rounded: every change of it causes a step
            bid=agreement.offer,
            joules=agreement.joules,
        )

    serving = [
        agreement
        for agreement in trade.serving_agreements(state, now)
        if intent is None or may_go(intent, agreement.offer)
    ]
    if serving:
        return entry(serving[0], ready=True)
    agreement = state.active_agreement
    if agreement is not None and (intent is None or may_go(intent, agreement.offer)):
        return entry(agreement, ready=False)
    return None


def _peers_of(state: WorkloadTrade) -> frozenset[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Regions that work for this trade, with the names of their gateways and the revoked serials of these."""
    return frozenset(
        (agreement.region, tuple(sorted(each.name for each in agreement.gateways)), agreement.revoked)
        for agreement in trade.live_agreements(state)
    )
