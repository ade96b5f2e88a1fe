"""The models of ONNX's own backend tests, with their inputs, and what ONNX Runtime answers to them in this process."""

import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TypeProto, helper, numpy_helper

from harness.clients.oip import Tensor

Array = NDArray[Any]

DATATYPES = {
    np.dtype(np.bool_): "BOOL", np.dtype(np.uint8): "UINT8", np.dtype(np.uint16): "UINT16",
    np.dtype(np.uint32): "UINT32", np.dtype(np.uint64): "UINT64", np.dtype(np.int8): "INT8",
    np.dtype(np.int16): "INT16", np.dtype(np.int32): "INT32", np.dtype(np.int64): "INT64",
    np.dtype(np.float16): "FP16", np.dtype(np.float32): "FP32", np.dtype(np.float64): "FP64",
    np.dtype(np.object_): "BYTES",
}  # fmt: skip
_TIMES = 4
"""A dropout in training answers twice alike where chance has it so."""
FAMILIES = ("node", "simple", "pytorch-converted", "pytorch-operator", "light")


@dataclass(frozen=True, slots=True)
class Case:
    """name: its family, a slash, the test's name. inputs: of its first data set, by the order of the graph's inputs;
    None: it brings none."""

    name: str
    content: bytes
    inputs: tuple[Any, ...] | None

    @property
    def takes_bf16(self) -> bool:
        inputs = onnx.load_from_string(self.content).graph.input
        return any(info.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16 for info in inputs)

    @property
    def operators(self) -> frozenset[str]:
        return frozenset(node.op_type for node in onnx.load_from_string(self.content).graph.node)


@dataclass(frozen=True, slots=True)
class RuntimeResult:
    """What ONNX Runtime says in process. outputs: by name in order; None: it does not load or run it.
    is_deterministic: two sessions answer the same bytes, each time that they are asked."""

    inputs: Mapping[str, Array]
    outputs: tuple[Tensor, ...] | None
    is_deterministic: bool
    is_loadable: bool


def cases() -> Iterator[Case]:
    """All cases in a fixed order. onnx generates those of operators; the others are in its wheel."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for made in collect_testcases(None):
            assert made.model is not None
            first = made.data_sets[0][0] if made.data_sets else None
            yield Case(f"node/{made.name}", made.model.SerializeToString(), None if first is None else tuple(first))
    data = Path(onnx.__file__).parent / "backend" / "test" / "data"
    for family in FAMILIES[1:]:
        for path in sorted((data / family).glob("*.onnx" if family == "light" else "*/model.onnx")):
            name = path.stem if family == "light" else path.parent.name
            yield Case(f"{family}/{name}", path.read_bytes(), _load_inputs(path))


def _load_inputs(model: Path) -> tuple[Any, ...] | None:
    files = sorted(
        (model.parent / "test_data_set_0").glob("input_*.pb"), key=lambda path: int(path.stem.removeprefix("input_"))
    )
    if not files:
        return None
    found: list[Any] = []
    for path in files:
        tensor = onnx.TensorProto()
        try:
            tensor.ParseFromString(path.read_bytes())
            found.append(numpy_helper.to_array(tensor))
        except Exception:  # a sequence, in another message: nothing that the protocol carries
            found.append(None)
    return tuple(found)


def has_tensors_only(case: Case) -> bool:
    """Whether every input and output is a tensor: no sequence, no optional."""
    graph = onnx.load_from_string(case.content).graph
    return all(info.type.WhichOneof("value") == "tensor_type" for info in (*_required_inputs(graph), *graph.output))


def _required_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    stored = {tensor.name for tensor in graph.initializer}
    return [info for info in graph.input if info.name not in stored]


def run(case: Case) -> RuntimeResult:
    """Run in two sessions, some times in each."""
    graph = onnx.load_from_string(case.content).graph
    given = _required_inputs(graph)
    arrays = case.inputs if case.inputs is not None else tuple(_random_input(info.type) for info in given)
    inputs = {info.name: array for info, array in zip(given, arrays, strict=False) if array is not None}
    inputs = {name: np.asarray(array) for name, array in inputs.items() if not isinstance(array, list)}
    inputs = {name: array.astype(np.object_) if array.dtype.kind in "US" else array for name, array in inputs.items()}
    found = list[tuple[Tensor, ...]]()
    for _ in range(2):
        try:
            session = ort.InferenceSession(case.content, _options(), providers=["CPUExecutionProvider"])
        except Exception:  # whatever the runtime says: it does not load it
            return RuntimeResult(inputs, None, is_deterministic=False, is_loadable=False)
        try:
            if len(inputs) < len(given):
                return RuntimeResult(inputs, None, is_deterministic=False, is_loadable=True)
            names = [each.name for each in session.get_outputs()]
            found.extend(tensors(dict(zip(names, _answer(session, inputs, names), strict=True))) for _ in range(_TIMES))
        except Exception:  # nor does it run it
            return RuntimeResult(inputs, None, is_deterministic=False, is_loadable=True)
    return RuntimeResult(inputs, found[0], is_deterministic=all(each == found[0] for each in found), is_loadable=True)


def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return options


def _answer(session: ort.InferenceSession, inputs: Mapping[str, Array], names: Sequence[str]) -> list[Any]:
    kinds = {each.type for each in (*session.get_inputs(), *session.get_outputs())}
    if "tensor(bfloat16)" not in kinds:
        return list(session.run(names, dict(inputs)))
    from shoal.agent.worker.engine import Engine, run_options

    return list(Engine(session).run(inputs, names, run_options()).values())


def tensors(arrays: Mapping[str, Array]) -> tuple[Tensor, ...]:
    """Tensors as the protocol carries them. Raises KeyError for a type that it does not carry."""
    return tuple(
        Tensor(name, datatype(array), array.shape, raw(array))
        for name, array in ((name, np.asarray(value)) for name, value in arrays.items())
    )


def datatype(array: Array) -> str:
    return "BF16" if array.dtype.name == "bfloat16" else DATATYPES[array.dtype]


def raw(array: Array) -> bytes:
    if array.dtype != np.object_:
        return np.ascontiguousarray(array).tobytes()
    texts = [item if isinstance(item, bytes) else str(item).encode() for item in array.ravel()]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def _random_input(kind: TypeProto) -> Array | None:
    """For the few networks that bring no inputs: the same at every run."""
    tensor = kind.tensor_type
    dims = [dim.dim_value or 1 for dim in tensor.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    return np.random.default_rng(17).random(dims).astype(dtype)
