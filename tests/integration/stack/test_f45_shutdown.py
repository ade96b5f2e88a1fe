"""F45: a gateway is killed, and every component is drained by SIGTERM, under load through two ingresses.

The second ingress is an agent's: its front is the same program as a gateway's.
"""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from harness.cluster.stack import (
    WAIT_TIMEOUT_S,
    DevStack,
    InferenceLoad,
    Process,
    documents,
    on_nodes,
    policy,
    workload,
)
from harness.report import record
from harness.wait import wait_until

NAME = "kept"
NODES = ("plain-cpu", "edge-npu")
INSIST_S = 30.0
ON_ITS_WAY_S = 0.1
"""A request sent this shortly before may come when the door is closed."""
LIMIT_S = {"gateway": 10.0, "plain-cpu": 31.0, "coordinator": 10.0}
"""`drain_s` of a front, that of a replica and a second, and the coordinator's grace."""


@pytest.fixture
def serving_stack(stack: DevStack) -> Iterator[DevStack]:
    stack.apply(documents(policy(NAME, on_nodes(NODES, 2)), workload(NAME, "relu", NAME)))
    wait_until(lambda: _all_ready(stack), WAIT_TIMEOUT_S, "every node to be ready")
    stack.wait_serving(NAME, 2)
    yield stack
    stack.control.break_member("gateway", "resume")
    stack.delete_workloads(NAME)
    wait_until(lambda: not stack.doctor(), WAIT_TIMEOUT_S, "the region to be whole")


def at_two(stack: DevStack) -> InferenceLoad:
    gateway, other = stack.port("gateway", "data"), stack.port(NODES[1], "data")
    return InferenceLoad(gateway, stack.client_files, NAME, clients=4, other_ports=(other,), retry_for_s=INSIST_S)


def test_f45_gateway_killed_with_another_beside_it(serving_stack: DevStack) -> None:
    with at_two(serving_stack) as load:
        at = load.now()
        serving_stack.kill("gateway")
        load.wait_for(60)
        silent_s = load.longest_gap_s(at)
        serving_stack.control.break_member("gateway", "resume")
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert load.failed_attempts, "nobody noticed"
    record(
        "F45", "P", 1, killed="gateway", ingresses=2, sent=verdict.sent, lost=0, asked_again=len(load.failed_attempts),
        silent_s=round(silent_s, 3), slowest_s=round(verdict.slowest_s, 3),
    )  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("gateway", 3),
        *(pytest.param(name, 1, marks=pytest.mark.long) for name in ("plain-cpu", "coordinator")),
        pytest.param("gateway", 8, marks=pytest.mark.long),
    ],
)
def test_f45_ended_in_good_order(serving_stack: DevStack, name: str, times: int) -> None:
    """Whoever is in charge starts it again: what counts is how the old processes went."""
    with at_two(serving_stack) as load:
        ends = [_end(serving_stack, name, load) for _ in range(times)]
    verdict, slowest_end_s = load.verdict(), max(took_s for _, took_s in ends)
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    cut_short = [
        f"{told} after {end - start:.3f} s" for start, end, told in load.failed_attempts for at, _ in ends
        if start < at - ON_ITS_WAY_S and end >= at
    ]  # fmt: skip
    assert cut_short == [], "what was in flight is finished"
    since = [told for start, _, told in load.failed_attempts if start >= ends[0][0]]
    assert name == "gateway" or since == [], "nobody had to ask again"
    assert slowest_end_s <= LIMIT_S[name]
    record(
        "F45", "P", times, ended=name, took_s=round(slowest_end_s, 2), limit_s=LIMIT_S[name], sent=verdict.sent, lost=0,
        asked_again=len(load.failed_attempts), cut_short=0, slowest_s=round(verdict.slowest_s, 3),
    )  # fmt: skip


def _end(stack: DevStack, name: str, load: InferenceLoad) -> tuple[float, float]:
    """When `name` was told to end, by the load's clock, and the seconds that it took; it serves again on return."""
    role = "coordinator" if name == "coordinator" else "supervisor"
    (process,) = stack.processes(name, role)
    old = stack.processes(name)
    at = load.now()
    os.kill(process[0], signal.SIGTERM)
    wait_until(lambda: not any(map(_runs, old)), LIMIT_S[name] + WAIT_TIMEOUT_S, f"{name} to have ended")
    took_s = load.now() - at
    load.wait_for(20)
    wait_until(lambda: stack.processes(name, role), WAIT_TIMEOUT_S, f"{name} to be started again")
    wait_until(lambda: stack.wait_serving(NAME, 2), WAIT_TIMEOUT_S, "both replicas")
    if name == "gateway":
        with InferenceLoad(stack.port(name, "data"), stack.client_files, NAME, clients=1, retry_for_s=INSIST_S):
            pass  # it was answered there
    load.wait_for(20)
    return at, took_s


def _all_ready(stack: DevStack) -> bool:
    with stack.api() as api:
        return all(view.liveness == "ready" and view.front_ready for view in api.get("nodes").nodes)


def _runs(process: Process) -> bool:
    try:
        found = psutil.Process(process[0])
        return found.create_time() == process[1] and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
