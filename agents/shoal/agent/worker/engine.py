"""One model in ONNX Runtime: opened from verified bytes, warmed up, run. The only module that runs models."""

import ctypes
import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import (  # pyright: ignore[reportMissingImports]
    InvalidGraph,
)
from onnxruntime.capi.onnxruntime_pybind11_state import (  # pyright: ignore[reportMissingImports]
    NotImplemented as NotImplemented_,
)

from shoal.agent.worker.failures import brief_error, memory_refusal, run_refusal
from shoal.agent.worker.providers import CPU_PROVIDER, RUNTIME_VERSION, Partition, Provider, add_provider, partition
from shoal.agent.worker.shapes import fix_shapes
from shoal.agent.worker.tensors import DATATYPES, Array, bfloat16, is_bfloat16, tensor_specs
from shoal.agent.worker.value_dependence import is_bounded_by_shapes
from shoal.types.assignment import Work
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.profile import TensorSpec

ort.disable_telemetry_events()
ort.set_default_logger_severity(4)

_BFLOAT16: Final = 16
"""onnx.TensorProto.BFLOAT16"""
_LEAST_S: Final = 0.05
"""A shorter series of runs lies within one time slice of another program (Linux: some milliseconds) and its effects."""
_MOST_RUNS: Final = 500
_GOLDEN: Final = 0.6180339887498949
_SLICE: Final = 2**13
"""Elements of a generated input that are computed at once."""
_WEIGHTS_FOLDER_KEY: Final = "session.model_external_initializers_file_folder_path"
_NO_FOLDER: Final = "/proc/self/fdinfo/none"
"""A path without files, so that weights outside the verified bytes are never read."""
_TOO_NEW_IR: Final = re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")
_TOO_NEW_OPSET: Final = re.compile(
    r"Opset (\d+) is under development.* official support for domain (\S+) is till opset (\d+)"
)
_NO_KERNEL: Final = re.compile(r"(?:Could not find an implementation|Failed to find kernel) for (\S+\(\d+\))")
_OPEN_SHAPE: Final = re.compile(r"[Dd]ynamic shape is not supported yet, for input: (\S+)")
"""ONNX Runtime, core/providers/qnn/builder/qnn_utils.cc."""
_GRAPH_ERROR: Final = re.compile(r"Type Error: |is not a registered function/op")
_STATUS: Final = re.compile(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : (Exception during initialization: )?")
_SOURCE_LINE: Final = re.compile(r"^\S*/onnxruntime/\S+:\d+ .*?\)(?: const)?(?:::<lambda\(\)>)?(?: \[with [^\]]*\])? ")
"""The patterns above match texts of ONNX Runtime 1.31.1: core/graph/model.cc, model_load_utils.h,
core/framework/session_state.cc."""
_EXPORT_OLDER: Final = "export the model for an older version of ONNX, or run it where the runtime is newer"
_EXPORT_OTHERWISE: Final = "export the model with other operators or types, or run it where the runtime has this one"


class Engine:
    """A loaded model in an ONNX Runtime session. Several threads may run it at the same time."""

    def __init__(
        self,
        session: ort.InferenceSession,
        operators: frozenset[str] = frozenset(),
        note: str = "",
        *,
        is_bounded_by_shapes: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`operators` are those that the device's provider took. `note` says what runs beside it.
        `is_bounded_by_shapes`: no values of its inputs make a run much longer than others of their shapes. `clock`: as
        `run_clock`."""
        self.clock = clock
        self.note = note
        self.is_bounded_by_shapes = is_bounded_by_shapes
        self.session = session
        self.operators = operators
        self.inputs = tensor_specs(session.get_inputs())
        self.outputs = tensor_specs(session.get_outputs())
        # As `padding.Axes` has them.
        self.input_axes = {each.name: tuple(each.shape) for each in session.get_inputs()}
        self.output_axes = {each.name: tuple(each.shape) for each in session.get_outputs()}
        dtypes = {spec.dtype for spec in (*self.inputs, *self.outputs)}
        if {"BF16", "BYTES"} <= dtypes:
            raise refuse(
                Code.MODEL_INVALID,
                "BF16 and BYTES in one signature",
                "one or the other",
                "ONNX Runtime's Python binding takes them by two interfaces that do not mix: cast one inside the graph",
            )
        self._uses_ort_values = "BF16" in dtypes

    def run(self, feeds: Mapping[str, Array], names: Sequence[str], options: ort.RunOptions) -> dict[str, Array]:
        """Outputs by name. Raises ShoalError(INVALID_ARGUMENT | OUT_OF_MEMORY | RUNTIME_FAILED)."""
        found: Sequence[Any]
        try:
            if self._uses_ort_values:
                values = {name: _to_value(array) for name, array in feeds.items()}
                found = [_from_value(value) for value in self.session.run_with_ort_values(names, values, options)]
            else:
                found = self.session.run(names, dict(feeds), options)
        except Exception as error:
            raise ShoalError(run_refusal(error, empty=any(not array.size for array in feeds.values()))) from error
        return dict(zip(names, found, strict=True))


def read_and_verify(path: str, digest: str) -> bytes:
    """The bytes of the file, read once through one descriptor and hashed as read, so that the verified bytes are the
    loaded ones.

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


def open_engine(
    data: bytes,
    provider: Provider,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    partial: float | None = None,
    node_flops: Mapping[str, float] | None = None,
    compiled: Collection[str] | None = None,
    compile_to: Path | None = None,
) -> Engine:
    """Open a session in which the provider computes every node, or all but this share of the FLOPs.

    `shapes`: as `fix_shapes` takes them. `node_flops`: as `Partition.share_left` takes them. `compiled`: the operators
    of a compiled model, of which the runtime tells none; None: it is no compiled one. `compile_to`: a path, where
    nothing is yet, for the model's compiled form (EPContext): a graph of the provider's own code, for one version of
    provider and runtime and one device with its options. A provider that has none writes nothing.

    Raises ShoalError(IR_UNSUPPORTED | OPSET_UNSUPPORTED | OP_UNSUPPORTED | SHAPES_OPEN | LOAD_FAILED | OUT_OF_MEMORY |
    MODEL_INVALID).
    """
    options = session_options(provider.threads)
    options.add_session_config_entry(_WEIGHTS_FOLDER_KEY, _NO_FOLDER)
    if compile_to is not None:
        for key, value in (("enable", "1"), ("embed_mode", "1"), ("file_path", str(compile_to))):
            options.add_session_config_entry(f"ep.context_{key}", value)
    fixed = fix_shapes(data, shapes or {})
    try:
        # Without the fallback of the Python binding, which runs a failed request again on the CPU's provider.
        session = ort.InferenceSession(fixed, options, providers=add_provider(options, provider), enable_fallback=0)
        _forget_bytes(session)
        if provider.name == CPU_PROVIDER:
            bounded = is_bounded_by_shapes(fixed)
            return Engine(session, is_bounded_by_shapes=bounded, clock=run_clock(provider.name, provider.threads))
        found = partition(session, provider.name)
        operators = frozenset(found.taken if compiled is None else compiled)
        return Engine(session, operators, _check_partition(found, provider, partial, node_flops or {}))
    except ShoalError:
        raise
    except Exception as error:
        raise ShoalError(_load_refusal(error)) from error


def _forget_bytes(session: ort.InferenceSession) -> None:
    """The binding keeps the bytes that it was given, from which `set_providers` would load the model again: as much as
    the file, as long as the session. Nothing here calls it."""
    if isinstance(getattr(session, "_model_bytes", None), bytes):
        session._model_bytes = None


def _check_partition(
    found: Partition, provider: Provider, partial: float | None, node_flops: Mapping[str, float]
) -> str:
    """What runs beside the provider, in words; empty: nothing. Raises ShoalError(OP_UNSUPPORTED) with the operators,
    where that is more than `partial`."""
    if not found.left:
        return ""
    left, taken = sum(found.left.values()), sum(found.taken.values())
    share, names = found.share_left(node_flops), ", ".join(found.left)
    if partial is not None and taken and share <= partial:
        return f"partial: {share:.1%} of its FLOPs run beside {provider.name}: {names}"[:300]
    raise refuse(
        Code.OP_UNSUPPORTED,
        f"{provider.name} leaves {left} of {left + taken} nodes: {names}"[:300],
        "a provider that takes the whole graph" if partial is None else f"at most {partial:.1%} of its FLOPs beside it",
        "use a variant without these operators or precisions, fix the shapes (spec.model.shapes), or allow a share of "
        f"{share:.1%} beside the device (require.partial)",
    )


def run_clock(provider: str, threads: int) -> Callable[[], float]:
    """The clock by which a run is timed for a prediction. Where all of it runs in the calling thread, that is the
    thread's processor time: other programs cost a measurement some of its runs, and not its truth."""
    return time.thread_time if provider == CPU_PROVIDER and threads == 1 else time.perf_counter


def session_options(threads: int) -> ort.SessionOptions:
    """Options of every session: this many threads per run, which sleep while they wait, and no log output.

    No memory pattern: from the second run of a shape on, the runtime takes one block for all tensors, beside the blocks
    of the first run, which stay. Without it, at batch 4, a DenseNet kept 34.0 MiB of a run instead of 56.7, a detector
    46.9 instead of 69.8; medians of 14 models changed by -1 to +5 %. It remembers a plan for each shape of each graph
    that it was ever asked for, so that clients would grow a worker with the values that they send.

    Exceptions carry every error. The runtime's own lines would repeat it in colours, with the model's names.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = False
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def run_options() -> ort.RunOptions:
    """Options of one run, without log output: exceptions carry every error, and bad requests of clients must not fill
    the log."""
    options = ort.RunOptions()
    options.log_severity_level = 4
    return options


def generate_inputs(
    inputs: Sequence[TensorSpec],
    shapes: Mapping[str, tuple[int, ...]],
    integer: int,
    operands: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Array]:
    """Inputs made from the signature: floats spread over [0, 1), every integer `integer`, True, and `a`.

    `shapes` gives the dynamic axes; an axis that is not given is 1. `operands` gives the elements of inputs that the
    graph takes as a shape, axes and the like. If their count does not fit the input's shape, it is filled like any
    other input.
    """
    feeds: dict[str, Array] = {}
    for spec, shape in reference_shapes(inputs, shapes):
        dtype = DATATYPES[spec.dtype].dtype
        given = (operands or {}).get(spec.name, ())
        if given and len(given) == math.prod(shape) and dtype != np.object_:
            feeds[spec.name] = np.array(given, np.int64).reshape(shape).astype(dtype)
        elif dtype == np.object_:
            feeds[spec.name] = np.full(shape, "a", dtype=np.object_)
        elif dtype == np.bool_:
            feeds[spec.name] = np.ones(shape, dtype=np.bool_)
        elif dtype.kind in "iu":
            feeds[spec.name] = np.full(shape, integer, dtype=dtype)
        else:
            feeds[spec.name] = _spread_floats(math.prod(shape), dtype).reshape(shape)
    return feeds


def _spread_floats(count: int, dtype: np.dtype[Any]) -> Array:
    """Multiples of the golden ratio, modulo 1. In slices: in doubles all at once, they and what they are computed by
    would take six times what the model's input does, and the model's memory would be measured with them."""
    found = np.empty(count, dtype)
    for start in range(0, count, _SLICE):
        found[start : start + _SLICE] = np.arange(start, min(count, start + _SLICE), dtype=np.float64) * _GOLDEN % 1
    return found


def reference_shapes(
    inputs: Sequence[TensorSpec], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[TensorSpec, tuple[int, ...]]]:
    """Each input with its shape. A dynamic axis has the length that `shapes` gives, or 1."""
    for spec in inputs:
        given = shapes.get(spec.name, ())
        yield (
            spec,
            tuple(
                dim if dim >= 0 else (given[axis] if axis < len(given) else 1)
                for axis, dim in enumerate(spec.shape or given)
            ),
        )


@dataclass(frozen=True, slots=True)
class WarmupResult:
    """Result of a warm-up."""

    # The inputs that ran, by name. Empty without a warm-up.
    feeds: dict[str, Array]
    # What it answered to them. Empty without a warm-up.
    answers: dict[str, Array]
    # Seconds of each timed run, as a caller waits for it. Empty without a warm-up.
    times: tuple[float, ...]
    # Seconds of the same runs by the engine's clock: what they take on an idle machine.
    own_times: tuple[float, ...]
    # Why there was no warm-up, if it was optional and no input ran. None: there was one.
    skip_reason: Refusal | None = None


def warm_up(
    engine: Engine,
    candidates: Iterable[Callable[[], dict[str, Array]]],
    *,
    runs: int,
    budget_s: float,
    options: ort.RunOptions,
    optional: bool = False,
) -> WarmupResult:
    """Run the first candidate that the model answers: one cold run, then at least `runs` timed ones, more until
    `budget_s` is spent, of short ones as many as take `_LEAST_S`. With no `runs` the cold one is timed.

    `optional`: if the model answers no candidate, return a result without inputs and times, and with the reason.

    Raises ShoalError(WARMUP_FAILED | OUT_OF_MEMORY).
    """
    names = [spec.name for spec in engine.outputs]
    failed: tuple[dict[str, Array], ShoalError] | None = None
    for candidate in candidates:
        feeds = candidate()
        try:
            answers, cold = _time_run(engine, feeds, names, options)
            timed = [] if runs else [cold]
            while len(timed) < runs or _is_worth_another([waited_s for waited_s, _ in timed], runs, budget_s):
                timed.append(_time_run(engine, feeds, names, options)[1])
        except ShoalError as error:
            if error.code is Code.OUT_OF_MEMORY:
                raise
            failed = failed or (feeds, error)  # the first candidate is the one that the model most likely takes
            if options.terminate:
                break
        else:
            times, own_times = zip(*timed, strict=True)
            return WarmupResult(feeds, answers, times, own_times)
    assert failed is not None
    given, cause = failed
    refusal = Refusal(
        Code.WARMUP_FAILED,
        cause.refusal.found,
        f"an answer to inputs of { ({name: list(array.shape) for name, array in given.items()})!s:.300}",
        "give samples (spec.model.samples, or shoal model push --samples), or set spec.model.warm_up: optional",
    )
    if optional and not options.terminate:
        return WarmupResult({}, {}, (), (), refusal)
    raise ShoalError(refusal) from cause


def _time_run(
    engine: Engine, feeds: dict[str, Array], names: Sequence[str], options: ort.RunOptions
) -> tuple[dict[str, Array], tuple[float, float]]:
    """The answers, and the seconds as a caller waits for them and by the engine's clock."""
    start, own_start = time.perf_counter(), engine.clock()
    answers = engine.run(feeds, names, options)
    own_s = engine.clock() - own_start
    return answers, (time.perf_counter() - start, own_s)


def _is_worth_another(times: Sequence[float], runs: int, budget_s: float) -> bool:
    """Whether one more run makes the figures surer, within the budget."""
    spent_s = sum(times)
    return spent_s < budget_s and (len(times) < 4 * runs or (spent_s < _LEAST_S and len(times) < _MOST_RUNS))


def input_candidates(engine: Engine, work: Work) -> Iterator[Callable[[], dict[str, Array]]]:
    """Inputs for the warm-up, the likeliest first.

    First what the graph's constraints imply, with all other integers 1, so that nothing divides by zero, or 0 (an index
    into a table of one row). Then all integers 1, or 0.
    """
    for operands in (work.operands, {}) if work.operands else ({},):
        for integer in (1, 0):
            yield partial(generate_inputs, engine.inputs, work.shapes, integer, operands)


def _to_value(array: Array) -> ort.OrtValue:
    if is_bfloat16(array.dtype):
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(array).view(np.uint16), _BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def _from_value(value: ort.OrtValue) -> Array:
    if value.element_type() != _BFLOAT16:
        found: Array = value.numpy()
        return found
    shape = value.shape()
    size = math.prod(shape) * 2
    data = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(data, dtype=bfloat16()).reshape(shape)


def _load_refusal(error: Exception) -> Refusal:
    """Errors that depend only on the model and the runtime get their own codes, because they recur at every attempt."""
    if (short := memory_refusal(error)) is not None:
        return short
    text = " ".join(str(error).split())
    if found := _TOO_NEW_IR.search(text):
        had, most = found.groups()
        return Refusal(Code.IR_UNSUPPORTED, f"IR version {had}", f"at most {most}: {RUNTIME_VERSION}", _EXPORT_OLDER)
    if found := _TOO_NEW_OPSET.search(text):
        had, domain, most = found.groups()
        return Refusal(
            Code.OPSET_UNSUPPORTED, f"opset {had} of {domain}", f"at most {most}: {RUNTIME_VERSION}", _EXPORT_OLDER
        )
    if found := _NO_KERNEL.search(text):
        return Refusal(
            Code.OP_UNSUPPORTED,
            f"no kernel for {found[1]} as it is used",
            f"one in {RUNTIME_VERSION}",
            _EXPORT_OTHERWISE,
        )
    if found := _OPEN_SHAPE.search(text):
        return Refusal(
            Code.SHAPES_OPEN,
            f"the shape of {found[1]:.120} is open",
            "fixed shapes on this device",
            "say the inputs' shapes: spec.model.shapes",
        )
    inside = "Exception during initialization" in text and "core/providers/cpu/" in text
    if isinstance(error, InvalidGraph | NotImplemented_) or inside or _GRAPH_ERROR.search(text):
        return Refusal(
            Code.OP_UNSUPPORTED, _runtime_reason(text), f"what {RUNTIME_VERSION} computes", _EXPORT_OTHERWISE
        )
    return Refusal(
        Code.LOAD_FAILED, brief_error(error), "a model that this runtime runs", "check it with `shoal model inspect`"
    )


def _runtime_reason(text: str) -> str:
    """The runtime's message without its status, file, line and signature."""
    return _SOURCE_LINE.sub("", _STATUS.sub("", text))[:300]
