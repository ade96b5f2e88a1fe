"""Measures a device: in a worker that is ended afterwards, or from the profile of an emulated one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import structlog

from shoal.agent.driver_port import DeviceAccess
from shoal.agent.frames import ConnectionLost
from shoal.agent.packing import pack, unpack
from shoal.agent.ports import AgentClock
from shoal.agent.worker.messages import ProbeOrder, ProbeResult, ProviderMemory
from shoal.agent.worker.pool_options import PoolOptions
from shoal.agent.worker.spare import SpareWorker
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Device
from shoal.types.receipt import Receipt, RuntimeSupport
from shoal.types.units import Seconds

_log = structlog.get_logger(__name__)

SUPPORT_S: Final = 10.0
"""The answer takes 0.1 s on an idle core. A starved machine gets a hundred times that."""


class DeviceProber:
    """Makes the receipts of devices. `access` returns what the drivers know of a device, by its name."""

    def __init__(
        self,
        spare: SpareWorker,
        access: Callable[[str], DeviceAccess],
        clock: AgentClock,
        options: PoolOptions,
    ) -> None:
        self._spare = spare
        self._access = access
        self._clock = clock
        self._options = options
        # What each runtime can load, by runtime version.
        self._support_by_runtime: dict[str, RuntimeSupport] = {}

    async def probe(self, device: Device) -> Receipt:
        """Measure in a worker that is ended afterwards. The receipt of an emulated device is its profile.

        Raises ShoalError(RUNTIME_FAILED | WORKER_CRASHED | DEADLINE_EXCEEDED | DEVICE_LOST).
        """
        measured_at = self._clock.wall()
        probed = await self._probe_emulated(device) if device.emulated else await self._probe_device(device)
        return Receipt(
            node="",
            device=device.name,
            provider=device.provider,
            driver_version=device.driver_version,
            runtime_version=device.runtime_version,
            precisions=probed.precisions,
            operators=probed.operators,
            rates=probed.rates,
            memory_bytes=device.memory_bytes,
            spread=probed.spread,
            measured_at=measured_at,
            probe_s=Seconds(probed.probe_s),
            emulated=device.emulated,
            source=device.profile_source if device.emulated else "probe",
            system=pace.system if (pace := self._access(device.name).pace) is not None else "",
            runtime=_support_on(device, probed.runtime),
            provider_bytes=probed.provider_memory.device_bytes,
            provider_host_bytes=probed.provider_memory.host_bytes,
        )

    async def _probe_emulated(self, device: Device) -> ProbeResult:
        """The figures are the profile's. What the device can load is what this machine's runtime loads."""
        pace = self._access(device.name).pace
        if pace is None:
            raise refuse(
                Code.DEVICE_LOST, f"no profile of {device.name}", "an emulated device", "see the agent's settings"
            )
        runtime = await self._runtime_support(device)
        found = ProbeResult(pace.rates, tuple(pace.rates.matmul_flops), (), 0.0, 0.0, runtime)
        if not pace.simulated:
            return found
        # A simulator takes memory of its own, whatever the device's figures are.
        return replace(found, provider_memory=unpack(ProviderMemory, await self._ask(device, "probe_memory")))

    async def _runtime_support(self, device: Device) -> RuntimeSupport | None:
        """Asked once per runtime version. None if no worker answers; then support shows only when a model loads."""
        if device.runtime_version not in self._support_by_runtime:
            try:
                process = await self._spare.take()
            except ShoalError as error:
                _log.warning("runtime_query_failed", code=error.code, error=str(error))
                return None
            try:
                assert process.client is not None
                reply = await process.client.call("support", timeout=SUPPORT_S)
                self._support_by_runtime[device.runtime_version] = unpack(RuntimeSupport, reply.payload)
            except ShoalError as error:
                _log.warning("runtime_query_failed", code=error.code, error=str(error))
                return None
            finally:
                if not (self._options.keep_spare and self._spare.offer(process)):
                    await process.end()
        return self._support_by_runtime[device.runtime_version]

    async def _probe_device(self, device: Device) -> ProbeResult:
        return unpack(ProbeResult, await self._ask(device, "probe"))

    async def _ask(self, device: Device, kind: str) -> bytes:
        """The answer of a worker that is ended afterwards, to a frame of this kind."""
        process = await self._spare.take()
        try:
            order = ProbeOrder(
                device.provider,
                self._access(device.name),
                device.parallelism,
                self._options.probe_s,
                fixed_shapes=device.fixed_shapes,
                threads=self._options.threads,
            )
            reply = await process.call(kind, 3 * self._options.probe_s, pack(order))
            return reply.payload
        except ConnectionLost as error:
            raise refuse(
                Code.WORKER_CRASHED, "the worker ended while probing", device.name, "check the device's driver"
            ) from error
        finally:
            await process.end()
            self._spare.replenish()


def _support_on(device: Device, runtime: RuntimeSupport | None) -> RuntimeSupport | None:
    """Without the precision that the device's provider makes of models in fp32 by itself."""
    if runtime is None:
        return None
    return replace(runtime, prepares=tuple(each for each in runtime.prepares if each != device.computes_fp32_in))
