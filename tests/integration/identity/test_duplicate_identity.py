"""Two agents with one stolen state directory: rows F47 and A08."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from harness.cluster.agents import WAIT_TIMEOUT_S, AgentProcess, api
from harness.cluster.coordinator import REGION, CoordinatorServer
from harness.fakes.log import RecordingLog
from harness.report import record
from harness.wait import until, wait_until
from shoal.agent.clock import SystemClock
from shoal.agent.link.credentials import CredentialFiles
from shoal.agent.link.grpc import GrpcLink, GrpcSession
from shoal.agent.ports import LinkRefused
from shoal.types.assignment import Status
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Node, Role
from shoal.types.link import Hello
from shoal.types.units import Bytes, Wall
from shoal.v1 import operator_pb2
from shoal.wire.enrol import redeem, renew

ROUNDS = 100


def node_of(coordinator: CoordinatorServer, name: str) -> operator_pb2.NodeView:
    with api(coordinator) as operator:
        return operator.get("nodes", name).nodes[0]


async def test_f47_of_two_with_one_state_directory_exactly_one_is_accepted(
    coordinator: CoordinatorServer, tmp_path: Path
) -> None:
    """Both call at once, a hundred times, each with its own copy of the files; whoever is refused is told why."""
    with api(coordinator) as operator:
        token = operator.create_token("agent", "stolen", 60.0).token
    enrolled = await asyncio.to_thread(redeem, coordinator.enrol, token, "stolen")
    for copy in ("one", "two"):
        enrolled.write(tmp_path / copy)
    clock = SystemClock()
    links = [
        GrpcLink(CredentialFiles(tmp_path / copy), coordinator.link, clock, RecordingLog()) for copy in ("one", "two")
    ]

    async def call(link: GrpcLink, boot: str, number: int) -> GrpcSession | Code:
        node = Node(
            "stolen", REGION, Role.AGENT, {}, "0", "linux", "x86_64", Bytes(2**30), Bytes(2**30), (),
            f"{boot}:1", f"{boot}:4", boot,
        )  # fmt: skip
        try:
            return await link.connect(Hello(node, f"{boot}-{number}", None, 1, Wall(clock.wall())))
        except LinkRefused as error:
            return error.code

    winners = [0, 0]
    for number in range(ROUNDS):
        answers = await asyncio.gather(*(call(link, f"boot-{at}", number) for at, link in enumerate(links)))
        accepted = [answer for answer in answers if isinstance(answer, GrpcSession)]
        assert len(accepted) == 1, f"round {number}: {answers}"
        assert [answer for answer in answers if isinstance(answer, Code)] == [Code.DUPLICATE_IDENTITY]
        winners[answers.index(accepted[0])] += 1
        # Who has a session is alive by what it says in it: a node of which only hellos are heard counts as gone.
        epoch = accepted[0].welcome.epoch
        await accepted[0].send(Status("stolen", epoch, 1, True, None, (), (), (), (), Wall(clock.wall()), True))
        await until(lambda: node_of(coordinator, "stolen").front_ready, 10.0, "its status", every_s=0.005)
        await accepted[0].close()
        await until(lambda: _is_over(coordinator), 10.0, "its end", every_s=0.005)
    record("F47", "P", ROUNDS, accepted_each=1, first=winners[0], second=winners[1])


def _is_over(coordinator: CoordinatorServer) -> bool:
    return coordinator.log.read_text().count("session_opened") == coordinator.log.read_text().count("session_closed")


def _is_expelled(member: AgentProcess) -> bool:
    """Whether it was told within its session, or when it asked for another one."""
    ends = ("session_closed", "session_refused", "coordinator_connection_failed")
    return any(line["code"] == Code.CERT_REVOKED for event in ends for line in member.log_lines(event))


def test_a08_a_stolen_state_directory_is_told_with_both_addresses_until_an_operator_decides(
    coordinator: CoordinatorServer, tmp_path: Path
) -> None:
    """Real agents. The running one stays linked all the while; the thief can neither link nor renew."""
    running = AgentProcess(coordinator, tmp_path / "gw", "gw")
    assert running.join().returncode == 0
    running.start()
    thief = None
    try:
        running.wait_logged("session_opened")
        thief = running.duplicate(tmp_path / "copy")
        thief.start()
        thief.wait_logged("session_refused", code=Code.DUPLICATE_IDENTITY)
        marked = wait_until(lambda: node_of(coordinator, "gw").duplicate, 20.0, "the node to be marked")
        assert marked.count("127.0.0.1") == 2
        with api(coordinator) as operator:
            alarms = [
                event for event in operator.events() if event.code == Code.DUPLICATE_IDENTITY and event.node == "gw"
            ]
            assert any("two agents show this identity" in alarm.message for alarm in alarms)
            assert any(not check.ok and "gw" in check.name for check in operator.doctor().checks)
        for copy in (running, thief):
            with pytest.raises(ShoalError) as error:
                renew(coordinator.enrol, copy.identity)
            assert error.value.code is Code.RENEW_DENIED
        assert len(running.log_lines("session_opened")) == 1
        assert not thief.log_lines("session_opened")

        thief.end()
        with api(coordinator) as operator:
            assert not operator.resolve_duplicate("gw").duplicate
        assert renew(coordinator.enrol, running.identity).name == "gw"
        assert len(running.log_lines("session_opened")) == 1

        thief.start()
        wait_until(lambda: node_of(coordinator, "gw").duplicate, 20.0, "the node to be marked again")
        with api(coordinator) as operator:
            assert operator.resolve_duplicate("gw", keep="none").revoked
        for member in (running, thief):
            wait_until(partial(_is_expelled, member), WAIT_TIMEOUT_S, f"{member.name} to be told")
        record("A08", "P", 1, addresses=marked)
    finally:
        running.end()
        if thief is not None:
            thief.end()
