"""What a worker is asked to load, how much memory that may take, and which assignments may share a worker."""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from shoal.agent.core.admission import is_shared_alike
from shoal.agent.driver_port import DeviceAccess
from shoal.agent.ports import PreparedModel
from shoal.agent.worker.messages import LoadOrder, process_memory_bytes
from shoal.agent.worker.pace import weights_of
from shoal.agent.worker.pool_options import PoolOptions
from shoal.types.assignment import Assignment, Comparison
from shoal.types.codes import Code, refuse
from shoal.types.device import Device
from shoal.types.migration import Against
from shoal.types.units import Bytes


class LoadOrders:
    """Makes the orders of one node.

    `slots` is the folder of the locks that the workers of an emulated device share. `device` and `access` return what
    the drivers know of a device, by its name.
    """

    def __init__(
        self,
        slots: Path,
        device: Callable[[str], Device | None],
        access: Callable[[str], DeviceAccess],
        options: PoolOptions,
    ) -> None:
        self._slots = slots
        self._device = device
        self._access = access
        self._options = options

    def order(
        self, assignment: Assignment, path: str, samples: str, prepared: PreparedModel | None = None
    ) -> LoadOrder:
        """The order to load the model at `path`, or what this node made of it. Raises ShoalError(DEVICE_LOST)."""
        device = self._device(assignment.device)
        if device is None:
            raise refuse(Code.DEVICE_LOST, assignment.device, "a device of this node", "it is placed elsewhere")
        options = self._options
        slots = (str(self._slots / f"{device.name}-{n}.lock") for n in range(device.parallelism))
        return LoadOrder(
            assignment=assignment.id,
            shared_by=assignment.workload.tenant if assignment.shared_worker else "",
            digest=assignment.model,
            path=path,
            provider=device.provider,
            precision=assignment.precision,
            threads=options.threads,
            runners=max(1, device.parallelism),
            queue=options.queue,
            memory_bytes=self._memory_bytes(assignment),
            max_request_bytes=options.max_request_bytes,
            warm_up_s=options.warm_up_s,
            work=assignment.work,
            weights=weights_of(
                assignment.model_bytes, "fp32" if assignment.preparation is not None else assignment.precision
            ),
            access=replace(self._access(device.name), host_bytes=self._host_bytes(assignment)),
            slots=tuple(slots) if device.emulated else (),
            samples=samples,
            samples_digest=assignment.samples,
            warm_up_optional=assignment.warm_up_optional,
            shapes=assignment.shapes,
            partial=assignment.partial,
            prepared=prepared,
            comparison=comparison_at_load(assignment),
            arithmetic=device.arithmetic(assignment.precision),
            batching=assignment.batching,
        )

    def process_memory_bytes(self, assignments: Collection[Assignment]) -> int:
        """Bytes that a process which holds these, all on one device, may map beyond an idle one. 0: no limit."""
        parts = [self._memory_bytes(assignment) for assignment in assignments]
        host = max(map(self._host_bytes, assignments), default=0)
        return process_memory_bytes(parts, host)

    def _host_bytes(self, assignment: Assignment) -> Bytes:
        """Bytes that the provider may map in a worker for itself, however many models it has. What it takes of a
        commitment is told where several may."""
        slack = self._options.memory_slack
        return Bytes(int(self._access(assignment.device).host_bytes + slack * assignment.provider_bytes))

    def _memory_bytes(self, assignment: Assignment) -> int:
        """Bytes that the assignment may add to its worker, without its provider's. 0: no limit. A model whose answers
        are compared at its load is then there twice: on its device and on the processor."""
        options, times = self._options, 1 if comparison_at_load(assignment) is None else 2
        if not assignment.memory_bytes:
            return 0
        own = assignment.memory_bytes - assignment.provider_bytes
        return max(1, int(options.memory_floor + times * options.memory_slack * own))


def comparison_at_load(assignment: Assignment) -> Comparison | None:
    """How a load compares answers with the processor's; None: not at all. A replica that is verified after its load is
    compared then. One that records a reference, or is compared with nothing, is not."""
    verified = assignment.verification
    if verified is not None and verified.recording is None and verified.against is not Against.NONE:
        return None
    return assignment.comparison


def may_share(new: Assignment, held: Collection[Assignment], options: PoolOptions) -> bool:
    """Whether `new` may join the worker that holds `held`. Never if `held` is empty: that worker is released and
    ends."""
    return (
        is_shared_alike(new, held)
        and len(held) < options.max_shared_models
        and sum(one.memory_bytes - one.provider_bytes for one in (new, *held)) <= options.max_shared_bytes
    )
