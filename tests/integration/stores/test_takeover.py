"""Leaders that die or stand still, etcd without a majority: what it means for real agents and for requests."""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.crew import UNSETTLED, Crew, Running, Written
from harness.disk import Chance
from harness.history import Verdict
from harness.report import record
from harness.trio import Trio, Writer, who
from harness.wait import wait_until
from shoal.types.codes import Code, ShoalError

pytestmark = pytest.mark.alone
TAKEOVER_S = 5.0
RESUMES_S = 5.0
PAUSE_S = 30.0
WITHOUT_S = 60.0
MOST = 2
"""Replicas that any of these tests wants."""
ROWS = {"coordinator": "F07", "etcd": "F09"}
"""Whose leader is killed."""


@pytest.fixture(scope="module")
def crew(trio: Trio, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    found = Crew(trio.members, tmp_path_factory.mktemp("crew"))
    try:
        found.start()
        found.want(1, "relu")
        found.settled()
        yield found
    finally:
        found.stop()


Wanted = tuple[int, str]
"""Replicas, and the model's name."""
SCALED, CHANGED = (2, "relu"), (2, "relu-2")
ROUND: Sequence[Wanted] = (SCALED, CHANGED, (1, "relu-2"), (2, "relu-2"), (2, "relu"), (1, "relu"))


@dataclass
class Struck:
    """What kills in the midst of changes came to. unanswered: changes whose end nobody was told."""

    takeover_s: list[float] = field(default_factory=list)
    settled_s: list[float] = field(default_factory=list)
    unanswered: int = 0


def strike(trio: Trio, crew: Crew, writer: Writer, victim: str, wanted: Wanted, delay_s: float, struck: Struck) -> None:
    """Whichever leads (`coordinator` or `etcd`) is killed so long after a change was asked for. What was acknowledged
    holds, what was not is asked for again; the end is what was wanted and nothing else."""
    leader, member = trio.leader(), trio.cluster.leader()
    with ThreadPoolExecutor(1) as asking:
        asked = asking.submit(crew.want, *wanted)
        wait((asked,), delay_s)
        if victim == "coordinator":
            leader.end(signal.SIGKILL)
        else:
            member.kill()
        began = writer.now()
        struck.takeover_s.append(writer.wait_for_more())
        if not is_acknowledged(asked):
            struck.unanswered += 1
            crew.insist()
    crew.settled()
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
        if error.code not in UNSETTLED:
            raise
        return False
    return True


async def take_over(trio: Trio, crew: Crew, strikes: Sequence[tuple[str, Wanted]], folder: Path) -> None:
    written, chance = Written(trio.cluster, folder, MOST), Chance(len(strikes))
    by_victim = {victim: Struck() for victim, _ in strikes}

    def work() -> tuple[Verdict, Verdict]:
        with crew.load() as load:
            with Writer(trio) as writer:
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
    assert (requests.lost, requests.violations) == (0, ()), requests
    for victim, struck in by_victim.items():
        assert max(struck.takeover_s) <= TAKEOVER_S, struck
        record(
            ROWS[victim], "P", len(struck.takeover_s), killed=victim, takeover_s=rounded(struck.takeover_s),
            settled_s=rounded(struck.settled_s), changes_unanswered=struck.unanswered, requests=requests.answered,
            requests_lost=0, slowest_ms=round(requests.slowest_s * 1000), writes=writes.answered, writes_lost=0,
            sets=written.sets, terms=len(written.terms), doubled=0,
        )  # fmt: skip


def rounded(seconds: Sequence[float]) -> list[float]:
    return [round(each, 2) for each in seconds]


async def test_f07_f09_leaders_that_die_in_the_midst_of_changes_double_and_lose_nothing(
    trio: Trio, crew: Crew, tmp_path: Path
) -> None:
    await take_over(trio, crew, [("coordinator", SCALED), ("etcd", (1, "relu"))], tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_f07_twelve_changes_and_as_many_leaders(trio: Trio, crew: Crew, tmp_path: Path) -> None:
    await take_over(trio, crew, [("coordinator", wanted) for wanted in (*ROUND, *ROUND)], tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_f09_twelve_changes_and_as_many_leaders_of_etcd(trio: Trio, crew: Crew, tmp_path: Path) -> None:
    await take_over(trio, crew, [("etcd", wanted) for wanted in (*ROUND, *ROUND)], tmp_path)


def as_it_was(crew: Crew) -> Running:
    """Two replicas serve; which, since when."""
    crew.want(*SCALED)
    crew.settled()
    return crew.running()


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_f08_agents_of_a_leader_that_stood_still_for_half_a_minute(
    trio: Trio, crew: Crew, tmp_path: Path
) -> None:
    """They find the one that leads meanwhile, and nothing that they run is touched, then or when it wakes."""
    before, written = as_it_was(crew), Written(trio.cluster, tmp_path, MOST)

    def work() -> tuple[Verdict, Verdict, float, Running]:
        with crew.load() as load, Writer(trio) as writer:
            old = trio.leader()
            assert old.process is not None
            old.process.send_signal(signal.SIGSTOP)
            stopped_at = writer.now()
            try:
                writer.wait_for_more()
                crew.settled()
                back_s = writer.now() - stopped_at
                wait_until(lambda: writer.now() - stopped_at >= PAUSE_S, PAUSE_S + 5.0, "the pause to be over")
                meanwhile = crew.running()
            finally:
                old.process.send_signal(signal.SIGCONT)
            wait_until(lambda: who(old, trio.admin).follows, 15.0, "the old leader follows another one")
            writer.wait_for_more(50)
            load.wait_for(100)
            assert meanwhile == before
        return load.verdict(), writer.verdict(), back_s, crew.running()

    await written.begin()
    requests, writes, back_s, after = await asyncio.to_thread(work)
    await written.end()
    crew.settled()
    assert after == before, "no replica was moved, ended or begun"
    assert written.violations == [], "no generation and no term goes back"
    assert writes.violations == (), writes
    assert (requests.lost, requests.violations) == (0, ()), requests
    record(
        "F08", "P", 1, paused_s=PAUSE_S, agents_back_s=round(back_s, 2), requests=requests.answered, requests_lost=0,
        slowest_ms=round(requests.slowest_s * 1000), writes=writes.answered, writes_lost=0, sets=written.sets,
        replicas_moved=0, stale_effects=0,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(240)
def test_f10_inference_goes_on_for_a_minute_without_a_majority_of_etcd(trio: Trio, crew: Crew) -> None:
    before = as_it_was(crew)
    cluster, killed = trio.cluster, trio.cluster.members[:2]
    with crew.load() as load, Writer(trio) as writer:
        for each in killed:
            each.kill()
        wait_until(lambda: Code.STORE_UNAVAILABLE in writer.codes, 30.0, "a change is refused with the code")
        wait_until(lambda: writer.silent_s() >= WITHOUT_S, WITHOUT_S + 10.0, "a minute without a write")
        with pytest.raises(ShoalError) as refused:
            crew.want(1, "relu")
        crew.wanted = SCALED
        away_s = writer.silent_s()
        assert crew.running() == before
        for each in killed:
            each.start()
        wait_until(cluster.leader, 20.0, "etcd has a majority again")
        majority_at = writer.now()
        writer.wait_for_more()
        resumed_s = writer.first_after(majority_at) - majority_at
        rows = crew.settled()
        load.wait_for(100)
    verdict, writes = load.verdict(), writer.verdict()
    assert refused.value.code is Code.STORE_UNAVAILABLE
    assert crew.running() == before, "nobody was declared lost, and nothing was moved"
    assert writes.violations == (), writes
    assert (verdict.lost, verdict.violations) == (0, ()), verdict
    assert resumed_s <= RESUMES_S
    record(
        "F10", "P", 1, without_quorum_s=round(away_s, 1), requests=verdict.answered, requests_lost=0,
        slowest_ms=round(verdict.slowest_s * 1000), writes=writes.answered, writes_lost=0,
        resumed_s=round(resumed_s, 2), replicas_untouched=len(rows),
    )  # fmt: skip
