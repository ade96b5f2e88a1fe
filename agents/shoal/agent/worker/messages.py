"""Messages between supervisor and worker as values, and their JSON form in a frame's payload."""

import base64
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from functools import cache
from typing import Any, Final, TypeVar

from shoal.agent.ports import NO_BATCHES, Batches, DeviceAccess
from shoal.types.assignment import Measured, Served, Work
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.latency import Counts
from shoal.types.profile import TensorSpec
from shoal.types.receipt import Rates, RuntimeSupport

SLOTS: Final = "slots"
"""Folder in the run folder for the slot locks of emulated devices: the only place that a worker may write to."""

T = TypeVar("T")


class LoadState(StrEnum):
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Order to load one assignment in one worker."""

    # Id of the assignment.
    assignment: str
    # Tenant whose other models this worker may hold beside this one. Empty: a worker of its own.
    shared_by: str
    # `sha256:<hex>` that the bytes at `path` must have.
    digest: str
    # Path of the model.
    path: str
    # Execution provider of the runtime, for example `CPUExecutionProvider`.
    provider: str
    # Precision of the model (`fp32`, `fp16`, `int8`, `fp64`); selects the rates of an emulated device.
    precision: str
    # Intra-op threads of one run.
    threads: int
    # Runs at the same time.
    runners: int
    # Maximum of requests that wait or run.
    queue: int
    # Bytes that this assignment adds to the worker's memory limit, beyond the idle worker. 0: no limit.
    memory_bytes: int
    # Maximum bytes of one request's expanded tensors.
    max_request_bytes: int
    # Maximum seconds of the warm-up.
    warm_up_s: float
    # Work of one inference at batch 1, from the model's profile.
    work: Work
    # What it needs to run on the device.
    access: DeviceAccess
    # Paths of lock files, one per run that the emulated device can do at a time. Empty for real hardware.
    slots: tuple[str, ...]
    # Path of inputs for the warm-up. Empty: inputs are generated.
    samples: str = ""
    # Digest that the bytes at `samples` must have. Empty if `samples` is.
    samples_digest: str = ""
    # If no input runs, serve without a warm-up instead of failing.
    warm_up_optional: bool = False


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A model that is loaded and, unless `unwarmed` says otherwise, warm."""

    # What loading and warming up cost on this device.
    measured: Measured
    # Inputs of the graph; -1 for a dynamic axis.
    inputs: tuple[TensorSpec, ...]
    # Outputs of the graph; -1 for a dynamic axis.
    outputs: tuple[TensorSpec, ...]
    # Why the replica serves without a warm-up. Empty: it had one.
    unwarmed: str = ""


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """Order to measure one device."""

    # Execution provider of the runtime.
    provider: str
    # What it needs to run on the device.
    access: DeviceAccess
    # Processors of the device: idle power is measured per core.
    cores: int
    # Maximum seconds of the whole probe.
    budget_s: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe measured."""

    # Rates of the device; NaN for what was not measured.
    rates: Rates
    # Precisions whose matrix product runs on the provider.
    precisions: tuple[str, ...]
    # Operators that were measured on their own. Always empty today.
    operators: tuple[str, ...]
    # Relative half-width of the measured times: the widest of the fp32 rates. 0 for an emulated device.
    spread: float
    # Seconds that the probe took. 0 for an emulated device.
    probe_s: float
    # What the runtime can load. None if no worker answered.
    runtime: RuntimeSupport | None = None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """State of one assignment in its worker."""

    # Progress of loading.
    state: LoadState
    # Id of the assignment.
    assignment: str
    # Requests that wait or run.
    in_flight: int
    # Totals since the replica became ready, one entry per origin of requests.
    served: tuple[Served, ...]
    # None until the replica is ready.
    loaded: LoadResult | None
    # Why loading failed. None if it did not.
    refusal: Refusal | None
    # Batch sizes of the answered requests.
    batches: Batches = NO_BATCHES
    # Histogram of latencies (`types.latency`); () before the first answer.
    latencies: Counts = ()


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Everything that a worker holds."""

    # One entry per assignment. Empty: the worker is a spare.
    held: tuple[WorkerStatus, ...]
    # True while it probes its device. Only the end of the process ends a probe.
    measuring: bool = False


def pack(noun: Any) -> bytes:
    """A frozen dataclass as JSON. NaN stays NaN because both ends use Python's json; bytes become base64."""
    return json.dumps(asdict(noun), separators=(",", ":"), default=_encode_bytes).encode()


def _encode_bytes(value: object) -> str:
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} has no JSON form")
    return base64.b64encode(value).decode()


def unpack(kind: type[T], payload: bytes) -> T:
    """Inverse of `pack`, with checks. A field that an older program does not send gets its default.

    Raises ShoalError(MESSAGE_INVALID).
    """
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise _invalid(kind, error) from error
    return from_json(kind, value)


def from_json(kind: type[T], value: Any) -> T:
    """A frozen dataclass from JSON values, with checks. Raises ShoalError(MESSAGE_INVALID)."""
    try:
        return typing.cast(T, _read(kind, value))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _invalid(kind, error) from error


def _invalid(kind: type[Any], error: Exception) -> ShoalError:
    found = f"{type(error).__name__}: {error}"
    return refuse(Code.MESSAGE_INVALID, found, f"a {kind.__name__}", "run one version of the agent")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Cached, because resolving the hints took two thirds of the time to read an idle worker's report, every second."""
    return typing.get_type_hints(kind)


def _read(kind: Any, value: Any) -> Any:
    while isinstance(kind, typing.NewType):
        kind = kind.__supertype__
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _read(next(part for part in parts if part is not types.NoneType), value)
    if origin is tuple:
        if parts[-1] is not Ellipsis:
            return tuple(_read(part, item) for part, item in zip(parts, value, strict=True))
        return tuple(_read(parts[0], item) for item in value)
    if origin is Mapping:
        return {_read(parts[0], key): _read(parts[1], item) for key, item in value.items()}
    if is_dataclass(kind):
        hints = _hints(typing.cast(Any, kind))
        if not isinstance(value, dict):
            raise TypeError(f"{value!r:.40} is no {kind}")
        said = (field for field in fields(kind) if field.name in value or field.default is MISSING)
        values = {field.name: _read(hints[field.name], value[field.name]) for field in said}
        return typing.cast(Any, kind)(**values)
    if kind is bytes:
        return base64.b64decode(value, validate=True)
    if issubclass(kind, Enum):
        return kind(value)
    if issubclass(kind, tuple):
        hints = _hints(kind)
        return kind(*(_read(hint, item) for hint, item in zip(hints.values(), value, strict=True)))
    if not isinstance(value, (int, float) if kind is float else kind):
        raise TypeError(f"{value!r:.40} is no {kind.__name__}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a number that no message to the region can hold")
    if isinstance(value, str):
        value.encode()  # half a surrogate pair is not text
    return value
