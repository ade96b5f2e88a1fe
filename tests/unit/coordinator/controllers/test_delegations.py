"""What a region's step learns of the workloads that other regions run."""

from collections.abc import Iterable

from harness.builders.offers import offer
from harness.fakes.clock import ManualClock
from harness.fakes.peers import FakePeers
from shoal.coordinator.controllers.federation.access import FederationAccess
from shoal.coordinator.controllers.federation.delegations import DelegationPublisher
from shoal.coordinator.controllers.federation.intents import IntentIndex
from shoal.coordinator.core.negotiation.message_rules import GATEWAYS_MOST
from shoal.coordinator.core.negotiation.model import Active, OriginAgreement, WorkloadTrade
from shoal.types.agreement import GatewayRef, ServiceState
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import Intent, WorkloadKey

NOW, LATER = Elapsed(1.0), Elapsed(1e9)


class NoIntents(IntentIndex):
    def __init__(self) -> None: ...

    def get(self, key: WorkloadKey) -> Intent | None:
        return None


class Delegations:
    """Trades of workloads `w0`, `w1`, .. with their publisher."""

    def __init__(self) -> None:
        self.trades: dict[WorkloadKey, WorkloadTrade] = {}
        self.changes = 0
        access = FederationAccess(FakePeers({}), None, lambda: None, dict)
        self.publisher = DelegationPublisher(self.trades, NoIntents(), access, ManualClock(1.0), self.count)

    def count(self) -> None:
        self.changes += 1

    def set(self, number: int, region: str, gateways: tuple[GatewayRef, ...]) -> None:
        key = WorkloadKey("shop", f"w{number}")
        agreement = OriginAgreement(
            f"g-{number}", offer(region), gateways, Seconds(30.0), LATER, LATER, 1, "n", NOW, NOW, LATER,
            ServiceState.READY, NOW,
        )  # fmt: skip
        before = self.trades.get(key, WorkloadTrade(key))
        self.trades[key] = WorkloadTrade(key, Active(agreement, "asked", LATER))
        self.publisher.publish_one(key, before)

    def end(self, number: int) -> None:
        key = WorkloadKey("shop", f"w{number}")
        self.publisher.publish_one(key, self.trades.pop(key))

    @property
    def called_gateways(self) -> list[tuple[GatewayRef, ...]]:
        """By workload."""
        return [each.gateways for _, each in sorted(self.publisher.delegations.items())]


def gateway_list(numbers: Iterable[int]) -> tuple[GatewayRef, ...]:
    return tuple(GatewayRef(f"g{number}", f"10.0.{number // 256}.{number % 256}:7446") for number in numbers)


def test_a_region_that_names_other_gateways_in_each_agreement_has_no_more_of_them_called() -> None:
    delegations = Delegations()
    delegations.set(0, "evil", gateway_list(range(40)))
    delegations.set(1, "evil", gateway_list(range(30, 90)))
    delegations.set(2, "evil", gateway_list(range(90, 150)))
    delegations.set(3, "good", gateway_list(range(200, 250)))
    bound = [gateway_list(range(40)), gateway_list(range(30, GATEWAYS_MOST)), (), gateway_list(range(200, 250))]
    assert delegations.called_gateways == bound
    changes = delegations.changes
    delegations.publisher.publish()
    assert (delegations.called_gateways, delegations.changes) == (bound, changes), "it settles"
    for number in range(4, 50):
        delegations.set(number, "evil", tuple(GatewayRef("g0", f"10.1.{number}.{port}:1") for port in range(64)))
    assert (
        len({each for gateways in delegations.called_gateways[:-1] for each in gateways} - {*bound[3]}) == GATEWAYS_MOST
    )


def test_gateways_that_are_gone_make_room_for_others_and_the_same_ones_take_none() -> None:
    delegations = Delegations()
    for number in range(3):
        delegations.set(number, "a", gateway_list(range(60)))
    assert delegations.called_gateways == [gateway_list(range(60))] * 3
    delegations.set(0, "a", gateway_list(range(1, 70)))
    assert delegations.called_gateways[0] == gateway_list(range(1, 64))
    for number in range(1, 3):
        delegations.set(number, "a", gateway_list(range(10, 60)))
    delegations.publisher.publish()
    assert delegations.called_gateways == [
        gateway_list(range(1, 65)),
        gateway_list(range(10, 60)),
        gateway_list(range(10, 60)),
    ]
    for number in range(3):
        delegations.end(number)
    delegations.set(0, "a", gateway_list(range(100, 164)))
    delegations.publisher.publish()
    assert delegations.called_gateways == [gateway_list(range(100, 164))]


def test_a_trade_that_is_gone_without_word_makes_room() -> None:
    delegations = Delegations()
    delegations.set(0, "a", gateway_list(range(64)))
    delegations.set(1, "a", gateway_list(range(64, 128)))
    delegations.trades.clear()
    delegations.publisher.publish()
    assert delegations.called_gateways == []
    delegations.set(1, "a", gateway_list(range(64, 128)))
    assert delegations.called_gateways == [gateway_list(range(64, 128))]
