"""One model in ONNX Runtime: opened from verified bytes, warmed up, run. The only module that runs models."""

import ctypes
import hashlib
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument  # pyright: ignore[reportMissingImports]

from shoal.agent.worker.tensors import DATATYPES, Array, specs_of
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.profile import TensorSpec

ort.disable_telemetry_events()
ort.set_default_logger_severity(4)

_BFLOAT16: Final = 16
"""onnx.TensorProto.BFLOAT16"""
_WEIGHTS_FOLDER_KEY: Final = "session.model_external_initializers_file_folder_path"
_NO_FOLDER: Final = "/proc/self/fdinfo/none"
"""A place without files: weights outside the verified bytes are never read."""
RUNTIME_VERSION: Final = f"onnxruntime {ort.__version__}"


class Engine:
    """A session, safe to run from several threads at once."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self.inputs = specs_of(session.get_inputs())
        self.outputs = specs_of(session.get_outputs())
        dtypes = {spec.dtype for spec in (*self.inputs, *self.outputs)}
        if {"BF16", "BYTES"} <= dtypes:
            raise refuse(
                Code.MODEL_INVALID,
                "BF16 and BYTES in one signature",
                "one or the other",
                "ONNX Runtime's Python binding takes them by two interfaces that do not mix: cast one inside the graph",
            )
        self._by_value = "BF16" in dtypes

    def run(self, feeds: Mapping[str, Array], names: Sequence[str], options: ort.RunOptions) -> dict[str, Array]:
        """Outputs by name. Raises ShoalError(INVALID_ARGUMENT | OUT_OF_MEMORY | RUNTIME_FAILED)."""
        found: Sequence[Any]
        try:
            if self._by_value:
                values = {name: _to_value(array) for name, array in feeds.items()}
                found = [_from_value(value) for value in self._session.run_with_ort_values(names, values, options)]
            else:
                found = self._session.run(names, dict(feeds), options)
        except Exception as error:
            raise ShoalError(_run_refusal(error)) from error
        return dict(zip(names, found, strict=True))


def read_verified(path: str, digest: str) -> bytes:
    """The bytes of the file, read once through one descriptor and hashed as read: what is checked is what is loaded.

    Raises ShoalError(MODEL_DIGEST | LOAD_FAILED).
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(handle, "rb") as file:
            data = file.read()
    except OSError as error:
        raise refuse(Code.LOAD_FAILED, f"{error.strerror}", "the cached model", "it is fetched again") from error
    found = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if found != digest:
        raise refuse(Code.MODEL_DIGEST, f"{found} ({len(data)} bytes)", digest, "the cached copy is fetched again")
    return data


def open_engine(data: bytes, provider: str, threads: int) -> Engine:
    """Raises ShoalError(LOAD_FAILED | OUT_OF_MEMORY | MODEL_INVALID)."""
    if provider not in ort.get_available_providers():
        raise refuse(
            Code.LOAD_FAILED,
            f"{RUNTIME_VERSION} has {', '.join(ort.get_available_providers())}",
            provider,
            "install the ONNX Runtime build for this device",
        )
    options = session_options(threads)
    options.add_session_config_entry(_WEIGHTS_FOLDER_KEY, _NO_FOLDER)
    fallback = [] if provider == "CPUExecutionProvider" else ["CPUExecutionProvider"]
    try:
        return Engine(ort.InferenceSession(data, options, providers=[with_options(provider, threads), *fallback]))
    except ShoalError:
        raise
    except Exception as error:
        raise ShoalError(_load_refusal(error)) from error


def with_options(provider: str, threads: int) -> str | tuple[str, dict[str, str]]:
    """A provider as a session takes it. OpenVINO has threads of its own, and would compute in what it finds fastest.

    Source: ONNX Runtime, docs/execution-providers/OpenVINO-ExecutionProvider, configuration options."""
    if provider != "OpenVINOExecutionProvider":
        return provider
    return provider, {"device_type": "CPU", "num_of_threads": str(threads), "precision": "ACCURACY"}


def show_only(device: str) -> None:
    """Of several NVIDIA devices, or the MIG instances of one, the runtime sees this one, as its device 0.

    device: a uuid; empty for devices of other kinds. CUDA reads the variable when it starts, with the first session:
    later ones of a process are of the same device, as the pool sees to.
    Source: CUDA C++ Programming Guide, environment variables, CUDA_VISIBLE_DEVICES.
    """
    if device:
        os.environ["CUDA_VISIBLE_DEVICES"] = device


def session_options(threads: int) -> ort.SessionOptions:
    """Of every session: this many threads a run, which sleep while they wait, and no chatter.

    What goes wrong is in the exception; the runtime's own lines would repeat it in colours, with the model's names."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def run_options() -> ort.RunOptions:
    """Of one run. What goes wrong is in the exception: a stranger's bad requests shall not fill the log."""
    options = ort.RunOptions()
    options.log_severity_level = 4
    return options


def generate(inputs: Sequence[TensorSpec], shapes: Mapping[str, tuple[int, ...]], integer: int) -> dict[str, Array]:
    """Inputs made from the signature: floats spread over [0, 1), every integer `integer`, True, and `a`.

    shapes: of inputs with dynamic axes; an axis that is not given is 1.
    """
    feeds: dict[str, Array] = {}
    for spec, shape in reference_shapes(inputs, shapes):
        dtype = DATATYPES[spec.dtype].dtype
        if dtype == np.object_:
            feeds[spec.name] = np.full(shape, "a", dtype=np.object_)
        elif dtype == np.bool_:
            feeds[spec.name] = np.ones(shape, dtype=np.bool_)
        elif dtype.kind in "iu":
            feeds[spec.name] = np.full(shape, integer, dtype=dtype)
        else:
            golden = np.arange(math.prod(shape), dtype=np.float64) * 0.6180339887498949
            feeds[spec.name] = (golden % 1).reshape(shape).astype(dtype)
    return feeds


def reference_shapes(
    inputs: Sequence[TensorSpec], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[TensorSpec, tuple[int, ...]]]:
    """Each input with its shape; a dynamic axis is as `shapes` says, else 1."""
    for spec in inputs:
        given = shapes.get(spec.name, ())
        yield (
            spec,
            tuple(
                dim if dim >= 0 else (given[axis] if axis < len(given) else 1)
                for axis, dim in enumerate(spec.shape or given)
            ),
        )


def warm_up(
    engine: Engine, shapes: Mapping[str, tuple[int, ...]], *, runs: int, budget_s: float, options: ort.RunOptions
) -> tuple[dict[str, Array], tuple[float, ...]]:
    """Runs generated inputs: one cold run, then at least `runs` timed ones, more while `budget_s` lasts.

    Integers are 1, so that nothing divides by zero; where 1 is out of range (an index into a table of one row, a shape
    to keep), 0. Returns the inputs used and the seconds of each timed run.
    Raises ShoalError(WARMUP_FAILED | OUT_OF_MEMORY).
    """
    names = [spec.name for spec in engine.outputs]
    feeds = generate(engine.inputs, shapes, 1)
    try:
        try:
            engine.run(feeds, names, options)
        except ShoalError as error:
            if error.code is Code.OUT_OF_MEMORY or options.terminate:
                raise
            feeds = generate(engine.inputs, shapes, 0)
            engine.run(feeds, names, options)
        times: list[float] = []
        while len(times) < runs or (sum(times) < budget_s and len(times) < 4 * runs):
            start = time.perf_counter()
            engine.run(feeds, names, options)
            times.append(time.perf_counter() - start)
    except ShoalError as error:
        if error.code is Code.OUT_OF_MEMORY:
            raise
        raise refuse(
            Code.WARMUP_FAILED,
            error.refusal.found,
            f"an answer to generated inputs { ({name: list(array.shape) for name, array in feeds.items()})!s:.300}",
            "export the model so that it runs at its reference shapes",
        ) from error
    return feeds, tuple(times)


def _to_value(array: Array) -> ort.OrtValue:
    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(array).view(np.uint16), _BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def _from_value(value: ort.OrtValue) -> Array:
    if value.element_type() != _BFLOAT16:
        found: Array = value.numpy()
        return found
    shape = value.shape()
    size = math.prod(shape) * 2
    data = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(data, dtype=ml_dtypes.bfloat16).reshape(shape)


def _out_of_memory(error: Exception) -> Refusal | None:
    text = str(error)
    if isinstance(error, MemoryError) or any(
        sign in text for sign in ("bad_alloc", "bad allocation", "Failed to allocate memory", "out of memory")
    ):
        return Refusal(Code.OUT_OF_MEMORY, _brief(error), "", "raise the workload's memory or send smaller tensors")
    return None


def _load_refusal(error: Exception) -> Refusal:
    return _out_of_memory(error) or Refusal(
        Code.LOAD_FAILED, _brief(error), "a model that this runtime runs", "check it with `shoal model inspect`"
    )


def _run_refusal(error: Exception) -> Refusal:
    short = _out_of_memory(error)
    if short is not None:
        return short
    if isinstance(error, InvalidArgument):
        return Refusal(
            Code.INVALID_ARGUMENT,
            _brief(error),
            "inputs that the graph takes",
            "see the model's metadata for its shapes",
        )
    if isinstance(error, UnicodeDecodeError):
        return Refusal(
            Code.RUNTIME_FAILED,
            "an output string is not UTF-8",
            "UTF-8",
            "ONNX Runtime's binding hands out nothing else",
        )
    return Refusal(Code.RUNTIME_FAILED, _brief(error), "an answer", "check the inputs' values and shapes")


def _brief(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
