"""What a load adds to the memory of its device: a process's share of it, where the device has its own and tells."""

import pkgutil
from collections.abc import Callable

import structlog

from shoal.agent.driver_port import DeviceAccess
from shoal.agent.worker import isolation
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
        return Bytes(max(0, isolation.peak_resident_bytes() - self._resident))


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
