"""Rows of the fault table about etcd and the election: three real coordinators, three members of Debian's etcd."""

import asyncio
import signal
import statistics
from pathlib import Path

import grpc
import pytest

from harness.cluster.coordinator import REGION, operator
from harness.cluster.coordinators import CoordinatorCluster, TokenWriter, who_am_i
from harness.fakes.log import RecordingLog
from harness.faults.disk import SeededRng
from harness.report import record
from harness.servers.etcd import Etcd, etcd
from harness.wait import until, wait_until
from shoal.agent.link.credentials import CredentialFiles
from shoal.agent.link.grpc import GrpcLink
from shoal.client import Context, RegionClient
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.controllers.log.events import EventLog, LogEvent
from shoal.types.assignment import Version
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Node, Role
from shoal.types.link import Hello
from shoal.types.units import Bytes
from shoal.v1 import operator_pb2
from shoal.wire.enrol import redeem, renew
from shoal.wire.grpcio_status import refusal_of

pytestmark = pytest.mark.alone

TENANT = """apiVersion: shoal/v1
kind: Tenant
metadata: {name: acme}
spec: {quota: {replicas: 20, memory: 16GiB}}
"""
TAKEOVER_S = 5.0
MEDIAN_S = 3.0
PAUSE_S = 3.0
ATTEMPTS = 3
RESUMES_S = 5.0
CONVERGED_S = 10.0


def take_over(trio: CoordinatorCluster, kills: int) -> None:
    """With a client's writes beside it; with agents and requests: `test_takeover.py`."""
    seconds = []
    with TokenWriter(trio) as writer:
        for _ in range(kills):
            leader = trio.leader()
            leader.end(signal.SIGKILL)
            seconds.append(writer.wait_for_more())
            trio.start_one(leader)
    verdict = writer.verdict()
    assert verdict.violations == (), verdict
    assert max(seconds) <= TAKEOVER_S, seconds
    assert statistics.median(seconds) <= MEDIAN_S, seconds
    record(
        "F07", "P", kills, acknowledged=verdict.answered, unknown=verdict.unknown, lost=0,
        takeover_s=[round(each, 2) for each in seconds],
    )  # fmt: skip


def pause(trio: CoordinatorCluster, paused_s: float) -> None:
    """The leader stands still until another one leads, and for so long after that. What it had on its way is refused;
    it steps down, follows, and takes over again as any other."""
    with TokenWriter(trio) as writer:
        old = trio.leader()
        term = trio.term(old)
        assert old.process is not None
        old.process.send_signal(signal.SIGSTOP)
        try:
            writer.wait_for_more()
            assert trio.leader() is not old
            paused_for_s = wait_until_later(writer, paused_s)
        finally:
            old.process.send_signal(signal.SIGCONT)
        wait_until(lambda: who_am_i(old, trio.admin).follows, 15.0, "the old leader follows another one")
        writer.wait_for_more(5)
    verdict = writer.verdict()
    assert verdict.violations == (), verdict
    leader = trio.leader()
    events = operator(leader.link, trio.admin).Events(operator_pb2.EventsRequest(), timeout=10.0)
    terms = [int(event.message.removeprefix("term ")) for event in events if event.code == "LEADER_ELECTED"]
    assert terms == sorted(set(terms)), "each term has one leader, and none is gone back to"
    assert terms[-1] > term
    record("F08", "P", 1, paused_s=round(paused_for_s, 1), acknowledged=verdict.answered, stale_effects=0)


def wait_until_later(writer: TokenWriter, seconds: float) -> float:
    """As many seconds of acknowledged writes."""
    begun = writer.acknowledged_at[-1]
    wait_until(lambda: writer.acknowledged_at[-1] - begun >= seconds, seconds + 20.0, f"{seconds:g} s of writes")
    return writer.acknowledged_at[-1] - begun


async def test_f07_who_joined_and_who_connects_find_the_new_leader(
    coordinators: CoordinatorCluster, tmp_path: Path
) -> None:
    """Told of all three at once, as joining tells them."""
    links, enrols = (",".join(str(each.ready[name]) for each in coordinators.members) for name in ("link", "enrol"))
    leader = coordinators.leader()
    request = operator_pb2.CreateTokenRequest(role="agent", name="edge-1", valid_s=600.0)
    token = operator(leader.link, coordinators.admin).CreateToken(request, timeout=10.0).token
    enrolled = await asyncio.to_thread(redeem, enrols, token, "edge-1")
    enrolled.write(tmp_path / "identity")
    clock = CoordinatorClock()
    link = GrpcLink(CredentialFiles(tmp_path / "identity"), links, clock, RecordingLog())
    node = Node(
        "edge-1", REGION, Role.AGENT, {}, "0", "linux", "x86_64", Bytes(2**30), Bytes(2**30), (), "a:1", "a:4", "boot",
    )  # fmt: skip
    session = await link.connect(Hello(node, "nonce-1", None, 1, clock.wall()))
    before = session.welcome
    assert link.address == leader.link
    delay = coordinators.run_delay()
    leader.end(signal.SIGKILL)
    began = clock.now()
    with pytest.raises(ShoalError):
        await session.receive()
    await session.close()
    again = await until(
        lambda: link.connect(Hello(node, "nonce-2", Version(before.history, before.term, 0), 1, clock.wall())),
        30.0,
        "a session with the new leader",
    )
    away_s, delayed_s = clock.now() - began, delay.seconds()
    assert (again.welcome.history, again.welcome.term) == (before.history, before.term + 1)
    assert again.welcome.epoch == before.epoch + 1, "the session is the next one of the same node"
    assert away_s - delayed_s <= TAKEOVER_S, f"{away_s:.2f} s, of which {delayed_s:.2f} s others hold the cores"
    await asyncio.to_thread(renew, enrols, tmp_path / "identity")
    await again.close()
    await asyncio.to_thread(coordinators.start_one, leader)
    record("F07", "P", 1, agent_away_s=round(away_s, 2))


def test_f07_any_coordinator_will_do(coordinators: CoordinatorCluster, tmp_path: Path) -> None:
    """The operator's client knows one that follows; later the leader is lost under its hands."""
    leader = coordinators.leader()
    follower = next(each for each in coordinators.members if each is not leader)
    coordinators.admin.write(tmp_path / "admin")
    context = Context("one", REGION, follower.link, str(tmp_path / "admin"))
    with RegionClient(context) as api:
        stored = api.get("tenants")
        assert stored.served_by == follower.link, "what is stored a follower tells"
        assert api.address == follower.link
        assert not api.get("nodes").served_by
        assert api.address == leader.link, "what only the leader hears is asked there, from then on"

        def try_apply() -> operator_pb2.ApplyReply | None:
            try:
                return api.apply([operator_pb2.Document(name="t.yaml", text=TENANT)])
            except ShoalError as refused:
                if refused.code is not Code.STORE_UNAVAILABLE:
                    raise
                return None  # what became of a write of its start was in doubt: it reads its state again

        applied = wait_until(try_apply, CONVERGED_S, "the change to be taken")
        assert applied is not None
        assert not applied.problems
        with RegionClient(context) as other:

            def read() -> operator_pb2.GetReply | None:
                reply = other.get("tenants")
                return reply if reply.as_of >= applied.revision else None

            shown = wait_until(read, 5.0, "the follower has read what was applied")
            assert shown is not None
            assert shown.served_by == follower.link
            assert "acme" in {document.name for document in shown.documents}
            assert {each for each, answer in api.coordinators().items() if answer and not answer.follows} == {
                leader.link
            }
            (region,) = other.get("regions").regions
            assert (region.leader, other.address) == (leader.link, leader.link)
        delay = coordinators.run_delay()
        leader.end(signal.SIGKILL)
        began = CoordinatorClock().now()
        assert api.create_token("agent", "edge-9").id
        away_s, delayed_s = CoordinatorClock().now() - began, delay.seconds()
        assert api.address != leader.link
    assert away_s - delayed_s <= TAKEOVER_S, f"{away_s:.2f} s, of which {delayed_s:.2f} s others hold the cores"
    coordinators.start_one(leader)
    record("F07", "P", 1, client_away_s=round(away_s, 2))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_f07_ten_leaders_one_after_the_other(coordinators: CoordinatorCluster) -> None:
    take_over(coordinators, 10)


def test_f08_a_leader_that_was_paused_changes_nothing_when_it_wakes(coordinators: CoordinatorCluster) -> None:
    pause(coordinators, 1.0)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_f08_a_leader_that_was_paused_for_half_a_minute(coordinators: CoordinatorCluster) -> None:
    pause(coordinators, 30.0)


@pytest.mark.parametrize("which", ["leader", "follower"])
def test_f09_a_member_of_etcd_is_lost(coordinators: CoordinatorCluster, cluster: Etcd, which: str) -> None:
    """Writes go on at the others; who follows the events misses none and sees none twice. Killed until they paused for
    no longer than they may: two that stand for election at once, or a machine that stalls, make it longer."""
    leader = coordinators.leader()
    following = operator(leader.link, coordinators.admin).Events(operator_pb2.EventsRequest(follow=True), timeout=120.0)
    pauses: list[float] = []
    acknowledged = 0
    while len(pauses) < ATTEMPTS and (not pauses or min(pauses) > PAUSE_S):
        wait_until(lambda: all(cluster.status(each).leader for each in cluster.members), 20.0, "etcd is whole")
        with TokenWriter(coordinators) as writer:
            member = cluster.leader()
            if which == "follower":
                member = next(each for each in cluster.members if each is not member)
            member.kill()
            writer.wait_for_more(20)
            pauses.append(writer.longest_pause())
            member.start()
        verdict = writer.verdict()
        assert verdict.violations == (), verdict
        acknowledged += verdict.answered
    assert min(pauses) <= PAUSE_S, pauses
    stub = operator(coordinators.leader().link, coordinators.admin)
    stored = [event.sequence for event in stub.Events(operator_pb2.EventsRequest(), timeout=10.0)]
    seen = []
    for event in following:
        seen.append(event.sequence)
        if event.sequence >= stored[-1]:
            break
    following.cancel()  # type: ignore[no-untyped-call]
    assert seen == [number for number in stored if number <= seen[-1]]
    wait_until(lambda: all(cluster.status(each).leader for each in cluster.members), 20.0, "etcd is whole again")
    record(
        "F09", "P", len(pauses), member=which, acknowledged=acknowledged, lost=0,
        writes_paused_s=round(min(pauses), 2), longest_s=round(max(pauses), 2),
        events_followed=len(seen),
    )  # fmt: skip


def without_quorum(trio: CoordinatorCluster, cluster: Etcd, down_s: float) -> None:
    """The leader keeps its seat and can change nothing; it says so to whoever asks for a change."""
    leader, killed = trio.leader(), cluster.members[:2]
    term = trio.term(leader)
    with TokenWriter(trio) as writer:
        for each in killed:
            each.kill()
        wait_until(lambda: Code.STORE_UNAVAILABLE in writer.codes, 30.0, "a change is refused with the code")
        wait_until(lambda: writer.silent_s() >= down_s, down_s + 10.0, f"{down_s:g} s without a write")
        assert not who_am_i(leader, trio.admin).follows
        away_s = writer.silent_s()
        for each in killed:
            each.start()
        wait_until(cluster.leader, 20.0, "etcd has a majority again")
        majority_at = writer.now()
        writer.wait_for_more()
        resumed_s = writer.first_acknowledged_after(majority_at) - majority_at
        writer.wait_for_more(5)
    verdict = writer.verdict()
    assert verdict.violations == (), verdict
    assert resumed_s <= RESUMES_S
    wait_until(lambda: all(cluster.status(each).leader for each in cluster.members), 20.0, "etcd is whole again")
    record(
        "F10", "P", 1, without_quorum_s=round(away_s, 1), acknowledged=verdict.answered, unknown=verdict.unknown,
        lost=0, resumed_s=round(resumed_s, 2),
        # A write that got no answer may have happened after all: the leader then reads all again, in another term.
        terms_begun=trio.term(trio.leader()) - term,
    )  # fmt: skip


def test_f10_without_a_majority_of_etcd_changes_are_refused_and_all_comes_back(
    coordinators: CoordinatorCluster, cluster: Etcd
) -> None:
    without_quorum(coordinators, cluster, 3.0)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_f10_a_minute_without_a_majority(coordinators: CoordinatorCluster, cluster: Etcd) -> None:
    without_quorum(coordinators, cluster, 60.0)


def test_f12_a_full_etcd_refuses_writes_takes_deletes_and_goes_on_once_disarmed(tmp_path: Path) -> None:
    """One coordinator, never restarted."""
    with etcd(tmp_path / "etcd", quota_bytes=12 * 2**20) as small:
        one = CoordinatorCluster(tmp_path, small, count=1)
        try:
            one.start()
            (coordinator,) = one.members
            stub = operator(coordinator.link, one.admin)
            token = stub.CreateToken(operator_pb2.CreateTokenRequest(role="agent", valid_s=600.0), timeout=10.0)
            small.fill()
            with pytest.raises(grpc.RpcError) as full:
                stub.CreateToken(operator_pb2.CreateTokenRequest(role="agent", valid_s=600.0), timeout=10.0)
            assert refusal_of(full.value).code is Code.STORE_FULL
            told = [each.refusal for each in stub.Doctor(operator_pb2.DoctorRequest(), timeout=10.0).checks]
            assert any("etcdctl alarm disarm" in each.remedy for each in told if each.code == Code.STORE_FULL)
            stub.Delete(operator_pb2.DeleteRequest(kind="token", name=token.id), timeout=10.0)
            assert not stub.Get(operator_pb2.GetRequest(kind="tokens"), timeout=10.0).tokens
            small.delete_filler()
            small.make_room()
            began = CoordinatorClock().now()
            wait_until(
                lambda: stub.CreateToken(operator_pb2.CreateTokenRequest(role="agent", valid_s=600.0), timeout=10.0),
                RESUMES_S,
                "writes again",
            )
            resumed_s = CoordinatorClock().now() - began
            record("F12", "P", 1, resumed_s=round(resumed_s, 2), restarts=0, deletes_when_full=1)
        finally:
            one.stop()


def test_f16_an_old_copy_of_etcd_begins_a_new_history(tmp_path: Path) -> None:
    """Put back under the hands of a running coordinator, which nobody restarts."""
    with etcd(tmp_path / "etcd") as one:
        alone = CoordinatorCluster(tmp_path, one, count=1)
        try:
            alone.start()
            (coordinator,) = alone.members
            one.stop()
            one.save()
            one.start()
            with TokenWriter(alone) as writer:
                writer.wait_for_more(5)
            before = who_am_i(coordinator, alone.admin)
            one.stop()
            one.restore()
            one.start()
            began = CoordinatorClock().now()
            wait_until(
                lambda: who_am_i(coordinator, alone.admin).history != before.history, CONVERGED_S, "another history"
            )
            with TokenWriter(alone) as again:
                again.wait_for_more(5)
            converged_s = CoordinatorClock().now() - began
            assert again.verdict().violations == ()
            stub = operator(coordinator.link, alone.admin)
            told = [event.message for event in stub.Events(operator_pb2.EventsRequest(), timeout=10.0)]
            assert any("it is another cluster, or an old copy" in message for message in told)
            assert coordinator.process is not None
            assert coordinator.process.poll() is None
            record("F16", "P", 1, store="etcd", converged_s=round(converged_s, 2), restarts=0)
        finally:
            alone.stop()


async def test_f11_who_slept_past_a_compaction_lists_again(cluster: Etcd, tmp_path: Path) -> None:
    """Readers of the event log that sleep at random while etcd forgets: each sees every event that is kept, once."""
    store = await cluster.open(tmp_path / "store")
    clock = CoordinatorClock()
    log = EventLog(store, clock, kept=300, audit_kept=10)
    await log.start()
    await log.write(LogEvent("FIRST", "x", ""))
    chance, seen = SeededRng(11), [list[int]() for _ in range(4)]

    async def read(number: int) -> None:
        async for event in log.follow(0):
            seen[number].append(event.sequence)
            if chance.below(20) == 0:
                await asyncio.sleep(chance.below(200) / 1000)  # noqa: TID251 - it is what this reader does
            if event.code == "LAST":
                return

    readers = [asyncio.create_task(read(number)) for number in range(len(seen))]
    for number in range(600):
        await log.write(LogEvent("MORE", str(number), "x" * 4000))
        if number % 100 == 99:
            await asyncio.to_thread(cluster.compact)
    await log.write(LogEvent("LAST", "x", ""))
    await asyncio.wait_for(asyncio.gather(*readers), 30.0)
    kept = [event.sequence for event in await log.events_after(0, 10_000)]
    for each in seen:
        assert each == sorted(set(each)), "none twice, none out of order"
        assert set(kept[-1:]) <= set(each)
        # What a reader missed had been pushed out of the log before it listed again.
        assert not {number for number in kept if number > each[0]} - set(each)
    await store.close()
    record("F11", "P", len(seen), events=602, compactions=6, seen=[len(each) for each in seen])
