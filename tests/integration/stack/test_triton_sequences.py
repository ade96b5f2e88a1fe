"""Sequences of an unmodified tritonclient, over gRPC and REST: begun at a gateway, gone on with at a node that keeps
none of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.clients import triton
from harness.cluster.stack import DevStack, documents, on_nodes, policy, workload
from harness.models.synthetic import stateful_sum
from harness.report import record

NAME = "sums"
STATEFUL = "  session: {state: {state: next}}\n"
STEPS, CUT = 6, 4
"""Of each sequence, and of those how many go through the gateway."""
IDS: tuple[int | str, ...] = (7, 2**63 - 1, "a text")
FEEDS = {of: np.arange(2 * STEPS, dtype=np.float32).reshape(STEPS, 1, 2) * 10**at for at, of in enumerate(IDS)}


@pytest.fixture(scope="module")
def sums(stack: DevStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    stack.push(stateful_sum().SerializeToString(), NAME)
    stack.apply(documents(policy(NAME, on_nodes(["plain-cpu"])), workload(NAME, NAME, NAME) + STATEFUL))
    stack.wait_serving(NAME)
    yield stack
    stack.delete_workloads(NAME)


def steps(asked: triton.Cases, first: int, last: int) -> None:
    """Of all sequences, in turns."""
    for step in range(first, last):
        for of, feed in FEEDS.items():
            said = {"sequence_id": of, "sequence_start": step == 0, "sequence_end": step == STEPS - 1}
            asked.add(f"{of!r} {step}", NAME, {"x": feed[step]}, [], options=said)


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_a_sequence_goes_on_at_any_front_with_its_own_state(sums: DevStack, tmp_path: Path, transport: str) -> None:
    """Named by numbers and by texts, in turns; and what is no step of any."""
    files, suite = sums.client_files, triton.Suite({}, {NAME: {}}, {})
    early, late = triton.Cases(), triton.Cases()
    steps(early, 0, CUT)
    steps(late, CUT, STEPS)
    x = FEEDS[7][0]
    late.add("after its end", NAME, {"x": x}, [], options={"sequence_id": 7})
    late.add("never begun", NAME, {"x": x}, [], options={"sequence_id": "nobody"})
    late.add("without a name", NAME, {"x": x}, [])
    mine = {"sequence_id": "mine", "sequence_start": True}
    late.add("its state in the request", NAME, {"x": x, "state": x}, [], options=mine)
    late.add("begun again", NAME, {"x": x}, ["y"], options={"sequence_id": 7, "sequence_start": True})
    found, errors = dict[str, Any](), dict[str, tuple[str, str]]()
    for way, asked in (("gateway", early), ("edge-npu", late)):
        port = sums.port(way, "data")
        got = triton.ask(
            tmp_path / way, transport, f"localhost:{port}", asked, suite, authority=str(files.authority),
            certificate=str(files.certificate), key=str(files.key),
        )  # fmt: skip
        ready, said = got["models"][NAME]
        assert ready
        assert ([each["name"] for each in said["inputs"]], [each["name"] for each in said["outputs"]]) == (["x"], ["y"])
        found |= got["answers"]
        errors |= got["errors"]
    for of, feed in FEEDS.items():
        for step, total in enumerate(np.cumsum(feed, axis=0)):
            triton.assert_same(found[f"{of!r} {step}"]["y"], total)
    triton.assert_same(found["begun again"]["y"], x)
    lost, invalid = ("StatusCode.ABORTED", "StatusCode.INVALID_ARGUMENT") if transport == "grpc" else ("409", "400")
    del errors["metadata nothing"]
    assert {name: (status, text.split()[-1].strip("()")) for name, (status, text) in errors.items()} == {
        "after its end": (lost, "SESSION_LOST"),
        "never begun": (lost, "SESSION_LOST"),
        "without a name": (invalid, "SESSION_INVALID"),
        "its state in the request": (invalid, "SESSION_INVALID"),
    }
    record(
        "issue 6, sessions", "P", 1, client="tritonclient", transport=transport, steps=len(found), errors=len(errors)
    )
