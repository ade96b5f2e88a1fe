"""F34: a device vanishes, resets, throttles or reports errors, and its assignment alone moves. Emulated devices of
real processes: `shoal dev break NODE unplug | heat`."""

from collections.abc import Iterator, Sequence

import pytest

from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack, InferenceLoad, documents, on_nodes, policy, workload
from harness.measure.contention import RunDelay, startup_slowdown_s
from harness.report import record
from harness.wait import wait_until
from shoal.devstack.process_supervisor import HOT_C
from shoal.types.codes import Code
from shoal.v1 import operator_pb2

NODES = ("plain-cpu", "edge-npu")
OTHER, FAULTY_NODE = NODES
DETECTED_S = 2.0
INSIST_S = 60.0
MOVED_S = 120.0


def cheapest_on(nodes: Sequence[str]) -> str:
    """The NPU is: a small model is faster on a processor, which launches it at once."""
    return f"{on_nodes(nodes)}  optimize: {{cost: 1}}\n"


@pytest.fixture
def broken_stack(stack: DevStack) -> Iterator[DevStack]:
    """`roams` on the device that is hurt, where it may leave it for the other; `stays` on the other."""
    there, here = policy("there", cheapest_on([FAULTY_NODE])), policy("here", on_nodes([OTHER]))
    stack.apply(documents(there, workload("roams", "relu", "there"), here, workload("stays", "relu", "here")))
    stack.wait_serving("roams")
    stack.wait_serving("stays")
    yield stack
    stack.control.break_member(FAULTY_NODE, "heal")
    stack.delete_workloads("roams", "stays")
    wait_until(lambda: not stack.doctor(), WAIT_TIMEOUT_S, "the region to be whole")


def device(stack: DevStack) -> operator_pb2.DeviceView:
    with stack.api() as api:
        (found,) = [one for one in api.get("devices").devices if one.node == FAULTY_NODE]
    return found


def tellers(stack: DevStack) -> RunDelay:
    """Of those by whom the region hears of the device."""
    return RunDelay(*(pid for pid, _ in {**stack.processes(FAULTY_NODE), **stack.processes("coordinator")}))


def load_on(stack: DevStack, name: str) -> InferenceLoad:
    return InferenceLoad(stack.port("gateway", "data"), stack.client_files, name, clients=2, retry_for_s=INSIST_S)


def test_f34_a_device_that_errs_and_then_vanishes_loses_its_own_assignment_alone(broken_stack: DevStack) -> None:
    """While its driver errs what runs goes on; once its worker is gone that one assignment moves. What the device could
    do counts no more until it was measured again."""
    stack = broken_stack
    stack.apply(policy("there", cheapest_on(NODES)))
    (placed,) = stack.wait_serving("roams")
    assert placed.node == FAULTY_NODE, "nothing speaks for a move yet"
    (kept,) = stack.wait_serving("stays")
    workers, last, measured = stack.workers(), stack.events()[-1].sequence, device(stack).receipt.measured_at

    def is_device_lost() -> bool:
        return any((one.node, one.code) == (FAULTY_NODE, Code.DEVICE_LOST) for one in stack.events(last))

    with load_on(stack, "roams") as load, load_on(stack, "stays") as beside:
        at, delay = load.now(), tellers(stack)
        stack.control.break_member(FAULTY_NODE, "unplug")
        wait_until(is_device_lost, WAIT_TIMEOUT_S, "the region to be told")
        detected_s, delayed_s = load.now() - at, delay.seconds()
        load.wait_for(20)
        assert stack.workers() == workers, "a driver that errs stops nothing that runs"
        assert not load.failed_attempts
        at = load.now()
        stack.kill(f"{FAULTY_NODE}/worker")
        (moved,) = wait_until(
            lambda: [row for row in stack.placements("roams") if row.node == OTHER and row.routed],
            WAIT_TIMEOUT_S,
            "it to serve on the other device",
        )
        load.wait_for(20)
        silent_s = load.longest_gap_s(at)
        assert not device(stack).reading.device, "nothing is known of it"
        stack.control.break_member(FAULTY_NODE, "heal")
        wait_until(lambda: device(stack).receipt.measured_at > measured, WAIT_TIMEOUT_S, "it to be measured again")
        beside.wait_for(10)
    for verdict in (load.verdict(), beside.verdict()):
        assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert not beside.failed_attempts, "nobody else noticed"
    assert stack.workers()[kept.assignment.id] == workers[kept.assignment.id], "the very same process"
    slowed_s = delayed_s + startup_slowdown_s()
    assert detected_s - slowed_s <= DETECTED_S, f"of which {slowed_s:.2f}s because others hold the cores"
    record(
        "F34", "P", 1, fault="errs, then vanishes with its worker", detected_s=round(detected_s, 2),
        silent_s=round(silent_s, 2), load_s=round(moved.observed.measured.load_s, 2), sent=load.verdict().sent, lost=0,
    )  # fmt: skip


@pytest.mark.long
def test_f34_a_device_that_throttles_is_left_by_itself(broken_stack: DevStack) -> None:
    """By a live move that nobody asked for (cause `heat`), verified, under load; nothing else moves, and nothing goes
    back while it is hot. Emulated: its sensor says what the test sets, its answers stay as fast."""
    stack = broken_stack
    stack.apply(policy("there", cheapest_on(NODES) + "  migration: {when: {gain: 90%, cooldown: 1s}, drain: 5s}\n"))
    (placed,) = stack.wait_serving("roams")
    assert placed.node == FAULTY_NODE, "nothing speaks for a move yet"
    (kept,) = stack.wait_serving("stays")
    before = {one.id for one in moves(stack)}
    worker = stack.workers()[kept.assignment.id]
    with load_on(stack, "roams") as load:
        at, delay = load.now(), tellers(stack)
        stack.control.break_member(FAULTY_NODE, "heat")
        wait_until(lambda: device(stack).reading.throttled, WAIT_TIMEOUT_S, "the region to hear of it")
        detected_s, delayed_s = load.now() - at, delay.seconds()
        assert device(stack).reading.temperature_c == HOT_C
        (moved,) = wait_until(
            lambda: [one for one in moves(stack) if one.id not in before and one.stage in ("done", "aborted")],
            MOVED_S,
            "it to leave by itself",
        )
        left_s = load.now() - at
        load.wait_for(20)
    assert (moved.cause, moved.stage, moved.target.node, moved.verdict.passed) == ("heat", "done", OTHER, True), moved
    assert "slows itself down" in moved.why
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations, load.failed_attempts) == (0, (), []), str(verdict)
    assert stack.workers()[kept.assignment.id] == worker, "the very same process"
    assert stack.wait_serving("roams")[0].node == OTHER, "it is hot still"
    slowed_s = delayed_s + startup_slowdown_s()
    assert detected_s - slowed_s <= DETECTED_S, f"of which {slowed_s:.2f}s because others hold the cores"
    record(
        "F34", "P", 1, fault="throttles", detected_s=round(detected_s, 2), left_s=round(left_s, 1), sent=verdict.sent,
        lost=0, slowest_s=round(verdict.slowest_s, 3),
    )  # fmt: skip


def moves(stack: DevStack) -> list[operator_pb2.MigrationView]:
    with stack.api() as api:
        return [one for one in api.get("migrations").migrations if one.workload.name == "roams"]
