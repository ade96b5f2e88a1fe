"""A workload that moves to another region and home again, live, under load. Longer than the default run."""

from pathlib import Path

import pytest

from harness.stack import PATIENCE_S, Load, Stack, documents, policy, region, workload
from harness.trades import HOME, NEAR, delegated
from harness.wait import wait_until
from shoal.v1 import operator_pb2

pytestmark = [pytest.mark.long, pytest.mark.alone]

NAME = "travels"
MAY_GO = "  federation: {delegate: when-infeasible}\n"
AS_HELD = "  migration: {shift: {steps: [25%, 50%, 100%], hold: 1s}}\n"


def moved(stack: Stack, to: str) -> operator_pb2.MigrationView:
    """Runs that move to its end."""
    with stack.api() as api:
        begun = api.migrate("default", NAME, to, "")

        def over() -> list[operator_pb2.MigrationView]:
            listed = [one for one in api.get("migrations").migrations if one.id == begun.id]
            return [one for one in listed if one.stage in ("done", "aborted")]

        return wait_until(over, PATIENCE_S, f"{begun.id} to be over", every_s=0.2)[0]


def by_itself(stack: Stack, cause: str) -> operator_pb2.MigrationView:
    """The move that nobody asked for by name, once it is over."""

    def over() -> list[operator_pb2.MigrationView]:
        with stack.api() as api:
            listed = [one for one in api.get("migrations").migrations if one.cause == cause]
        return [one for one in listed if one.stage in ("done", "aborted")]

    return wait_until(over, 2 * PATIENCE_S, f"a move for {cause} to be over", every_s=0.5)[0]


def test_home_again_by_itself_when_home_can(tmp_path: Path) -> None:
    """What runs elsewhere because home had no place comes home when home has had one for a minute."""
    with region(tmp_path, 1, regions=2, federation=1) as stack:
        agent = stack.info.stack.agents[0].name
        stack.shoal("cordon", agent)
        stack.apply(documents(policy(NAME, MAY_GO + AS_HELD), workload(NAME, "relu", NAME)))
        delegated(stack, NAME)
        with Load(stack.port("gateway", "grpc"), stack.client_files, NAME) as load:
            load.wait_for(50)
            stack.shoal("uncordon", agent)
            back = by_itself(stack, "failback")
            load.wait_for(50)
        verdict = load.verdict()
        assert back.stage == "done", back
        assert back.verdict.passed
        assert (verdict.lost, verdict.violations) == (0, ()), verdict
        assert len(stack.serves(NAME)) == 1
        print(verdict)  # sent, lost, the slowest: what the guide tells


def test_there_and_back_by_hand_under_load(tmp_path: Path) -> None:
    with region(tmp_path, 1, regions=2, federation=1) as stack:
        stack.apply(documents(policy(NAME, MAY_GO + AS_HELD), workload(NAME, "relu", NAME)))
        stack.serves(NAME)
        with Load(stack.port("gateway", "grpc"), stack.client_files, NAME) as load:
            load.wait_for(50)
            there = moved(stack, NEAR)
            assert there.stage == "done", there
            wait_until(lambda: not stack.placements(NAME), PATIENCE_S, "home to be rid of it", every_s=0.2)
            load.wait_for(50)
            back = moved(stack, HOME)
            assert back.stage == "done", back
            load.wait_for(50)
        verdict = load.verdict()
        assert (verdict.lost, verdict.violations) == (0, ()), verdict
        for move in (there, back):
            stages = [one.stage for one in move.stages]
            assert [one for one in stages if one == "shifting"] == ["shifting"] * 3, stages
            assert move.verdict.passed
            assert move.verdict.samples == 8
            assert [reading.passed for reading in move.readings] == [True] * 3
        assert len(stack.serves(NAME)) == 1
        print(verdict)  # sent, lost, the slowest: what the guide tells
        with stack.api() as api:
            assert not [row for row in api.get("agreements").agreements if row.state == "active"]
