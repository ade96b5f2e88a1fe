"""A gateway killed, and every component ended in good order (SIGTERM), under load through two ingresses.

The second ingress is an agent's: its front is the very program that a gateway's is.
"""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from harness.report import record
from harness.stack import PATIENCE_S, Load, Process, Stack, documents, on_nodes, policy, workload
from harness.wait import wait_until

pytestmark = pytest.mark.alone

NAME = "kept"
NODES = ("plain-cpu", "edge-npu")
INSIST_S = 30.0
ON_ITS_WAY_S = 0.1
"""A request sent this shortly before may come when the door is closed."""
LIMIT_S = {"gateway": 10.0, "plain-cpu": 31.0, "coordinator": 10.0}
"""`drain_s` of a front, that of a replica and a second, and the coordinator's grace."""


@pytest.fixture
def served(stack: Stack) -> Iterator[Stack]:
    stack.apply(documents(policy(NAME, on_nodes(NODES, 2)), workload(NAME, "relu", NAME)))
    wait_until(lambda: _all_ready(stack), PATIENCE_S, "every node to be ready")
    stack.serves(NAME, 2)
    yield stack
    stack.control.hurt("gateway", "resume")
    stack.forget(NAME)
    wait_until(lambda: not stack.doctor(), PATIENCE_S, "the region to be whole")


def at_two(stack: Stack) -> Load:
    gateway, other = stack.port("gateway", "grpc"), stack.port(NODES[1], "grpc")
    return Load(gateway, stack.client_files, NAME, clients=4, others=(other,), insist_s=INSIST_S)


def test_f45_gateway_killed_with_another_beside_it(served: Stack) -> None:
    with at_two(served) as load:
        at = load.now()
        served.kill("gateway")
        load.wait_for(60)
        silent_s = load.silence_s(at)
        served.control.hurt("gateway", "resume")
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost, verdict.violations) == (0, ()), str(verdict)
    assert load.broken, "nobody noticed"
    record(
        "F45", "P", 1, killed="gateway", ingresses=2, sent=verdict.sent, lost=0, asked_again=len(load.broken),
        silent_s=round(silent_s, 3), slowest_s=round(verdict.slowest_s, 3),
    )  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "times"),
    [("gateway", 8), *(pytest.param(name, 1, marks=pytest.mark.long) for name in ("plain-cpu", "coordinator"))],
)
def test_f45_ended_in_good_order(served: Stack, name: str, times: int) -> None:
    """Whoever is in charge starts it again: what counts is how the old processes went."""
    with at_two(served) as load:
        ends = [_end(served, name, load) for _ in range(times)]
    verdict, slowest_end_s = load.verdict(), max(took_s for _, took_s in ends)
    assert (verdict.lost, verdict.violations) == (0, ()), str(verdict)
    cut_short = [
        f"{told} after {end - start:.3f} s" for start, end, told in load.broken for at, _ in ends
        if start < at - ON_ITS_WAY_S and end >= at
    ]  # fmt: skip
    assert cut_short == [], "what was in flight is finished"
    since = [told for start, _, told in load.broken if start >= ends[0][0]]
    assert name == "gateway" or since == [], "nobody had to ask again"
    assert slowest_end_s <= LIMIT_S[name]
    record(
        "F45", "P", times, ended=name, took_s=round(slowest_end_s, 2), limit_s=LIMIT_S[name], sent=verdict.sent, lost=0,
        asked_again=len(load.broken), cut_short=0, slowest_s=round(verdict.slowest_s, 3),
    )  # fmt: skip


def _end(stack: Stack, name: str, load: Load) -> tuple[float, float]:
    """When `name` was told to end, by the load's clock, and the seconds that it took; it serves again on return."""
    role = "coordinator" if name == "coordinator" else "supervisor"
    (process,) = stack.processes(name, role)
    old = stack.processes(name)
    at = load.now()
    os.kill(process[0], signal.SIGTERM)
    wait_until(lambda: not any(map(_runs, old)), LIMIT_S[name] + PATIENCE_S, f"{name} to have ended")
    took_s = load.now() - at
    load.wait_for(20)
    wait_until(lambda: stack.processes(name, role), PATIENCE_S, f"{name} to be started again")
    wait_until(lambda: stack.serves(NAME, 2), PATIENCE_S, "both replicas")
    if name == "gateway":
        with Load(stack.port(name, "grpc"), stack.client_files, NAME, clients=1, insist_s=INSIST_S):
            pass  # it was answered there
    load.wait_for(20)
    return at, took_s


def _all_ready(stack: Stack) -> bool:
    with stack.api() as api:
        return all(view.liveness == "ready" and view.front_ready for view in api.get("nodes").nodes)


def _runs(process: Process) -> bool:
    try:
        found = psutil.Process(process[0])
        return found.create_time() == process[1] and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
