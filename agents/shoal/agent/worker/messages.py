"""What supervisor and worker say to each other, as values, and their JSON form for a frame's payload."""

import base64
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from functools import cache
from typing import Any, Final, TypeVar

from shoal.agent.ports import NO_BATCHES, Batches, Pace
from shoal.types.assignment import Measured, Served, Work
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.latency import Counts
from shoal.types.profile import TensorSpec
from shoal.types.receipt import Rates

SLOTS: Final = "slots"
"""Folder in the run folder for the locks of emulated devices: all that a worker may write."""

T = TypeVar("T")


class State(StrEnum):
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Meters:
    """Where joules are counted: RAPL counter files, an NVIDIA device's uuid, or neither (then they are estimated)."""

    rapl: tuple[str, ...] = ()
    nvml: str = ""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """One assignment for one worker.

    shared_by: the tenant whose other models the worker may hold beside this one; empty for a worker of its own.
    digest: `sha256:<hex>` that the bytes at `path` must have. threads: of one run; runners: runs at once. queue: how
    many requests may wait or run. memory_bytes: what it adds to what may be taken
    beyond the idle worker; 0 for no limit. warm_up_s:
    how long the warm-up may take. pace: of an emulated device, whose runs take turns by the locks `slots`.
    """

    assignment: str
    shared_by: str
    digest: str
    path: str
    provider: str
    precision: str
    threads: int
    runners: int
    queue: int
    memory_bytes: int
    max_request_bytes: int
    warm_up_s: float
    work: Work
    pace: Pace | None
    slots: tuple[str, ...]
    meters: Meters
    visible: str = ""
    """The uuid of the one NVIDIA device, or MIG instance, that the process may see; empty: a device of another kind."""


@dataclass(frozen=True, slots=True)
class Loaded:
    measured: Measured
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """budget_s: the probe's whole time."""

    provider: str
    meters: Meters
    cores: int
    budget_s: float
    visible: str = ""
    """As in LoadOrder."""


@dataclass(frozen=True, slots=True)
class Probed:
    rates: Rates
    precisions: tuple[str, ...]
    operators: tuple[str, ...]
    spread: float
    probe_s: float


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One assignment in its worker as it is now. in_flight: requests waiting or running."""

    state: State
    assignment: str
    in_flight: int
    served: tuple[Served, ...]
    loaded: Loaded | None
    refusal: Refusal | None
    batches: Batches = NO_BATCHES
    latencies: Counts = ()


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """All that a worker holds; nothing: it is a spare. measuring: its device, and nothing ends that but its end."""

    held: tuple[WorkerStatus, ...]
    measuring: bool = False


def pack(noun: Any) -> bytes:
    """A frozen dataclass as JSON; NaN stays NaN (both ends are Python's json), bytes are base64."""
    return json.dumps(asdict(noun), separators=(",", ":"), default=_text).encode()


def _text(value: object) -> str:
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} has no JSON form")
    return base64.b64encode(value).decode()


def unpack(kind: type[T], payload: bytes) -> T:
    """The inverse of `pack`, checked; what an older program does not say yet is as by default.

    Raises ShoalError(MESSAGE_INVALID)."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise _invalid(kind, error) from error
    return from_json(kind, value)


def from_json(kind: type[T], value: Any) -> T:
    """JSON values as a frozen dataclass, checked. Raises ShoalError(MESSAGE_INVALID)."""
    try:
        return typing.cast(T, _read(kind, value))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _invalid(kind, error) from error


def _invalid(kind: type[Any], error: Exception) -> ShoalError:
    found = f"{type(error).__name__}: {error}"
    return refuse(Code.MESSAGE_INVALID, found, f"a {kind.__name__}", "run one version of the agent")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Put together once: of reading an idle worker's report, each second, they were two thirds."""
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
        value.encode()  # half a surrogate pair is no text
    return value
