"""Leaders that die or stand still, etcd without a majority: what it means for real agents and for requests."""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.cluster.coordinators import CoordinatorCluster, TokenWriter, who_am_i
from harness.cluster.fleet import RETRYABLE_CODES, AgentFleet, DesiredSetAudit, Running
from harness.faults.disk import SeededRng
from harness.measure.history import HistoryVerdict
from harness.report import record
from harness.wait import wait_until
from shoal.types.codes import Code, ShoalError

TAKEOVER_S = 5.0
RESUMES_S = 5.0
PAUSE_S = 30.0
WITHOUT_S = 60.0
MOST = 2
"""Replicas that any of these tests wants."""
ROWS = {"coordinator": "F07", "etcd": "F09"}
"""Whose leader is killed."""


@pytest.fixture(scope="module")
def fleet(coordinators: CoordinatorCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentFleet]:
    found = AgentFleet(coordinators.members, tmp_path_factory.mktemp("crew"))
    try:
        found.start()
        found.apply_workload(1, "relu")
        found.wait_settled()
        yield found
    finally:
        found.stop()


Wanted = tuple[int, str]
"""Replicas, and the model's name."""
SCALED, CHANGED = (2, "relu"), (2, "relu-2")
ROUND: Sequence[Wanted] = (SCALED, CHANGED, (1, "relu-2"), (2, "relu-2"), (2, "relu"), (1, "relu"))


@dataclass
class FaultResult:
    """What kills in the midst of changes came to. delayed_s: what other programs of the machine took from each
    takeover. unanswered: changes whose end nobody was told."""

    takeover_s: list[float] = field(default_factory=list)
    delayed_s: list[float] = field(default_factory=list)
    settled_s: list[float] = field(default_factory=list)
    unanswered: int = 0


def strike(
    trio: CoordinatorCluster,
    crew: AgentFleet,
    writer: TokenWriter,
    victim: str,
    wanted: Wanted,
    delay_s: float,
    struck: FaultResult,
) -> None:
    """Whichever leads (`coordinator` or `etcd`) is killed so long after a change was asked for. What was acknowledged
    holds, what was not is asked for again; the end is what was wanted and nothing else."""
    leader, member = trio.leader(), trio.cluster.leader()
    with ThreadPoolExecutor(1) as asking:
        asked = asking.submit(crew.apply_workload, *wanted)
        wait((asked,), delay_s)
        delay = trio.run_delay()
        if victim == "coordinator":
            leader.end(signal.SIGKILL)
        else:
            member.kill()
        began = writer.now()
        struck.takeover_s.append(writer.wait_for_more())
        struck.delayed_s.append(delay.seconds())
        if not is_acknowledged(asked):
            struck.unanswered += 1
            crew.apply_until_acknowledged()
    crew.wait_settled()
    struck.settled_s.append(writer.now() - began)
    if victim == "coordinator":
        trio.start_one(leader)
    else:
        member.start()
        wait_until(
            lambda: all(trio.cluster.status(each).leader for each in trio.cluster.members), 20.0, "etcd is whole"
        )


def is_acknowledged(asked: "Future[int]") -> bool:
    try:
        asked.result()
    except ShoalError as error:
        if error.code not in RETRYABLE_CODES:
            raise
        return False
    return True


async def take_over(
    trio: CoordinatorCluster, crew: AgentFleet, strikes: Sequence[tuple[str, Wanted]], folder: Path
) -> None:
    written, chance = DesiredSetAudit(trio.cluster, folder, MOST), SeededRng(len(strikes))
    by_victim = {victim: FaultResult() for victim, _ in strikes}

    def work() -> tuple[HistoryVerdict, HistoryVerdict]:
        with crew.load() as load:
            with TokenWriter(trio) as writer:
                for victim, wanted in strikes:
                    strike(trio, crew, writer, victim, wanted, chance.below(150) / 1000, by_victim[victim])
            load.wait_for(20)
        return load.verdict(), writer.verdict()

    await written.begin()
    requests, writes = await asyncio.to_thread(work)
    await written.end()
    assert written.sets, "nothing changed"
    assert written.violations == []
    assert writes.violations == (), writes
    assert (requests.lost_count, requests.violations) == (0, ()), requests
    for victim, struck in by_victim.items():
        own_s = [took_s - delayed_s for took_s, delayed_s in zip(struck.takeover_s, struck.delayed_s, strict=True)]
        assert max(own_s) <= TAKEOVER_S, struck
        record(
            ROWS[victim], "P", len(struck.takeover_s), killed=victim, takeover_s=round_all(struck.takeover_s),
            settled_s=round_all(struck.settled_s), changes_unanswered=struck.unanswered, requests=requests.answered,
            requests_lost=0, slowest_ms=round(requests.slowest_s * 1000), writes=writes.answered, writes_lost=0,
            sets=written.sets, terms=len(written.terms), doubled=0,
        )  # fmt: skip


def round_all(seconds: Sequence[float]) -> list[float]:
    return [round(each, 2) for each in seconds]


async def test_f07_f09_leaders_that_die_in_the_midst_of_changes_double_and_lose_nothing(
    coordinators: CoordinatorCluster, fleet: AgentFleet, tmp_path: Path
) -> None:
    await take_over(coordinators, fleet, [("coordinator", SCALED), ("etcd", (1, "relu"))], tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_f07_twelve_changes_and_as_many_leaders(
    coordinators: CoordinatorCluster, fleet: AgentFleet, tmp_path: Path
) -> None:
    await take_over(coordinators, fleet, [("coordinator", wanted) for wanted in (*ROUND, *ROUND)], tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_f09_twelve_changes_and_as_many_leaders_of_etcd(
    coordinators: CoordinatorCluster, fleet: AgentFleet, tmp_path: Path
) -> None:
    await take_over(coordinators, fleet, [("etcd", wanted) for wanted in (*ROUND, *ROUND)], tmp_path)


def as_it_was(crew: AgentFleet) -> Running:
    """Two replicas serve; which, since when."""
    crew.apply_workload(*SCALED)
    crew.wait_settled()
    return crew.running_workers()


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_f08_agents_of_a_leader_that_stood_still_for_half_a_minute(
    coordinators: CoordinatorCluster, fleet: AgentFleet, tmp_path: Path
) -> None:
    """They find the one that leads meanwhile, and nothing that they run is touched, then or when it wakes."""
    before, written = as_it_was(fleet), DesiredSetAudit(coordinators.cluster, tmp_path, MOST)

    def work() -> tuple[HistoryVerdict, HistoryVerdict, float, Running]:
        with fleet.load() as load, TokenWriter(coordinators) as writer:
            old = coordinators.leader()
            assert old.process is not None
            old.process.send_signal(signal.SIGSTOP)
            stopped_at = writer.now()
            try:
                writer.wait_for_more()
                fleet.wait_settled()
                back_s = writer.now() - stopped_at
                wait_until(lambda: writer.now() - stopped_at >= PAUSE_S, PAUSE_S + 5.0, "the pause to be over")
                meanwhile = fleet.running_workers()
            finally:
                old.process.send_signal(signal.SIGCONT)
            wait_until(lambda: who_am_i(old, coordinators.admin).follows, 15.0, "the old leader follows another one")
            writer.wait_for_more(50)
            load.wait_for(100)
            assert meanwhile == before
        return load.verdict(), writer.verdict(), back_s, fleet.running_workers()

    await written.begin()
    requests, writes, back_s, after = await asyncio.to_thread(work)
    await written.end()
    fleet.wait_settled()
    assert after == before, "no replica was moved, ended or begun"
    assert written.violations == [], "no generation and no term goes back"
    assert writes.violations == (), writes
    assert (requests.lost_count, requests.violations) == (0, ()), requests
    record(
        "F08", "P", 1, paused_s=PAUSE_S, agents_back_s=round(back_s, 2), requests=requests.answered, requests_lost=0,
        slowest_ms=round(requests.slowest_s * 1000), writes=writes.answered, writes_lost=0, sets=written.sets,
        replicas_moved=0, stale_effects=0,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(240)
def test_f10_inference_goes_on_for_a_minute_without_a_majority_of_etcd(
    coordinators: CoordinatorCluster, fleet: AgentFleet
) -> None:
    before = as_it_was(fleet)
    cluster, killed = coordinators.cluster, coordinators.cluster.members[:2]
    with fleet.load() as load, TokenWriter(coordinators) as writer:
        for each in killed:
            each.kill()
        wait_until(lambda: Code.STORE_UNAVAILABLE in writer.codes, 30.0, "a change is refused with the code")
        wait_until(lambda: writer.silent_s() >= WITHOUT_S, WITHOUT_S + 10.0, "a minute without a write")
        with pytest.raises(ShoalError) as refused:
            fleet.apply_workload(1, "relu")
        fleet.desired = SCALED
        away_s = writer.silent_s()
        assert fleet.running_workers() == before
        for each in killed:
            each.start()
        wait_until(cluster.leader, 20.0, "etcd has a majority again")
        majority_at = writer.now()
        writer.wait_for_more()
        resumed_s = writer.first_acknowledged_after(majority_at) - majority_at
        rows = fleet.wait_settled()
        load.wait_for(100)
    verdict, writes = load.verdict(), writer.verdict()
    assert refused.value.code is Code.STORE_UNAVAILABLE
    assert fleet.running_workers() == before, "nobody was declared lost, and nothing was moved"
    assert writes.violations == (), writes
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    assert resumed_s <= RESUMES_S
    record(
        "F10", "P", 1, without_quorum_s=round(away_s, 1), requests=verdict.answered, requests_lost=0,
        slowest_ms=round(verdict.slowest_s * 1000), writes=writes.answered, writes_lost=0,
        resumed_s=round(resumed_s, 2), replicas_untouched=len(rows),
    )  # fmt: skip
