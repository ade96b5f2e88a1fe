"""Workloads on the devices of one node: placed or refused, moved from one to another, and answers that are near."""

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from harness.cluster.stack import DevStack, documents, policy
from harness.wait import wait_until
from shoal.cli.render.resources import full_reason
from shoal.types.codes import Code
from shoal.v1 import operator_pb2

Shapes = Mapping[str, tuple[int, ...]]


def document(
    name: str, model: str, shapes: Shapes, where: str, tolerance: str = "", allow: str = "allow: [fp32]"
) -> str:
    """A workload of that model, with a policy of its own name. Nothing moves by itself meanwhile. allow: the precisions
    that it may run in, where there is a tolerance."""
    each = ", ".join(f"{entry}: {list(shape)}" for entry, shape in shapes.items())
    fixed = f", shapes: {{{each}}}" if each else ""
    text = (
        f"apiVersion: shoal/v1\nkind: Workload\nmetadata: {{name: {name}}}\n"
        f"spec: {{model: {{source: {model}{fixed}}}, policy: {name}}}\n"
    )
    near = f"\n    precision: {{{allow}, tolerance: {{{tolerance}}}}}" if tolerance else ""
    spec = f'  require:\n    where: "{where}"{near}\n  migration: {{when: {{gain: 99%}}}}\n'
    return documents(policy(name, spec), text)


def outcome_of(stack: DevStack, name: str, refusals: Collection[Code], within_s: float) -> tuple[str, str]:
    """(device, "") of a workload that serves, or ("", reason) of one that is refused with one of these codes."""

    def outcome() -> tuple[str, str] | None:
        for row in stack.placements(name):
            if row.routed:
                return row.assignment.device, ""
        reason = full_reason(stack.workload(name).reason)
        return ("", reason) if any(code in reason for code in refusals) else None

    found = wait_until(outcome, within_s, f"{name} to serve, or to be refused")
    assert found is not None
    return found


def move(stack: DevStack, name: str, to: str, within_s: float) -> operator_pb2.MigrationView:
    """The move to NODE/DEVICE, once it is over."""
    with stack.api() as api:
        asked = api.migrate("default", name, to)

    def view_if_over() -> operator_pb2.MigrationView | None:
        with stack.api() as api:
            (one,) = api.get("migrations", asked.id).migrations
        return one if one.stage in ("done", "aborted") else None

    found = wait_until(view_if_over, within_s, f"the move to {to} to be over")
    assert found is not None
    return found


def next_move(stack: DevStack, name: str, earlier: Collection[str], within_s: float) -> operator_pb2.MigrationView:
    """The workload's move that is none of those, once it is over: one that its documents ask for."""

    def view_if_over() -> operator_pb2.MigrationView | None:
        with stack.api() as api:
            moves = [one for one in api.get("migrations").migrations if one.workload.name == name]
        return next((one for one in moves if one.id not in earlier and one.stage in ("done", "aborted")), None)

    found = wait_until(view_if_over, within_s, f"a move of {name} to be over")
    assert found is not None
    return found


class Near:
    """Equal to the bytes of an FP32 output that differs from the right one by at most `at_most`."""

    def __init__(self, right: NDArray[np.float32], at_most: float) -> None:
        self._right = np.ravel(right)
        self._at_most = at_most

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, bytes):
            return NotImplemented
        return np.allclose(np.frombuffer(other, np.float32), self._right, atol=self._at_most, rtol=0)

    def __hash__(self) -> int:
        return 0
