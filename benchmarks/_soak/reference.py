"""What ONNX Runtime answers in the clients' process."""

import itertools
from typing import Any, Final

import numpy as np
import onnxruntime
from _soak.clients import Arrays
from numpy.typing import NDArray

TOLERANCE: Final = 1e-3
"""Of an answer in a batch, relative to the largest value: the default of policies (`shoal.types.tolerance`)."""
DTYPES: Final = {"tensor(float)": np.float32, "tensor(int32)": np.int32}


class Reference:
    """One model. Its inputs are others every time, so that somebody else's answer is noticed."""

    def __init__(self, path: str, rng: np.random.Generator, tolerance: float = 0.0) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.outputs = [each.name for each in self._session.get_outputs()]
        self._tolerance = tolerance
        self._base: dict[str, NDArray[Any]] = {}
        for each in self._session.get_inputs():
            shape = [axis if isinstance(axis, int) and axis > 0 else 1 for axis in each.shape]
            self._base[each.name] = (8 * rng.random(shape) - 4).astype(DTYPES[each.type])
        self._number = itertools.count(1)

    def inputs(self) -> Arrays:
        number = next(self._number)
        return {name: np.roll(value, number) + value.dtype.type(number % 1009) for name, value in self._base.items()}

    def answer(self, inputs: Arrays) -> Arrays:
        answers: Any = self._session.run(None, dict(inputs))
        return dict(zip(self.outputs, answers, strict=True))

    def problem(self, inputs: Arrays, found: Arrays) -> str:
        """In what the answer differs; empty: in nothing."""
        return difference(found, self.answer(inputs), self._tolerance)


def difference(found: Arrays, right: Arrays, tolerance: float = 0.0) -> str:
    """In what arrays differ, of which every bit must be equal where the tolerance is 0; empty: in nothing."""
    if set(found) != set(right):
        return f"outputs {sorted(found)}, not {sorted(right)}"
    for name, value in right.items():
        if (found[name].shape, found[name].dtype) != (value.shape, value.dtype):
            return f"{name}: {found[name].dtype} {found[name].shape}, not {value.dtype} {value.shape}"
        if found[name].tobytes() != value.tobytes():
            off = float(np.max(np.abs(found[name] - value)) / max(np.max(np.abs(value)), np.finfo(np.float32).tiny))
            if not 0 < off <= tolerance:
                return f"{name}: off by {off:.3g}"
    return ""
