"""etcd in three containers, hurt beneath four control planes, under load at the published ports."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from harness.cluster.compose import AWAY, ETCD, GATEWAYS, NODES, PROJECT, STATE, STEADY, WAIT_TIMEOUT_S, Compose, docker
from harness.cluster.coordinator import operator, operator_of
from harness.cluster.coordinators import TokenWriter, who_am_i
from harness.ports import free_ports
from harness.report import record
from harness.wait import wait_until
from shoal.types.codes import Code, ShoalError
from shoal.v1 import operator_pb2
from shoal.wire.identity import store_user_of
from shoal.wire.member_files import Enrolled

pytestmark = [pytest.mark.compose, pytest.mark.alone, pytest.mark.timeout(300)]

PAUSE_S = 3.0
RESUMES_S = 5.0
WITHOUT_QUORUM_S = 15.0
"""Longer than `partition.lost_after`, and than an agreement is renewed."""
FILLER = (
    "for number in $(seq 200); do head -c 1500000 /dev/zero | tr '\\0' x | etcdctl put filler/$number || exit 0; done"
)


@dataclass(frozen=True)
class Coordinator:
    """Of one region, for `harness.cluster.coordinators.Writer`."""

    link: str
    admin: Enrolled

    @property
    def members(self) -> Sequence["Coordinator"]:
        return (self,)

    def leader(self) -> "Coordinator":
        return self


def coordinator(compose: Compose, region: str) -> Coordinator:
    link = f"127.0.0.1:{compose.port('link', region)}"
    return Coordinator(link, operator_of(region, compose.home / region / "operator", link))


LAB = "lab"
CONVERGED_S = 10.0


@dataclass(frozen=True)
class Pair:
    """Two coordinators of a region of their own."""

    members: Sequence[Coordinator]
    names: Sequence[str]
    admin: Enrolled

    def leader(self) -> Coordinator:
        def leading() -> Coordinator | None:
            return next((each for each in self.members if not self.follows(each)), None)

        found = wait_until(leading, WAIT_TIMEOUT_S, "one of them leads", every_s=0.1)
        assert found is not None
        return found

    def follows(self, member: Coordinator) -> bool:
        try:
            return bool(who_am_i(member, self.admin).follows)
        except grpc.RpcError:
            return True

    def tokens_and_events(self, member: Coordinator) -> tuple[list[str], list[int]]:
        """Its tokens, and its events as they are told."""
        stub = operator(member.link, self.admin)
        tokens = stub.Get(operator_pb2.GetRequest(kind="tokens"), timeout=10.0).tokens
        events = stub.Events(operator_pb2.EventsRequest(), timeout=10.0)
        return sorted(token.id for token in tokens), [event.sequence for event in events]


@pytest.fixture
def pair(fleet: Compose, tmp_path: Path) -> Iterator[Pair]:
    """On the etcd of all others, like cloud's coordinator, as a user of its own: the region is added as the guide has
    it."""
    scope, files = f"region/{LAB}", tmp_path / "etcd"
    files.mkdir()
    mounted = f"{files}:/stack/etcd/{store_user_of(scope)}"
    fleet.compose("run", "--rm", "-T", "--no-deps", "--volume", mounted, "etcd-files", f"--scope={scope}")
    fleet.compose("run", "--rm", "-T", "--no-deps", "etcd-users", f"--scope={scope}")
    names, ports = (f"{LAB}-1", f"{LAB}-2"), free_ports(2)
    folders = [tmp_path / name for name in (*names, "shared")]
    for folder in folders:
        folder.mkdir()
    links, enrols = (",".join(f"{name}:{port}" for name in names) for port in (7443, 7444))
    with ExitStack() as running:
        for name, port, folder in zip(names, ports, folders, strict=False):
            settings = {
                "REGION": LAB, "ADVERTISE": name, "LINKS": links, "ENROLS": enrols, "SHARED_DIR": "/srv/shared",
            }  # fmt: skip
            flags = [
                *(f"--env=SHOAL_{key}={value}" for key, value in settings.items()),
                *(f"--volume={folder}:{STATE}", f"--volume={folders[-1]}:/srv/shared"),
                *(f"--volume={files}:/srv/etcd:ro", f"--publish=127.0.0.1:{port}:7443"),
            ]
            running.enter_context(
                fleet.similar_container(name, "cloud-coordinator", flags, "run", network="cloud-store")
            )
            own = folder / "operator"
            wait_until(lambda own=own: (own / "cert.pem").exists(), WAIT_TIMEOUT_S, "its first operator")  # type: ignore[misc]
        admin = operator_of(LAB, folders[0] / "operator", f"127.0.0.1:{ports[0]}")
        yield Pair([Coordinator(f"127.0.0.1:{port}", admin) for port in ports], names, admin)


def test_f11_who_follows_sleeps_past_a_compaction_and_reads_all_again(hurt: Compose, pair: Pair) -> None:
    leader = pair.leader()
    follower = next(each for each in pair.members if each is not leader)
    container = f"{PROJECT}-{pair.names[pair.members.index(follower)]}"
    wait_until(
        lambda: pair.tokens_and_events(follower) == pair.tokens_and_events(leader),
        WAIT_TIMEOUT_S,
        "it follows",
        every_s=0.2,
    )
    with TokenWriter(pair) as writer, hurt.etcd_root_shell() as run:
        docker("pause", container)
        try:
            writer.wait_for_more(50)
            compact(run)
            writer.wait_for_more(10)
        finally:
            docker("unpause", container)
        woken = writer.now()
    written = writer.verdict()
    wait_until(
        lambda: pair.tokens_and_events(follower) == pair.tokens_and_events(leader),
        CONVERGED_S,
        "it has read all",
        every_s=0.1,
    )
    converged_s = writer.now() - woken
    _, events = pair.tokens_and_events(follower)
    assert written.violations == (), written
    assert events == sorted(set(events)), "each event once"
    assert pair.leader() is leader
    record("F11", "C", 1, written=written.answered, writes_lost=0, converged_s=round(converged_s, 2))


def compact(run: Callable[..., str]) -> None:
    """All but the newest revision is forgotten."""
    told = json.loads(run("etcdctl", "endpoint", "status", "-w", "json"))
    run("etcdctl", "compact", "--physical", str(max(each["Status"]["header"]["revision"] for each in told)))


def leader(compose: Compose) -> str:
    """The service whose member leads."""
    told = json.loads(compose.run_in(ETCD[0], "etcdctl", "endpoint", "status", "--cluster", "-w", "json"))
    (found,) = (one["Endpoint"] for one in told if one["Status"]["leader"] == one["Status"]["header"]["member_id"])
    return next(name for name in ETCD if f"//{name}:" in found)


def all_answer(compose: Compose) -> bool:
    """Fails unless every member does."""
    compose.run_in(ETCD[0], "etcdctl", "endpoint", "health", "--cluster")
    return True


@pytest.mark.parametrize("which", ["leader", "follower"])
def test_f09_a_member_of_etcd_is_killed(hurt: Compose, which: str) -> None:
    leads = leader(hurt)
    victim = leads if which == "leader" else next(name for name in ETCD if name != leads)
    with hurt.load(STEADY) as load, TokenWriter(coordinator(hurt, "cloud")) as writer:
        writer.wait_for_more(20)
        usual_s = writer.longest_pause()
        with hurt.outage(victim):
            writer.wait_for_more(20)
            pause_s = writer.longest_pause()
        wait_until(lambda: all_answer(hurt), WAIT_TIMEOUT_S, "etcd is whole again", every_s=0.5)
        writer.wait_for_more(5)
        load.wait_for(20)
    served, written = load.verdict(), writer.verdict()
    assert (served.lost_count, served.violations, written.violations) == (0, (), ()), f"{served}; {written}"
    assert pause_s <= PAUSE_S + usual_s
    record(
        "F09", "C", 1, member=which, acknowledged=written.answered, writes_lost=0, writes_paused_s=round(pause_s, 2),
        longest_pause_before_s=round(usual_s, 2), sent=served.sent, lost=0,
    )  # fmt: skip


def test_f10_without_a_majority_of_etcd_serving_goes_on_and_changes_are_refused(hurt: Compose) -> None:
    """In every region and the federation: they keep their state in the same etcd."""
    serving = [name for region in NODES for name in (*NODES[region], *GATEWAYS[region])]
    started, last = hurt.start_times(), max(event.sequence for event in hurt.events())
    placed = {row.assignment.id for row in hurt.placements(STEADY, replicas=2)}
    with (
        hurt.load(STEADY) as load,
        hurt.load(AWAY) as away,
        TokenWriter(coordinator(hurt, "cloud")) as writer,
    ):
        with hurt.outage(*ETCD[1:]):
            wait_until(
                lambda: Code.STORE_UNAVAILABLE in writer.codes, WAIT_TIMEOUT_S, "a change is refused with the code"
            )
            wait_until(lambda: writer.silent_s() >= WITHOUT_QUORUM_S, WAIT_TIMEOUT_S, "time without a write")
            away_s = writer.silent_s()
        wait_until(lambda: leader(hurt), WAIT_TIMEOUT_S, "etcd has a majority again", every_s=0.1)
        majority_at = writer.now()
        writer.wait_for_more()
        resumed_s = writer.first_acknowledged_after(majority_at) - majority_at
        writer.wait_for_more(5)
        for each in (load, away):
            each.wait_for(20)
    written = writer.verdict()
    assert written.violations == (), written
    for each in (load, away):
        assert (each.verdict().lost_count, each.verdict().violations) == (0, ()), str(each.verdict())
    assert resumed_s <= RESUMES_S
    assert {row.assignment.id for row in hurt.placements(STEADY, replicas=2)} == placed
    assert "NODE_LOST" not in {event.code for event in hurt.events(last)}, "nobody is declared lost"
    assert all(hurt.start_times()[name] == started[name] for name in serving)
    record(
        "F10", "C", 1, without_quorum_s=round(away_s, 1), acknowledged=written.answered, unknown=written.unknown,
        writes_lost=0, resumed_s=round(resumed_s, 2), sent=load.verdict().sent + away.verdict().sent, lost=0,
    )  # fmt: skip


def test_f12_etcd_s_space_is_used_up_and_writes_resume_once_it_is_disarmed(hurt: Compose) -> None:
    started = hurt.start_times()
    with hurt.load(STEADY) as load, hurt.api("cloud") as api, hurt.etcd_root_shell() as run:
        token = api.create_token("agent", "before", 600.0)
        try:
            run("sh", "-c", FILLER)
            assert "NOSPACE" in run("etcdctl", "alarm", "list")
            with pytest.raises(ShoalError) as full:
                api.create_token("agent", "when-full", 600.0)
            assert full.value.code is Code.STORE_FULL
            told = hurt.shoal("doctor", "--context", "cloud")
            assert told.returncode != 0
            assert "etcdctl alarm disarm" in told.stdout, told.stdout
            api.delete("token", token.id)
            assert all(one.id != token.id for one in api.get("tokens").tokens), "what makes room is taken"
            load.wait_for(20)
        finally:
            make_room(run)
        disarmed = load.now()
        wait_until(lambda: api.create_token("agent", "after", 600.0).id, RESUMES_S, "writes again")
        resumed_s = load.now() - disarmed
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert hurt.start_times() == started, "nobody was restarted"
    record(
        "F12", "C", 1, resumed_s=round(resumed_s, 2), restarts=0, deletes_when_full=1, sent=verdict.sent, lost=0
    )  # fmt: skip


def make_room(run: Callable[..., str]) -> None:
    """What the remedy of STORE_FULL says, after what filled it is deleted."""
    run("etcdctl", "del", "--prefix", "filler/")
    compact(run)
    run("etcdctl", "defrag")
    run("etcdctl", "alarm", "disarm")
