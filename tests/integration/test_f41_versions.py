"""F41: versions N and N-1 mixed in every pairing; a rolling upgrade, and the way back, under load."""

from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from harness.cluster.stack import WAIT_TIMEOUT_S, InferenceLoad, documents, on_nodes, policy, workload
from harness.cluster.versions import EARLIER, LATER, NOW, MixedStack, earlier, later, mixed_stack, of_history
from harness.report import record
from harness.wait import wait_until
from shoal.client import InferenceClient, RegionClient
from shoal.devstack.layout import StackOptions
from shoal.types.codes import ShoalError
from shoal.v1 import operator_pb2

PREVIOUS = "1279f53fa8fff1e5362020d8e9422223e82448a9"
"""A commit of some time ago, whose whole test suite passed."""
AGENTS = ("plain-cpu", "edge-npu")
INSIST_S = 30.0
"""Clients of a front that is gone ask another."""
PACE = ("--hold", "0", "--within", "120", "--wave", "50%", "--max-slower", "1000")
BRISK = """  migration: {shift: {steps: [100%], hold: 500ms, guard: {errors: 1%, p95: 1000x}}, drain: 1s}
"""
"""Milliseconds are not judged here: the machine has all of a stack, or two, to run."""
X = np.array([[-1, 2, -3, 4]], np.float32)


def load_on(stack: MixedStack, name: str) -> InferenceLoad:
    others = tuple(stack.port(agent, "data") for agent in AGENTS)
    return InferenceLoad(
        stack.port("gateway", "data"), stack.client_files, name, clients=2, other_ports=others, retry_for_s=INSIST_S
    )


def upgrade(stack: MixedStack, number: str, *more: str) -> str:
    """What `shoal upgrade` said."""
    done = stack.shoal("upgrade", "--to", number, "--exec", stack.installer, *PACE, *more, timeout=300.0)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def halts(stack: MixedStack) -> None:
    """At the first node, where the command fails; the next upgrade goes on from there."""
    done = stack.shoal("upgrade", "--to", "7.7.7", "--exec", stack.installer, *PACE)
    assert done.returncode == 255
    assert "there is no version 7.7.7" in done.stderr, done.stderr
    with stack.api() as api:
        assert sum(view.cordoned for view in api.get("nodes").nodes) == 1


def rolls(stack: MixedStack, *numbers: str) -> InferenceLoad:
    """All of a region goes from version to version while it serves; the load when it is over."""
    stack.apply(documents(policy("either", on_nodes(AGENTS) + BRISK), workload("steady", "relu", "either")))
    stack.wait_serving("steady")
    with load_on(stack, "steady") as load:
        for number in numbers:
            upgrade(stack, number, "--component", "coordinator")
            said = upgrade(stack, number).splitlines()
            assert [line for line in said if line.startswith("wave")][-1].endswith(": gateway"), said
            assert set(stack.running_versions().values()) == {number}
            load.wait_for(20)
        assert not stack.doctor()
    with stack.api() as api:
        assert not [view.node.name for view in api.get("nodes").nodes if view.cordoned], "an upgrade that halted, too"
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    return load


def test_f41_an_upgrade_under_load_loses_nothing(tmp_path: Path) -> None:
    """An agent and the gateway, of a version without the newest fields, join others, which add one to each message."""
    places = {EARLIER: earlier(tmp_path / "earlier"), LATER: later(tmp_path / "later")}
    ahead = {"coordinator": LATER, "edge-npu": LATER}
    with mixed_stack(tmp_path, places, EARLIER, StackOptions(agents=2), ahead) as stack:
        stack.apply(documents(policy("either", on_nodes(AGENTS[:1]) + BRISK), workload("steady", "relu", "either")))
        stack.wait_serving("steady")
        stack.apply(policy("either", on_nodes(AGENTS) + BRISK))
        with load_on(stack, "steady") as load:
            said = upgrade(stack, LATER).splitlines()
            load.wait_for(10)
        assert [line for line in said if line.startswith("wave")] == ["wave 1 of 2: plain-cpu", "wave 2 of 2: gateway"]
        assert set(stack.running_versions().values()) == {LATER}
        assert not stack.doctor()
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    record("F41", "P", 1, upgraded="an agent, the gateway", lost=0, answered=load.answer_count())


@pytest.mark.long
def test_f41_a_rolling_upgrade_and_the_way_back_under_load_lose_nothing(tmp_path: Path) -> None:
    places = {EARLIER: earlier(tmp_path / "earlier"), LATER: later(tmp_path / "later")}
    with mixed_stack(tmp_path, places, EARLIER, StackOptions(agents=2)) as stack:
        halts(stack)
        load = rolls(stack, LATER, EARLIER)
    record("F41", "P", 2, upgraded="coordinator, agents, gateway, and back", lost=0, answered=load.answer_count())


def previous(folder: Path) -> dict[str, str]:
    place = of_history(folder, PREVIOUS)
    if place is None:
        pytest.skip(f"the history that is here does not reach {PREVIOUS:.7}")
    return {EARLIER: place}


@pytest.mark.long
@pytest.mark.parametrize("link", ["grpc", "mqtt"])
def test_f41_an_upgrade_from_the_version_before_and_the_way_back(tmp_path: Path, link: str) -> None:
    with mixed_stack(tmp_path, previous(tmp_path / "before"), EARLIER, StackOptions(agents=2, link=link)) as stack:
        halts(stack)
        load = rolls(stack, NOW, EARLIER)
    record("F41", "P", 1, link=link, upgrade="and downgrade", lost=0, answered=load.answer_count())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_f41_coordinators_and_federation_replicas_go_one_by_one_the_leader_last(tmp_path: Path) -> None:
    """Three of a region, three of a federation, on etcd: to this version and back, with requests at home and abroad."""
    asked = StackOptions(agents=2, regions=2, neighbours=1, store="etcd", coordinators=3, federation=3)
    with mixed_stack(tmp_path, previous(tmp_path / "before"), EARLIER, asked) as stack:
        stack.apply(documents(policy("either", on_nodes(AGENTS) + BRISK), workload("steady", "relu", "either")))
        stack.apply(documents(policy("far", DELEGATED), workload("away", "relu", "far")))
        stack.wait_serving("steady")
        with InferenceClient(stack.info.client) as client:
            wait_until(lambda: answers(client, "away"), WAIT_TIMEOUT_S, "an answer from abroad", every_s=0.1)
        with load_on(stack, "steady") as load, load_on(stack, "away") as away:
            for number in (NOW, EARLIER):
                (led,) = leaders(stack, "dev")
                assert one_by_one(stack, number, "dev")[-1] == led
                assert len(leaders(stack, "dev")) == 1
                one_by_one(stack, number, "dev-federation")
                load.wait_for(20)
                away.wait_for(20)
            assert not stack.doctor()
        for verdict in (load.verdict(), away.verdict()):
            assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    answered = load.answer_count() + away.answer_count()
    record("F41", "P", 1, upgraded="3 coordinators, 3 federation replicas, and back", lost=0, answered=answered)


def coordinators(stack: MixedStack, context: str) -> dict[str, operator_pb2.WhoAmIReply]:
    """By address, those that answer."""
    with RegionClient(stack.contexts.get(context)) as api:
        return {address: reply for address, reply in api.coordinators().items() if reply is not None}


def leaders(stack: MixedStack, context: str) -> list[str]:
    """The one that leads the region, where there is one."""
    return [address for address, reply in coordinators(stack, context).items() if reply.history and not reply.follows]


def one_by_one(stack: MixedStack, number: str, context: str) -> list[str]:
    """Three are upgraded; their addresses in the order in which it was done."""
    said = upgrade(stack, number, "--component", "coordinator", "--context", context).splitlines()
    assert [reply.version for reply in coordinators(stack, context).values()] == 3 * [number]
    changed = [line.partition(": ")[0] for line in said if stack.installer.partition(" ")[0] in line]
    assert len(set(changed)) == 3, said
    return changed


@pytest.mark.long
def test_f41_in_place_a_node_is_upgraded_with_what_cannot_leave_it(tmp_path: Path) -> None:
    """Without --in-place it halts there and nothing is stopped; with it the replica is back where it was."""
    with mixed_stack(tmp_path, previous(tmp_path / "before"), EARLIER, StackOptions(agents=2)) as stack:
        stack.apply(documents(policy("here", on_nodes(AGENTS[:1]) + BRISK), workload("pinned", "relu", "here")))
        (held,) = stack.wait_serving("pinned")
        workers = stack.workers()
        with load_on(stack, "pinned") as load:
            done = stack.shoal("upgrade", "--to", NOW, "--exec", stack.installer, *PACE)
            assert done.returncode == 255, done.stdout + done.stderr
            assert "CONFLICT" in done.stderr, done.stderr
            assert f"{held.node}: {held.assignment.id} stays" in done.stderr, done.stderr
            assert stack.workers() == workers, "nothing was stopped"
            load.wait_for(20)
            said = upgrade(stack, NOW, "--in-place").splitlines()
            assert [line for line in said if line.startswith("wave")][-1].endswith(": gateway"), said
            load.wait_for(20)
        assert stack.wait_serving("pinned")[0].node == held.node
        assert not stack.doctor()
        with stack.api() as api:
            assert not [view.node.name for view in api.get("nodes").nodes if view.cordoned]
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    record(
        "F41", "P", 1, upgraded="in place", lost=0, answered=load.answer_count(), asked_again=len(load.failed_attempts)
    )


DELEGATED = """  require: {residency: [home-2]}
  federation: {delegate: when-infeasible}
"""
PARTS = ("plain-cpu", "edge-npu", "coordinator", "gateway", "federation-1")


def walk() -> list[tuple[str, ...]]:
    """Every subset of the parts once, each by one part from the one before: Gray's order."""
    rows: list[tuple[str, ...]] = []
    for bits in product((0, 1), repeat=len(PARTS)):
        gray = [bit ^ before for bit, before in zip(bits, (0, *bits[:-1]), strict=True)]
        rows.append(tuple(part for part, bit in zip(PARTS, gray, strict=True) if bit))
    assert len(set(rows)) == 2 ** len(PARTS)
    assert all(len(set(one) ^ set(other)) == 1 for one, other in pairwise(rows))
    return rows


def replace_version(stack: MixedStack, part: str, number: str) -> None:
    """That part runs that version; an agent is emptied before."""
    with stack.api() as api:
        if part in AGENTS:
            api.drain(part)
            wait_until(lambda: not at(stack, part), WAIT_TIMEOUT_S, f"{part} to be empty", every_s=0.1)
        stack.install(part, number)
        if part in AGENTS:
            wait_until(lambda: is_ready(stack, part), WAIT_TIMEOUT_S, f"{part} to be back", every_s=0.1)
            api.cordon(part, cordoned=False)


def at(stack: MixedStack, node: str) -> list[str]:
    return [row.assignment.id for row in stack.placements() if row.node == node]


def is_ready(stack: MixedStack, node: str) -> bool:
    with stack.api() as api:
        (view,) = api.get("nodes", node).nodes
    return bool(view.liveness == "ready" and view.front_ready)


def answers(client: InferenceClient, name: str) -> bool:
    try:
        (found,) = client.infer(name, {"x": X}).outputs.values()
    except ShoalError:
        return False
    assert np.array_equal(np.asarray(found), np.maximum(X, 0)), found
    return True


STRETCH = 4
"""Pairings that one region is led through."""


@pytest.mark.long
@pytest.mark.parametrize("start", range(0, 2 ** len(PARTS), STRETCH))
def test_f41_every_pairing_with_the_version_before(tmp_path: Path, start: int) -> None:
    """Two agents, their coordinator, their gateway and the federation, each of either version: 32 pairings, beside a
    region of this one. In each, requests at home and abroad are answered, and a live move is compared and done."""
    places, rows = previous(tmp_path / "before"), walk()[start : start + STRETCH]
    abroad = ("home-2-coordinator", "home-2-gateway", "home-2-plain-cpu")
    chosen = dict.fromkeys((*abroad, *rows[0]), NOW)
    with mixed_stack(
        tmp_path, places, EARLIER, StackOptions(agents=2, regions=2, federation=1, neighbours=1), chosen
    ) as stack:
        stack.apply(documents(policy("either", on_nodes(AGENTS) + BRISK), workload("steady", "relu", "either")))
        stack.apply(documents(policy("far", DELEGATED), workload("away", "relu", "far")))
        stack.wait_serving("steady")
        with load_on(stack, "steady") as load, InferenceClient(stack.info.client) as client:
            now = rows[0]
            for row in rows:
                for part in set(row) ^ set(now):
                    replace_version(stack, part, NOW if part in row else EARLIER)
                now = row
                wait_until(stack.are_nodes_current, WAIT_TIMEOUT_S, f"{row}: every node to be heard", every_s=0.1)
                wait_until(
                    lambda: answers(client, "away"), WAIT_TIMEOUT_S, f"{row}: an answer from abroad", every_s=0.1
                )
                moves(stack)
                load.wait_for(5)
            assert not stack.doctor()
        verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    record("F41", "P", len(rows), pairings=len(rows), lost=0, answered=load.answer_count())


def moves(stack: MixedStack) -> None:
    """The workload goes from one agent to the other, compared."""
    (placed,) = stack.wait_serving("steady")
    target = next(each for each in AGENTS if each != placed.node)
    with stack.api() as api:
        begun = api.migrate("default", "steady", target)

        def over() -> bool:
            (one,) = api.get("migrations", begun.id).migrations
            assert one.stage != "aborted", one
            return bool(one.stage == "done" and one.verdict.passed)

        wait_until(over, WAIT_TIMEOUT_S, "the move to be done", every_s=0.1)
