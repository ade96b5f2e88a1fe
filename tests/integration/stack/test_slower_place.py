"""A fast device is left for a slow one that the policy allows: the guard holds the new replica against what it was
chosen with, not against the old one alone."""

from pathlib import Path

import numpy as np

from harness.clients.triton import run_in_process
from harness.cluster.stack import DevStack, documents, on_nodes, policy, workload
from harness.wait import wait_until
from shoal.devstack import ocr
from shoal.devstack.load import ClosedLoopLoad
from shoal.types.codes import Code
from shoal.v1 import operator_pb2

NAME = "reading"
FAST, SLOW = "edge-npu", "plain-cpu"
TIMES = 3.0
"""The guard's `p95` where a policy says none."""
ENDS_S = 90.0
ATTEMPTS = 4
"""The guard is right to end a move while other programs make the slow one slower than it was chosen for, and a busy
machine may leave a step of two seconds without an answer of the slow one: that step judged nothing."""


def test_a_slower_place_that_the_policy_allows_takes_over(stack: DevStack) -> None:
    model = Path(ocr.files().recogniser).read_bytes()
    line = np.random.default_rng(7).random((1, 3, 48, 320), np.float32)
    right = run_in_process(model, {"x": line})
    stack.push(model, NAME)
    stack.apply(documents(policy("either", on_nodes([FAST, SLOW])), workload(NAME, NAME, "either")))
    (placed,) = stack.wait_serving(NAME)
    if placed.node != FAST:
        assert stack.migrate(NAME, FAST).stage == "done"
    load = ClosedLoopLoad(stack.info.client, NAME, {"x": line}, right, clients=2)
    load.start()
    try:
        wait_until(lambda: load.outcomes()["ok"] >= 40, ENDS_S, "answers of the fast one")
        attempts = [stack.migrate(NAME, SLOW)]
        while not steps_judged(attempts[-1]) and len(attempts) < ATTEMPTS:
            assert attempts[-1].stage == "done" or attempts[-1].reason.code == Code.GUARD_TRIPPED, attempts
            if attempts[-1].stage == "done":
                assert stack.migrate(NAME, FAST).stage == "done"
            attempts.append(stack.migrate(NAME, SLOW))
    finally:
        load.stop()
    judged = steps_judged(attempts[-1])
    assert judged, attempts
    assert all(each.target.latency_p95_s > TIMES * each.source.latency_p95_s + 0.005 for each in judged), (
        f"the slow one is not slow: {judged}"
    )
    assert (len(load.calls) - load.outcomes()["ok"], load.wrong_count) == (0, 0), load.outcomes()
    stack.delete_workloads(NAME)


def steps_judged(move: operator_pb2.MigrationView) -> list[operator_pb2.GuardReading]:
    """Of a move that is done."""
    return [each for each in move.readings if each.outcome != "not judged"] if move.stage == "done" else []
