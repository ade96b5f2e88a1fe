"""Compares two replicas' answers to one input, output by output.

Shapes, datatypes, NaNs and infinities must agree. Strings, integers and booleans must be equal, except integers that a
tolerance names (class numbers under another precision). Metrics are computed in float64 over the places where both are
finite, so that a mask of infinities does not hide the rest.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal.agent.core.verification import InputComparison, is_within
from shoal.agent.worker.tensors import Array, is_bfloat16
from shoal.types.migration import Drift, Metric, Tolerance
from shoal.types.units import show_number

_Numbers = NDArray[np.float64]
_MAX_FLOAT: Final = float(np.finfo(np.float64).max)


def compare(
    expected: Mapping[str, Array], got: Mapping[str, Array], tolerances: Sequence[Tolerance]
) -> InputComparison:
    """Compare all outputs. A tolerance that names an output replaces the general ones for it.

    A tolerance for an unknown output is a fault, and so is a numeric output without a tolerance: an output that nothing
    checks has not passed.
    """
    missing = [each.output for each in tolerances if each.output and each.output not in expected]
    if missing:
        return InputComparison(
            (), f"a tolerance for {missing[0]!r:.80}, outputs are {', '.join(sorted(expected))!s:.200}", 0
        )
    if expected.keys() != got.keys():
        return InputComparison(
            (), f"outputs {', '.join(sorted(got))!s:.200}, expected {', '.join(sorted(expected))!s:.200}", 0
        )
    drifts: list[Drift] = []
    fault, elements = "", 0
    for name, wanted in expected.items():
        found = got[name]
        own = tuple(each for each in tolerances if each.output == name)
        own_or_general = own or tuple(each for each in tolerances if not each.output)
        why = _structural_mismatch(wanted, found) or (
            "" if _uses_metric(wanted, own) else _value_mismatch(wanted, found)
        )
        if why:
            fault = fault or f"{name}: {why}"
        elif _uses_metric(wanted, own) and not own_or_general:
            fault = fault or f"{name}: no tolerance says how far it may be"
        elif _uses_metric(wanted, own):
            a, b = _numbers(wanted), _numbers(found)
            elements += int(np.isfinite(a).sum())
            drifts += [_drift(name, each, a, b) for each in own_or_general]
        else:
            elements += wanted.size
    return InputComparison(tuple(drifts), fault, elements)


def why_beyond(expected: Mapping[str, Array], got: Mapping[str, Array], tolerances: Sequence[Tolerance]) -> str:
    """How the answers differ by more than the tolerances; empty: they do not."""
    found = compare(expected, got, tolerances)
    drift = next((each for each in found.drifts if not each.passed), None)
    if found.fault or drift is None:
        return found.fault
    return f"{drift.output}: {drift.metric} {show_number(drift.worst)}, bound {show_number(drift.bound)}"


def measure(metric: Metric, a: _Numbers, b: _Numbers, k: int = 5) -> float:
    """The metric of two arrays of one shape whose NaNs and infinities agree.

    - MAX_REL: relative to the largest finite magnitude in either array.
    - COSINE: 1 if both are zero, 0 if one is.
    - TOP_K: the mean over all rows of the last axis; a tie with the k-th largest of `a` counts as a hit.

    Without elements: the value of equal arrays.
    """
    if metric is Metric.TOP_K:
        return _top_k(a, b, k)
    finite = np.isfinite(a)
    a, b = a[finite], b[finite]
    if np.array_equal(a, b):
        return 1.0 if metric is Metric.COSINE else 0.0
    if metric is Metric.COSINE:
        return _cosine(a, b)
    if metric is Metric.MAX_ABS:
        with np.errstate(over="ignore"):
            return min(_max_magnitude(a - b), _MAX_FLOAT)
    scale = max(_max_magnitude(a), _max_magnitude(b))
    return _max_magnitude(a / scale - b / scale)


def _drift(name: str, tolerance: Tolerance, a: _Numbers, b: _Numbers) -> Drift:
    worst = measure(tolerance.metric, a, b, tolerance.k)
    return Drift(name, tolerance.metric, tolerance.bound, worst, is_within(tolerance.metric, worst, tolerance.bound))


def _uses_metric(array: Array, own: Sequence[Tolerance]) -> bool:
    """Floating point always; integers only if a tolerance names the output."""
    return _is_float(array) or (array.dtype.kind in "iu" and bool(own))


def _is_float(array: Array) -> bool:
    return array.dtype.kind == "f" or is_bfloat16(array.dtype)


def _structural_mismatch(wanted: Array, found: Array) -> str:
    """Why no metric can be computed; "" if one can."""
    if wanted.dtype != found.dtype:
        return f"datatype {found.dtype}, expected {wanted.dtype}"
    if wanted.shape != found.shape:
        return f"shape {list(found.shape)}, expected {list(wanted.shape)}"
    if not _is_float(wanted):
        return ""
    a, b = _numbers(wanted), _numbers(found)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return f"NaN in {int(np.isnan(b).sum())} places, expected {int(np.isnan(a).sum())}, or in others"
    endless = np.isinf(a) | np.isinf(b)
    if not np.array_equal(a[endless], b[endless]):
        return f"an infinite value in {int(np.isinf(b).sum())} places, expected {int(np.isinf(a).sum())}, or in others"
    return ""


def _value_mismatch(wanted: Array, found: Array) -> str:
    same: Any = wanted == found
    count = wanted.size - int(np.count_nonzero(same))
    return f"{count} of {wanted.size} values differ" if count else ""


def _numbers(array: Array) -> _Numbers:
    return array.astype(np.float64)


def _max_magnitude(a: _Numbers) -> float:
    return float(np.max(np.abs(a), initial=0.0))


def _cosine(a: _Numbers, b: _Numbers) -> float:
    if not (a.any() and b.any()):
        return 0.0
    a, b = a / _max_magnitude(a), b / _max_magnitude(b)  # so that the squares do not overflow
    return float(np.clip(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)), -1.0, 1.0))


def _top_k(a: _Numbers, b: _Numbers, k: int) -> float:
    if a.size == 0:
        return 1.0
    rows_a, rows_b = (np.where(np.isnan(x), -np.inf, x).reshape(-1, x.shape[-1] if x.ndim else 1) for x in (a, b))
    k = min(max(k, 1), rows_a.shape[1])
    least = np.partition(rows_a, -k, axis=1)[:, -k]
    chosen = np.argpartition(rows_b, -k, axis=1)[:, -k:]
    return float(np.mean(np.take_along_axis(rows_a, chosen, axis=1) >= least[:, None]))
