"""Checks that a model accepts and produces the state that a workload's `session` names."""

import math
from collections.abc import Iterator, Mapping
from typing import Final

from shoal.types.codes import Code, Refusal
from shoal.types.profile import ITEM_BYTES, ModelProfile, TensorSpec
from shoal.types.workload import SESSION_BYTES

ZEROLESS_DATATYPES: Final = frozenset({"BYTES"})
"""Datatypes without a zero value to start a session with."""


def session_state_problems(
    profile: ModelProfile, session: Mapping[str, str], source: str
) -> Iterator[tuple[str, Refusal]]:
    """Pairs of (state input, why it cannot carry state from step to step). source: the model's name in its document."""
    inputs = {spec.name: spec for spec in profile.inputs}
    outputs = {spec.name: spec for spec in profile.outputs}
    held = 0
    for taken, given in session.items():
        into, out = inputs.get(taken), outputs.get(given)
        if into is None:
            yield taken, _refusal(f"{source} has no input {taken!r:.80}", f"one of {_names(inputs)}")
        elif out is None:
            yield taken, _refusal(f"{source} has no output {given!r:.80}", f"one of {_names(outputs)}")
        elif into.dtype != out.dtype or into.dtype in ZEROLESS_DATATYPES:
            yield taken, _refusal(f"{taken} is {into.dtype}, {given} is {out.dtype}", "numbers of one datatype")
        elif not _agree(into, out):
            found = f"{taken} has shape {list(into.shape)}, {given} has {list(out.shape)}"
            yield taken, _refusal(found, "one shape, but for axes that either leaves open")
        elif (held := held + _size(into)) > SESSION_BYTES:
            yield taken, _refusal(f"{source} begins with {held} bytes of state", f"at most {SESSION_BYTES}")


def _size(spec: TensorSpec) -> int:
    return ITEM_BYTES.get(spec.dtype, 1) * math.prod(1 if size < 0 else size for size in spec.shape)


def _agree(into: TensorSpec, out: TensorSpec) -> bool:
    if len(into.shape) != len(out.shape):
        return False
    return all(a == b or -1 in (a, b) for a, b in zip(into.shape, out.shape, strict=True))


def _names(specs: Mapping[str, TensorSpec]) -> str:
    return ", ".join(specs)[:200]


def _refusal(found: str, asked: str) -> Refusal:
    return Refusal(Code.SESSION_INVALID, found, asked, "see the model's signature: shoal describe model NAME")
