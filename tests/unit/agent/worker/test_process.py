"""How a worker's end is judged, and what supervisor and worker say to each other."""

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from harness.builders.agent_values import assignment
from shoal.agent.frames import start_time
from shoal.agent.packing import from_json, pack, unpack
from shoal.agent.ports import Batches
from shoal.agent.worker.messages import LoadOrder, LoadState, ProbeOrder, WorkerStatus
from shoal.agent.worker.probe import read_graph, relative_half_width, with_weights
from shoal.agent.worker.process import (
    EXIT_STUCK,
    WorkerProcess,
    assignments_at_fault,
    brief_stack,
    classify_exit,
    error_lines,
)
from shoal.types.assignment import Assignment, Served, Work
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import EnergySource
from shoal.types.units import Joules, Seconds
from shoal.types.workload import PartitionRule


@pytest.mark.parametrize(
    ("returncode", "crash", "oom", "own_fault", "code"),
    [
        (-signal.SIGSEGV, "", False, True, Code.WORKER_CRASHED),
        (-signal.SIGABRT, "stack", False, True, Code.WORKER_CRASHED),
        (-signal.SIGFPE, "stack", True, True, Code.WORKER_CRASHED),
        (-signal.SIGKILL, "", False, False, Code.WORKER_KILLED),
        (-signal.SIGKILL, "", True, False, Code.OUT_OF_MEMORY),
        (-signal.SIGTERM, "", True, False, Code.WORKER_KILLED),
        (None, "stack", False, True, Code.WORKER_CRASHED),
        (None, "", False, False, Code.WORKER_KILLED),
        (None, "", True, False, Code.OUT_OF_MEMORY),
        (0, "", False, False, Code.WORKER_KILLED),
        (1, "", False, True, Code.WORKER_CRASHED),
        (EXIT_STUCK, "", False, True, Code.WORKER_STUCK),
    ],
)
def test_judgement(returncode: int | None, crash: str, oom: bool, own_fault: bool, code: Code) -> None:
    judged, refusal = classify_exit(returncode, crash, oom=oom)
    assert (judged, refusal.code) == (own_fault, code)
    assert refusal.found


def test_only_errors_of_a_workers_log_are_passed_on() -> None:
    events = [{"event": f"e{number}", "level": "error"} for number in range(40)]
    lines = ["native text", "{", "[" * 100_000, "1", '{"event": "x", "level": "info"}', *map(json.dumps, events)]
    assert error_lines("\n".join(lines)) == events[-16:]
    assert error_lines("") == []


def test_a_stack_in_one_line() -> None:
    stack = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
    stack += '  File "/home/somebody/engine.py", line 53 in run\n  File "service.py", line 118 in _run\n'
    assert brief_stack(stack) == "Fatal Python error: Segmentation fault < engine.py:53 < service.py:118"
    assert brief_stack("") == ""
    fault, _, own = stack.partition("\n\n")
    other = 'Thread 0x2 (most recent call first):\n  File "threading.py", line 7 in wait\n'
    assert brief_stack("\n\n".join((fault, other, own, other))) == brief_stack(stack)


def test_who_is_to_blame_in_a_shared_worker() -> None:
    held = ("a", "b", "c")
    assert assignments_at_fault(held, ["a"], ["b"]) == {"a"}
    assert assignments_at_fault(held, [], ["b", "gone"]) == {"b"}
    assert assignments_at_fault(held, [], ["gone"]) == {"a", "b", "c"}


def test_start_time_names_a_process() -> None:
    assert start_time(os.getpid()) > 0
    with pytest.raises(OSError):
        start_time(2**22 - 1)


def test_messages_survive() -> None:
    served = Served("a", 1, 0, Seconds(math.nan), Seconds(0.1), Joules(1.0), EnergySource.MEASURED, 0)
    status = WorkerStatus(LoadState.FAILED, "x", 1, (served,), None, Refusal(Code.LOAD_FAILED, "f", "a", "r"))
    back = unpack(WorkerStatus, pack(status))
    assert math.isnan(back.served[0].latency_p50_s)
    assert (back.state, back.refusal, back.served[0].energy_source) == (
        status.state,
        status.refusal,
        EnergySource.MEASURED,
    )
    rule, work = PartitionRule(serve_s=Seconds(3.0)), Work(1.0, 2.0, 3.0, 4.0, 5, {"x": (1, 2)})
    asked = assignment("i", partition=rule, work=work)
    assert unpack(Assignment, pack(asked)) == asked


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"[]", b"null", b"1", b"[" * 100_000, b'{"provider": 1}', b'{"provider": "p", "access": 1}'],
)
def test_malformed_messages(payload: bytes) -> None:
    for kind in (LoadOrder, ProbeOrder):
        with pytest.raises(ShoalError) as refused:
            unpack(kind, payload)
        assert refused.value.code is Code.MESSAGE_INVALID
    for broken in ({"state": "asleep"}, {}):
        with pytest.raises(ShoalError):
            from_json(WorkerStatus, broken)


def test_a_number_that_no_status_can_hold_is_refused_where_it_comes_in() -> None:
    status = WorkerStatus(LoadState.READY, "x", 2**63 - 1, (), None, None)
    assert unpack(WorkerStatus, pack(status)) == status
    for many in (2**63, -(2**63) - 1):
        with pytest.raises(ShoalError) as refused:
            unpack(WorkerStatus, pack(replace(status, in_flight=many)))
        assert refused.value.code is Code.MESSAGE_INVALID


def test_a_worker_of_the_version_before_is_understood() -> None:
    """It runs on while its supervisor is replaced, and does not say what is counted since."""
    status = WorkerStatus(LoadState.READY, "x", 0, (), None, None, Batches((1,) * 9, 300), (0, 2))
    said = json.loads(pack(status))
    del said["batches"], said["latencies"]
    assert from_json(WorkerStatus, said) == replace(status, batches=Batches(), latencies=())


def test_weights_are_appended_to_a_model() -> None:
    model = onnx.load_from_string(with_weights(read_graph("load"), 1000))
    (weights,) = model.graph.initializer
    assert (weights.name, list(weights.dims), len(weights.raw_data)) == ("w", [1000], 4000)


def test_half_width() -> None:
    assert relative_half_width([1.0] * 9) == 0
    assert relative_half_width([0.9, 0.9, 1.0, 1.1, 1.1]) == pytest.approx(0.1)


async def test_of_what_a_worker_wrote_only_the_start_is_read(tmp_path: Path) -> None:
    """Who took it over may have written gigabytes, of which the supervisor would read on its loop."""
    process = WorkerProcess(tmp_path, "worker-1", "nonce", os.getpid(), None, lambda _: None)
    try:
        for kind in ("crash", "busy"):
            with (tmp_path / f"worker-1.{kind}").open("wb") as file:
                file.write(b"a b\0" if kind == "busy" else b"Fatal Python error: Aborted\n")
                file.truncate(2**40)
        assert process.busy_assignments() == {"a", "b"}
        own_fault, refusal = process.explain_exit(oom=False)
        assert refusal.code is Code.WORKER_CRASHED
        assert own_fault
    finally:
        process.stop_watching()
