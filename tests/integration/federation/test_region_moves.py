"""A workload that moves to another region and home again, live, under load, whatever is killed on the way. Longer than
the default run."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from harness.cluster.delegation import HOME, NEAR, agreements, wait_all_acquainted, wait_delegated
from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack, InferenceLoad, documents, policy, region, workload
from harness.faults.migration_fault import MigrationFault
from harness.report import record
from harness.wait import wait_until
from shoal.types.codes import ShoalError
from shoal.v1 import operator_pb2

pytestmark = [pytest.mark.long, pytest.mark.alone]

NAME = "travels"
MAY_GO = "  federation: {delegate: when-infeasible}\n"
AS_HELD = "  migration: {shift: {steps: [25%, 50%, 100%], hold: 1s}}\n"

ORDER = (
    "planned",
    "reserved",
    "staging",
    "warming",
    "verifying",
    "shifting",
    "draining",
    "done",
    "rolling_back",
    "aborted",
)
CELLS = tuple(product(("verifying", "shifting", "draining"), ("gateway", "coordinator", "delegate")))
ENDS_S = 240.0
"""All deadlines of its states together, with room for a busy machine."""
INSIST_S = 120.0


def migrate_and_wait(stack: DevStack, to: str) -> operator_pb2.MigrationView:
    """Runs that move to its end."""
    with stack.api() as api:
        begun = api.migrate("default", NAME, to, "")

        def over() -> list[operator_pb2.MigrationView]:
            listed = [one for one in api.get("migrations").migrations if one.id == begun.id]
            return [one for one in listed if one.stage in ("done", "aborted")]

        return wait_until(over, WAIT_TIMEOUT_S, f"{begun.id} to be over", every_s=0.2)[0]


def by_itself(stack: DevStack, cause: str) -> operator_pb2.MigrationView:
    """The move that nobody asked for by name, once it is over."""

    def over() -> list[operator_pb2.MigrationView]:
        with stack.api() as api:
            listed = [one for one in api.get("migrations").migrations if one.cause == cause]
        return [one for one in listed if one.stage in ("done", "aborted")]

    return wait_until(over, 2 * WAIT_TIMEOUT_S, f"a move for {cause} to be over", every_s=0.5)[0]


def test_home_again_by_itself_when_home_can(tmp_path: Path) -> None:
    """What runs elsewhere because home had no place comes home when home has had one for a minute."""
    with region(tmp_path, 1, regions=2, federation=1) as stack:
        agent = stack.info.stack.agents[0].name
        stack.shoal("cordon", agent)
        stack.apply(documents(policy(NAME, MAY_GO + AS_HELD), workload(NAME, "relu", NAME)))
        wait_delegated(stack, NAME)
        with InferenceLoad(stack.port("gateway", "data"), stack.client_files, NAME) as load:
            load.wait_for(50)
            stack.shoal("uncordon", agent)
            back = by_itself(stack, "failback")
            load.wait_for(50)
        verdict = load.verdict()
        assert back.stage == "done", back
        assert back.verdict.passed
        assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
        assert len(stack.wait_serving(NAME)) == 1
        print(verdict)  # sent, lost, the slowest: what the guide tells


def test_there_and_back_by_hand_under_load(tmp_path: Path) -> None:
    with region(tmp_path, 1, regions=2, federation=1) as stack:
        stack.apply(documents(policy(NAME, MAY_GO + AS_HELD), workload(NAME, "relu", NAME)))
        stack.wait_serving(NAME)
        with InferenceLoad(stack.port("gateway", "data"), stack.client_files, NAME) as load:
            load.wait_for(50)
            there = migrate_and_wait(stack, NEAR)
            assert there.stage == "done", there
            wait_until(lambda: not stack.placements(NAME), WAIT_TIMEOUT_S, "home to be rid of it", every_s=0.2)
            load.wait_for(50)
            back = migrate_and_wait(stack, HOME)
            assert back.stage == "done", back
            load.wait_for(50)
        verdict = load.verdict()
        assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
        for move in (there, back):
            stages = [one.stage for one in move.stages]
            assert [one for one in stages if one == "shifting"] == ["shifting"] * 3, stages
            assert move.verdict.passed
            assert move.verdict.samples == 8
            assert [reading.passed for reading in move.readings] == [True] * 3
        assert len(stack.wait_serving(NAME)) == 1
        print(verdict)  # sent, lost, the slowest: what the guide tells
        with stack.api() as api:
            assert not [row for row in api.get("agreements").agreements if row.state == "active"]


# -- killed on the way -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    """Two regions of an agent each, and their federation."""
    with region(tmp_path_factory.mktemp("pair"), 1, regions=2, federation=1) as stack:
        yield stack


@pytest.fixture
def leaving(pair: DevStack) -> Iterator[DevStack]:
    """With a workload that home serves; both regions are whole again when it is gone."""
    pair.apply(documents(policy(NAME, MAY_GO + AS_HELD), workload(NAME, "relu", NAME)))
    pair.wait_serving(NAME)
    yield pair
    for member in ("gateway", "coordinator", pair.info.stack.for_region(NEAR).agents[0].name):
        pair.control.break_member(member, "resume")
    wait_until(lambda: _stage(pair, "") is not None, WAIT_TIMEOUT_S, "home's coordinator to answer")
    wait_until(pair.are_nodes_current, WAIT_TIMEOUT_S, "every node to be heard")
    pair.delete_workloads(NAME)
    wait_until(
        lambda: not _leftovers(pair), 2 * WAIT_TIMEOUT_S, "nothing of it to be left in either region", every_s=0.5
    )
    wait_until(lambda: not pair.doctor(), WAIT_TIMEOUT_S, "home to be whole", every_s=0.5)
    wait_all_acquainted(pair)


@pytest.mark.parametrize(("state", "victim"), CELLS)
def test_f05_killed_on_the_way_to_another_region(leaving: DevStack, state: str, victim: str) -> None:
    """Home's gateway, its coordinator, or all that the other region runs it with: the move ends, and whoever asks again
    is answered. When a state is shorter than the way of the blow, it falls in the next."""
    stack = leaving
    (home,), (near,) = (stack.info.stack.for_region(name).agents for name in (HOME, NEAR))
    who = near.name if victim == "delegate" else victim
    load = InferenceLoad(
        stack.port("gateway", "data"),
        stack.client_files,
        NAME,
        clients=2,
        other_ports=(stack.port(home.name, "data"),),
        retry_for_s=INSIST_S,
    )
    with load:
        with MigrationFault(stack, who, NAME, ORDER[ORDER.index(state) :]) as blow:
            with stack.api() as api:
                api.migrate("default", NAME, NEAR, "")
            blow.wait(ENDS_S)
        if state in ("verifying", "shifting"):
            load.wait_for(10)  # home serves; while it drains, the other region alone does
        stack.control.break_member(who, "resume")
        hurt = load.now()
        over = ("done", "aborted")
        wait_until(lambda: _stage(stack, blow.migration) in over, ENDS_S, f"an end, {victim} killed at {state}")
        ended_s = load.now() - hurt
        load.wait_for(20)
    with stack.api() as api:
        (ended,) = api.get("migrations", blow.migration).migrations
    code = ended.reason.code if ended.stage == "aborted" else ""
    assert ended.stage == "done" or code, ended
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), f"{verdict}, {ended}"
    record(
        "F05", "P", 1, between="regions", aimed=state, state=blow.state_of(ended), victim=victim,
        struck=len(blow.pids), ended_s=round(ended_s, 1), ended=f"{ended.stage} {code}".strip(), sent=verdict.sent,
        lost=0, asked_again=len(load.failed_attempts), slowest_s=round(verdict.slowest_s, 3),
    )  # fmt: skip


def _stage(stack: DevStack, migration: str) -> str | None:
    """None while no coordinator answers. Of no migration: empty."""
    try:
        with stack.api() as api:
            return next((one.stage for one in api.get("migrations").migrations if one.id == migration), "")
    except ShoalError:
        return None


def _leftovers(stack: DevStack) -> list[str]:
    """What either region still has of the workload."""
    with stack.api(NEAR) as api:
        guests = [row.assignment.id for row in api.get("placements").placements]
    return [*(one.agreement for one in agreements(stack, NAME)), *guests]
