"""System shared memory of one front: who may use it, and for what.

It belongs to the front that a client calls: another front, to which the request is forwarded, gets bytes.
"""

from typing import Final

from shoal.agent.core.shared_memory import SharedRegion, shm_refusal
from shoal.agent.dataplane.auth import Caller
from shoal.agent.dataplane.memory import MessageMemory
from shoal.agent.dataplane.shared_regions import SharedRegions
from shoal.agent.dataplane.shared_tensors import SharedTensors
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import ShoalError
from shoal.types.device import Role

CLIENT_ROLES: Final = frozenset({Role.TENANT, Role.OPERATOR})


class SharedMemory:
    """`memory` is charged with what requests bring from it. By default nobody may use any."""

    def __init__(self, regions: SharedRegions | None = None, memory: MessageMemory | None = None) -> None:
        self._regions = regions or SharedRegions()
        self._memory = memory or MessageMemory()

    def is_allowed(self, caller: Caller) -> bool:
        return self._regions.is_allowed(caller.tenant)

    def status(self, caller: Caller, name: str) -> oip.SystemSharedMemoryStatusResponse:
        """Of one region, or of all of the caller's tenant. Raises ShoalError(SHM_DENIED | NOT_FOUND)."""
        self.check(caller)
        found = (self._regions.find(caller.tenant, name).region,) if name else self._regions.of(caller.tenant)
        said = oip.SystemSharedMemoryStatusResponse()
        for each in found:
            shown = said.regions[each.name]
            shown.name, shown.key, shown.offset, shown.byte_size = each.name, each.key, each.offset, each.size
        return said

    def register(self, caller: Caller, asked: oip.SystemSharedMemoryRegisterRequest) -> None:
        """Raises ShoalError(SHM_DENIED | CONFLICT | INVALID_ARGUMENT)."""
        self.check(caller)
        self._regions.register(caller.tenant, SharedRegion(asked.name, asked.key, asked.offset, asked.byte_size))

    def unregister(self, caller: Caller, name: str) -> None:
        """Raises ShoalError(SHM_DENIED)."""
        self.check(caller)
        self._regions.unregister(caller.tenant, name)

    def tensors(self, tenant: str) -> SharedTensors:
        """For one request of a caller that `check` accepts."""
        return SharedTensors(self._regions, self._memory, tenant)

    def check(self, caller: Caller) -> None:
        """Raises ShoalError(SHM_DENIED)."""
        if caller.hop or caller.region or caller.role not in CLIENT_ROLES:
            found, asked = "shared memory in a call of another front", "the bytes: that memory is of another machine"
            raise ShoalError(shm_refusal(found, asked, "send the bytes"))
        if not self._regions.is_allowed(caller.tenant):
            asked = "a tenant that the front's operator allows it"
            remedy = "send tensors in the request, or: shoal-agent run --shared-memory TENANT=PREFIX"
            raise ShoalError(shm_refusal("shared memory of this tenant at this front", asked, remedy))
