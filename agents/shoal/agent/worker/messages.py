"""Messages between supervisor and worker as values. In a frame's payload they are JSON (`shoal.agent.packing`)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from shoal.agent.driver_port import DeviceAccess
from shoal.agent.ports import NO_BATCHES, Batches, PreparedModel
from shoal.types.assignment import Batching, Comparison, Measured, Served, Work
from shoal.types.codes import Refusal
from shoal.types.latency import Counts
from shoal.types.profile import TensorSpec
from shoal.types.receipt import Rates, RuntimeSupport
from shoal.types.units import Bytes, Seconds

SLOTS: Final = "slots"
"""Folder in the run folder for the slot locks of emulated devices: the only place that a worker may write to."""


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
    # Bytes that this assignment adds to the worker's memory limit, beyond the idle worker and what the provider maps
    # for itself (`access.host_bytes`). 0: no limit.
    memory_bytes: int
    # Maximum bytes of one request's expanded tensors.
    max_request_bytes: int
    # Maximum seconds of the warm-up.
    warm_up_s: float
    # Work of one inference at batch 1, from the model's profile.
    work: Work
    # Number of the model's weights, about.
    weights: float
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
    # By input name: the only shapes that are served; -1 for an axis that stays open. Empty: what the graph takes.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # Share of its FLOPs that may run beside the provider. None: not one node may.
    partial: float | None = None
    # What this node made of the model, and loads in its place. None: the model is loaded as it was pushed.
    prepared: PreparedModel | None = None
    # How its answers are compared with the processor's before it is ready. None: they are not.
    comparison: Comparison | None = None
    # Precision in which the device computes a model of this one. Empty: in that one.
    arithmetic: str = ""
    # How its requests may run in batches. None: each runs alone.
    batching: Batching | None = None


def process_memory_bytes(models: Collection[int], host_bytes: int) -> int:
    """Bytes that a worker may map beyond an idle one: for its models the sum of what each may take, and `host_bytes`
    for their provider, once for them all. 0: no limit, as one of them has none."""
    return host_bytes + sum(models) if all(models) else 0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A model that is loaded and, unless `unwarmed` says otherwise, warm."""

    # What loading and warming up cost on this device.
    measured: Measured
    # Inputs of the graph; -1 for a dynamic axis.
    inputs: tuple[TensorSpec, ...]
    # Outputs of the graph; -1 for a dynamic axis.
    outputs: tuple[TensorSpec, ...]
    # What people are to know of it: that it had no warm-up and why, that part of it runs beside its device, whether it
    # runs requests in batches.
    note: str = ""
    # Operators that the device's provider took. Empty for the processor's own.
    operators: tuple[str, ...] = ()
    # Seconds of this machine that a run of the warm-up took (p95). 0 without a warm-up.
    run_s: Seconds = Seconds(0.0)


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
    # The provider takes only graphs whose shapes are all fixed.
    fixed_shapes: bool = False
    # Intra-op threads of one run, as of the models that will be loaded.
    threads: int = 1


@dataclass(frozen=True, slots=True)
class ProviderMemory:
    """What a provider takes in a worker for itself: its libraries and the runtime's, a device's context. A further
    model in the worker takes none of it."""

    # Of the device where it tells a process's share, otherwise of the host, as a load's memory is counted. 0: unknown.
    device_bytes: Bytes
    # Of the host. 0: unknown.
    host_bytes: Bytes


UNKNOWN_MEMORY: Final = ProviderMemory(Bytes(0), Bytes(0))


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe measured."""

    # Rates of the device; NaN for what was not measured.
    rates: Rates
    # Precisions whose matrix product runs on the provider.
    precisions: tuple[str, ...]
    # Operators that the provider took of the probe's graphs. Empty for the processor's own provider, which takes all
    # that the runtime has.
    operators: tuple[str, ...]
    # Relative half-width of the measured times: the widest of the fp32 rates. 0 for an emulated device.
    spread: float
    # Seconds that the probe took. 0 for an emulated device.
    probe_s: float
    # What the runtime can load. None if no worker answered.
    runtime: RuntimeSupport | None = None
    # What the provider takes for itself. Unknown of an emulated device that is no simulator.
    provider_memory: ProviderMemory = UNKNOWN_MEMORY


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
    # Batch sizes of the answered runs.
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
