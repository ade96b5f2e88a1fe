"""No exception of a region's step is lost in a simulation, though the region itself goes on after it."""

from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest

from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.ports import StaleRevision
from shoal.simulator.checkers.invariants import AUDIT_EVERY, MAX_STEPS_PER_S, InvariantMonitor, StepLivelock
from shoal.simulator.world.loop import VirtualLoop, run
from shoal.simulator.world.world import SimWorld
from shoal.types.codes import Code, Refusal, ShoalError


async def failures(error: Exception, loop: VirtualLoop) -> list[str]:
    """What a world's monitor finds about a region of which a step raises `error`."""

    async def step() -> None:
        raise error

    world, workloads = SimWorld(loop, 1), SimpleNamespace(step=step)
    InvariantMonitor(world, cast("RegionalCoordinator", SimpleNamespace(workloads=workloads)), {})
    with pytest.raises(type(error)):
        await cast("Callable[[], Awaitable[None]]", workloads.step)()
    return world.failures


def test_an_unforeseen_exception_of_a_step_fails_the_run() -> None:
    assert run(partial(failures, LookupError("a defect"))) == ["0.0000 s: a step ended with LookupError('a defect')"]


@pytest.mark.parametrize("error", [StaleRevision("a key"), ShoalError(Refusal(Code.STORE_FULL))])
def test_what_a_store_refuses_does_not(error: Exception) -> None:
    assert run(partial(failures, error)) == []


def test_neither_is_a_livelock_of_steps_lost() -> None:
    async def scenario(loop: VirtualLoop) -> list[str]:
        async def step() -> None:
            raise ShoalError(Refusal(Code.STORE_FULL))

        world, workloads = SimWorld(loop, 1), SimpleNamespace(step=step)
        InvariantMonitor(world, cast("RegionalCoordinator", SimpleNamespace(workloads=workloads)), {})
        for _ in range(MAX_STEPS_PER_S):
            with pytest.raises(ShoalError):
                await workloads.step()
        with pytest.raises(StepLivelock):
            await workloads.step()
        return world.failures

    (failure,) = run(scenario)
    assert "StepLivelock" in failure


def test_one_of_so_many_steps_is_audited() -> None:
    async def scenario(loop: VirtualLoop) -> list[bool]:
        audited = list[bool]()

        async def step() -> None:
            audited.append(workloads.auditor is not None)
            raise ShoalError(Refusal(Code.STORE_FULL))

        workloads = SimpleNamespace(step=step, auditor=None)
        InvariantMonitor(SimWorld(loop, 1), cast("RegionalCoordinator", SimpleNamespace(workloads=workloads)), {})
        for _ in range(2 * AUDIT_EVERY):
            with pytest.raises(ShoalError):
                await workloads.step()
        return audited

    assert run(scenario) == 2 * [*(AUDIT_EVERY - 1) * [False], True]
