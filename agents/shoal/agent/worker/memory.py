"""What a load adds to the memory of its device: a process's share of it, where the device has its own and tells."""

import pkgutil
from collections.abc import Callable

import structlog

from shoal.agent.driver_port import DeviceAccess
from shoal.agent.worker import isolation
from shoal.agent.worker.messages import ProviderMemory
from shoal.types.units import Bytes

_log = structlog.get_logger(__name__)


class MemoryGrowth:
    """Counts from its construction on, the device's context with it. Without a counter of the device, or where that
    does not know this process, it is the resident memory of the process."""

    def __init__(self, access: DeviceAccess) -> None:
        isolation.reset_peak()
        self._resident = isolation.resident_bytes()
        self._count = _open_counter(access)
        self._before = self._count() or 0

    def bytes(self) -> Bytes:
        held = self._count()
        if held is not None:
            return Bytes(max(0, held - self._before))
        return self.host_bytes()

    def host_bytes(self) -> Bytes:
        """At the peak since then, in the memory of the host."""
        return Bytes(max(0, isolation.peak_resident_bytes() - self._resident))


def measure_provider_memory(access: DeviceAccess, open_models: Callable[[], object]) -> ProviderMemory:
    """By how much the first of two equal loads exceeds the second: that takes what its models do, and nothing else.

    Of a process that has opened no session on the device. open_models: opens and runs them, and returns what keeps them
    open."""
    kept, grown = list[object](), list[ProviderMemory]()
    for _ in range(2):
        growth = MemoryGrowth(access)
        kept.append(open_models())
        grown.append(ProviderMemory(growth.bytes(), growth.host_bytes()))
    first, second = grown
    return ProviderMemory(
        Bytes(max(0, first.device_bytes - second.device_bytes)), Bytes(max(0, first.host_bytes - second.host_bytes))
    )


def _open_counter(access: DeviceAccess) -> Callable[[], int | None]:
    if access.memory_counter is None:
        return lambda: None
    try:
        counter: Callable[[], int | None] = pkgutil.resolve_name(access.memory_counter.opener)(
            *access.memory_counter.arguments
        )
    except OSError as error:
        _log.warning("memory_count_failed", error=str(error))
        return lambda: None
    return counter
