"""Regions that trade under seeded faults, regions that lie, and regions that take without buying (F44, F36, A28).

`pytest tests/simulation/test_trade_rows.py --trade-seeds N`, or SHOAL_TRADE_SEEDS; 10,000 by one command:
`python -m shoal.simulator --scenario negotiation --seed 0 --count 10000`.
"""

import asyncio
import os
from collections import Counter
from dataclasses import replace
from statistics import median
from time import perf_counter

import pytest

from harness.report import record
from shoal.coordinator.core.negotiation.hold import offer_of
from shoal.coordinator.core.workloads.schedule import demand_of
from shoal.simulator.parts.federation import SimRegion
from shoal.simulator.parts.inter_region import SimPeerRegions
from shoal.simulator.run.seeds import replay, run_seeds
from shoal.simulator.scenarios.negotiation import (
    AWAY,
    FAR,
    HOME,
    PROFILES,
    TEXT,
    FederationRun,
    NegotiationDraw,
    make_intent,
    make_resources,
    run_federation,
)
from shoal.simulator.scenarios.region_run import RunOutcome
from shoal.simulator.world.rng import Rng
from shoal.simulator.world.world import SimProcess
from shoal.types.agreement import ServiceReport
from shoal.types.codes import Code, ShoalError
from shoal.types.device import EnergySource
from shoal.types.offer import Answer, Decline, Offer, Solicitation
from shoal.types.units import Joules, Seconds
from shoal.types.workload import TradeRule, WorkloadKey

JOBS = os.cpu_count() or 1
AGREEMENTS = 20
LIARS = 5
SHARE = 0.25
LATELY = 100
"""Of what is weighed every 0.05 s."""


def describe_outcome(outcome: RunOutcome) -> str:
    return f"{replay(outcome)}\n    " + "\n    ".join(outcome.violations[:5])


def count_faults_and_messages(outcomes: list[RunOutcome]) -> tuple[dict[str, int], dict[str, int]]:
    struck, said = Counter[str](), Counter[str]()
    for outcome in outcomes:
        struck.update(outcome.fault_counts)
        said.update(outcome.counts)
    return dict(sorted(struck.items())), dict(sorted(said.items()))


def test_f44_negotiations_under_faults_at_every_step(trade_seeds: range) -> None:
    """No hold outlives its expiry, no award is doubled, no agreement is one-sided beyond its lease, and both ledgers
    tell one story; then all comes to rest, and nothing is left when it is taken back."""
    negotiate(trade_seeds)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_f44_ten_thousand_negotiations() -> None:
    negotiate(range(100_000, 110_000))


STRIKES = {
    f"fault.{name}"
    for name in (
        "weather", "killed", "rebooted", "stopped", "cut", "slow-disk", "full-disk", "unanswered",
        "withdrawn", "taken-back",
    )
}  # fmt: skip


def negotiate(trade_seeds: range) -> None:
    began = perf_counter()
    outcomes = list(run_seeds(trade_seeds, "negotiation", JOBS))
    took = perf_counter() - began
    failed = [outcome for outcome in outcomes if outcome.violations]
    rested = [outcome.converged_s for outcome in outcomes if outcome.converged_s == outcome.converged_s]
    struck, said = count_faults_and_messages(outcomes)
    record(
        "F44",
        "S",
        len(outcomes),
        failed=len(failed),
        ms_each=round(1000 * took / len(outcomes), 1),
        at_rest_median_s=round(median(rested), 1),
        at_rest_worst_s=round(max(rested), 1),
        struck=struck,
        said=said,
    )
    assert not failed, f"{len(failed)} of {len(outcomes)} seeds failed\n" + "\n".join(
        map(describe_outcome, failed[:10])
    )
    if len(outcomes) >= 100:  # a fault that never struck was not survived
        assert struck.keys() >= STRIKES, STRIKES - struck.keys()
        assert {"solicitation", "award", "release", "renewal", "notice"} <= said.keys()


def test_the_same_seed_negotiates_the_same_way() -> None:
    first = [outcome.digest for outcome in run_seeds(range(4), "negotiation", 1)]
    assert first == [outcome.digest for outcome in run_seeds(range(4), "negotiation", 2)]


def liar(chance: Rng) -> NegotiationDraw:
    """Nobody at home; `south` is cheap and slow, `west` dearer and about half again as fast."""
    slow = chance.uniform(2e10, 3e10)
    estates = (
        make_resources(HOME, 1e9),
        make_resources(AWAY, slow, price=1.0),
        make_resources(FAR, slow * chance.uniform(1.3, 1.8), price=chance.uniform(1.2, 1.6)),
    )
    wanted = {HOME: (make_intent(TEXT, 0.5, weights={"latency": 0.8, "cost": 0.2}),)}
    return NegotiationDraw(estates, 1, wanted, is_placeable=True)


def half(answer: Answer) -> Answer:
    """Half of what it will be."""
    return replace(answer, latency_p95_s=Seconds(answer.latency_p95_s / 2)) if isinstance(answer, Offer) else answer


async def buys(stage: FederationRun, lies: bool) -> list[str]:
    """Whom 20 agreements went to, one after the other; what each delivers is what it would have promised honestly."""
    federated = stage.federation
    true_s, bidders, winners = dict[str, float](), dict[str, str](), list[str]()

    def tells(answer: Answer) -> Answer:
        if not isinstance(answer, Offer):
            return answer
        true_s[answer.region] = answer.latency_p95_s
        return half(answer) if lies and answer.region == AWAY else answer

    def service_report(agreement: str) -> ServiceReport:
        there = true_s.get(bidders.get(agreement, ""), 0.0) + 0.004
        return ServiceReport(200, 0, Seconds(there), Joules(1.0), EnergySource.ESTIMATED, 0.0)

    home = federated.sites[HOME]
    home.engine.gateway_report = service_report
    for name in (AWAY, FAR):
        federated.sites[name].alter_answer = tells
    await federated.start()
    await stage.wait_quiescent(
        lambda: [] if federated.is_fully_listed() else ["somebody is not listed"], 30.0, "coming up"
    )
    for _ in range(AGREEMENTS):
        home.set_intents(stage.draw.intents[HOME])
        await stage.wait_quiescent(lambda: federated.missing(served=True), 60.0, "asked for")
        (delegated,) = home.engine.delegations.values()
        bidders[delegated.agreement] = delegated.region
        winners.append(delegated.region)
        await asyncio.sleep(5.0)
        home.set_intents(())
        await stage.wait_quiescent(lambda: federated.missing(served=False), 60.0, "taken back")
    federated.read_ledgers()
    stage.world.record("run.ends")
    return winners


def test_f36_a_region_that_halves_its_latency_loses_most_awards_to_an_honest_dearer_one() -> None:
    lost = []
    for seed in range(LIARS):
        winners: list[str] = []

        async def scenario(stage: FederationRun) -> None:
            winners.extend(await buys(stage, lies=True))  # noqa: B023 - played at once

        outcome = run_federation(seed, liar, scenario)
        assert not outcome.violations, describe_outcome(outcome)
        assert winners[0] == AWAY, "its lie is the better bid at first"
        lost.append(winners.count(FAR))
        assert winners.count(FAR) > AGREEMENTS / 2, winners
    record("F36", "S", LIARS, agreements_each=AGREEMENTS, won_by_the_honest=lost, fewest=min(lost))


def test_f36_who_keeps_its_word_keeps_winning() -> None:
    """The very same two, without the lie: nothing but the lie has cost it its awards."""
    chosen: list[str] = []

    async def scenario(stage: FederationRun) -> None:
        chosen.extend(await buys(stage, lies=False))

    assert not run_federation(0, liar, scenario).violations
    assert len(set(chosen)) == 1, chosen


def greedy(chance: Rng) -> NegotiationDraw:
    """`south` asks for all that `west` has; `north` needs a place there."""
    estates = (
        make_resources(HOME, 1e9),
        make_resources(AWAY, 1e9),
        make_resources(FAR, 1e11, nodes=chance.randint(3, 6), memory=1 << 28),
    )
    return NegotiationDraw(estates, 1, {HOME: (make_intent(TEXT, 0.1),)}, is_placeable=True)


def solicitation(number: int) -> Solicitation:
    asks = make_intent(WorkloadKey("shop", f"greedy-{number}"), 0.1)
    return Solicitation(
        id=f"greed-{number}",
        round=1,
        origin=AWAY,
        workload=asks.key,
        models=tuple(PROFILES.values()),
        require=asks.require,
        limits=asks.limits,
        weights=asks.weights,
        traffic=demand_of(asks.traffic),
        max_batch=1,
        term_s=Seconds(1800.0),
        answer_s=Seconds(1.0),
        indicative=False,
        way_s={FAR: 0.004},
    )


def test_a28_holds_taken_and_never_awarded_leave_room_for_others() -> None:
    """Its share is the cap at first; as nothing comes of what it holds, what it can hold falls, and who buys stands."""
    outcomes, standings = Counter[str](), dict[str, list[float]]()
    weighed = dict[int, list[float]]()
    seeds = 2

    async def scenario(stage: FederationRun) -> None:
        federated = stage.federation
        seller, buyer = federated.sites[FAR], federated.sites[HOME]
        seller.engine.catalog = replace(
            seller.engine.catalog, trade_rules=(TradeRule(AWAY, hold_share=SHARE), TradeRule("*"))
        )
        await federated.start()
        await stage.wait_quiescent(
            lambda: [] if federated.is_fully_listed() else ["somebody is not listed"], 30.0, "coming up"
        )
        greedy_peers = SimPeerRegions(SimProcess(stage.world, "greedy"), federated.network, AWAY)
        background = [
            asyncio.ensure_future(_flood(greedy_peers, outcomes)),
            asyncio.ensure_future(_weigh(seller, weighed.setdefault(len(weighed), []))),
        ]
        await asyncio.sleep(5.0)
        buyer.set_intents(stage.draw.intents[HOME])
        await stage.wait_quiescent(lambda: _missing(stage), 30.0, "asked for beside the flood")
        await asyncio.sleep(25.0)
        assert seller.delegate is not None
        for origin in (AWAY, HOME):
            standings.setdefault(origin, []).append(seller.delegate.standing(origin))
        for task in background:
            task.cancel()
        await asyncio.wait(background)
        buyer.set_intents(())
        await stage.wait_quiescent(lambda: federated.missing(served=False), 60.0, "taken back")

    for seed in range(seeds):
        outcome = run_federation(seed, greedy, scenario)
        assert not outcome.violations, describe_outcome(outcome)
    assert outcomes["Offer"] > 0
    assert outcomes[str(Code.HOLD_SHARE)] > 0
    assert outcomes[str(Code.OVERLOADED)] > 0
    firsts, lasts = [], []
    for shares in weighed.values():
        assert 0 < max(shares) <= SHARE
        firsts.append(max(shares))
        lasts.append(max(shares[-LATELY:]))
    assert max(standings[AWAY]) < 0.5 < 0.9 < min(standings[HOME])
    assert max(lasts) <= 0.5 * min(firsts)
    record(
        "A28", "S", seeds, share=SHARE, most_held=round(max(firsts), 3), held_at_the_end=round(max(lasts), 3),
        standing=round(max(standings[AWAY]), 3), standing_of_who_buys=round(min(standings[HOME]), 3),
        answers=dict(outcomes),
    )  # fmt: skip


def _missing(stage: FederationRun) -> list[str]:
    away = stage.federation.sites[HOME].engine.delegations.get(TEXT)
    return [] if away is not None and away.is_ready else ["it is not served"]


async def _flood(peers: SimPeerRegions, outcomes: Counter[str]) -> None:
    """67 solicitations a second, none of which is meant."""
    async with asyncio.TaskGroup() as group:
        for number in range(100_000):
            group.create_task(_take(peers, solicitation(number), outcomes))
            await asyncio.sleep(0.015)


async def _take(peers: SimPeerRegions, asked: Solicitation, outcomes: Counter[str]) -> None:
    try:
        answer = (await peers.request_bid(FAR, asked)).content
    except ShoalError as refused:
        outcomes[str(refused.code)] += 1
        return
    outcomes[str(answer.refusal.code) if isinstance(answer, Decline) else "Offer"] += 1


async def _weigh(seller: SimRegion, shares: list[float]) -> None:
    """What share of its memory the greedy one holds, again and again."""
    total = sum(chip.device.memory_bytes for chip in seller.engine.resources.nodes.values())
    while True:
        assert seller.delegate is not None
        origins = {bid: offer_of(state).origin for bid, state in seller.delegate.states.items()}
        held = sum(each.memory_bytes for each in seller.engine.reservations if origins.get(each.bid) == AWAY)
        shares.append(held / total)
        await asyncio.sleep(0.05)
