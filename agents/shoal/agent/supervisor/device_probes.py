"""The capability receipts of this node: which devices are to be measured, and when."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

from shoal.agent.core import receipt as receipts
from shoal.agent.supervisor.node_monitor import EventReporter, NodeMonitor
from shoal.agent.supervisor.settings import SupervisorSettings
from shoal.agent.supervisor.supervisor_ports import SupervisorPorts
from shoal.host.event_wait import wait_or_timeout
from shoal.types.backoff import delay
from shoal.types.codes import ShoalError
from shoal.types.device import Device, Node
from shoal.types.receipt import Receipt, SignedReceipt
from shoal.types.units import Elapsed, Seconds


class DeviceProbes:
    """Measures one device at a time, and keeps the signed receipts.

    `is_any_starting` says whether a replica starts: a probe waits for that. `on_receipt` is called after each new
    receipt.
    """

    def __init__(
        self,
        settings: SupervisorSettings,
        ports: SupervisorPorts,
        monitor: NodeMonitor,
        *,
        is_any_starting: Callable[[], bool],
        report_event: EventReporter,
        on_receipt: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._workers = ports.workers
        self._journal = ports.journal
        self._signer = ports.signer
        self._clock = ports.clock
        self._log = ports.log
        self._monitor = monitor
        self._is_any_starting = is_any_starting
        self._report_event = report_event
        self._on_receipt = on_receipt
        self._node = ""
        self._devices: dict[str, Device] = {}
        self._pending: dict[str, Device] = {}
        # The device that is being probed, or woken for a probe. Empty: none.
        self._current = ""
        self._due = asyncio.Event()
        # Devices whose probe failed: how often in a row, and when it may be tried again.
        self._attempts: dict[str, int] = {}
        self._retry_at: dict[str, Elapsed] = {}
        # Devices of this run. Whether a receipt of an earlier run is to be completed is asked once for each.
        self._seen: set[str] = set()
        # By device: operators that loads have shown since the receipts were written.
        self._operators: dict[str, set[str]] = {}
        # Of an earlier run.
        self._earlier: tuple[SignedReceipt, ...] = ()
        self.receipts: tuple[SignedReceipt, ...] = ()

    async def load(self) -> None:
        """Read the receipts of an earlier run. Call once, before the first devices are told."""
        self._earlier = await self._journal.load_receipts()

    def on_devices_found(self, node: Node) -> None:
        """These are the node's devices from now on. Those without a valid receipt are probed."""
        self._node = node.name
        self._devices = {device.name: device for device in node.devices}
        known = {each.receipt.device for each in self.receipts}
        earlier = (each for each in self._earlier if each.receipt.device not in known)
        self.receipts = receipts.valid_receipts((*earlier, *self.receipts), node.devices)
        self.request(device.name for device in receipts.devices_to_probe(self.receipts, node.devices))
        incomplete = {device.name for device in receipts.devices_to_probe_again(self.receipts, node.devices)}
        self.request(sorted(incomplete - self._seen - self._pending.keys()))
        self._seen |= self._devices.keys()

    def request(self, devices: Iterable[str]) -> None:
        """Probe these devices soon, also where that failed lately. Names that this node does not have are ignored."""
        for name in devices:
            if name in self._devices:
                self._pending[name] = self._devices[name]
                self._retry_at.pop(name, None)
        if self._pending:
            self._due.set()

    def on_operators(self, device: str, taken: Iterable[str]) -> None:
        """A load showed that the device's provider takes these operators."""
        self._operators.setdefault(device, set()).update(taken)
        self._due.set()

    def is_due(self, device: str) -> bool:
        """Whether the device is being probed, or is to be probed."""
        return device in self._pending or device == self._current

    async def probe_forever(self) -> None:
        while True:
            await self._write_operators()
            name = self._next_device()
            if name is None:
                self._due.clear()
                await wait_or_timeout(self._due, self._seconds_to_retry(), self._clock)
                continue
            await self._wait_for_starts()
            device = self._pending.pop(name)
            self._current = name
            while (wakes_in := self._monitor.set_sleep(name, False)) > 0:
                await self._clock.sleep(wakes_in)
            try:
                receipt = replace(await self._workers.probe(device), node=self._node)
                receipt = receipts.with_operators(receipt, self._known_operators(receipt))
                if (refusal := receipts.check_spread(receipt)) is not None:
                    raise ShoalError(refusal)
                (signed,) = await self._signer.sign_receipts((receipt,))
                self._monitor.on_measured(name)
                self.receipts = receipts.with_receipt(self.receipts, signed)
                await self._save()
            except ShoalError as error:
                self._report_event(error.code, name, f"no capability receipt: {error}")
                self._pending[name] = device
                attempt = self._attempts.get(name, 0)
                self._attempts[name] = attempt + 1
                self._retry_at[name] = Elapsed(self._clock.now() + delay(name, attempt, base_s=5.0, cap_s=300.0))
            else:
                self._log.info("device_probed", device=name, duration_s=receipt.probe_s)
                self._attempts.pop(name, None)
                self._on_receipt()
            self._current = ""

    def _known_operators(self, receipt: Receipt) -> tuple[str, ...]:
        """What loads have shown with the same provider and runtime."""
        versions = receipt.provider, receipt.driver_version, receipt.runtime_version
        for signed in self.receipts:
            known = signed.receipt
            if known.device == receipt.device:
                same = (known.provider, known.driver_version, known.runtime_version) == versions
                return known.operators if same else ()
        return ()

    async def _write_operators(self) -> None:
        """Put what loads have shown into the receipts. A device without one waits for it."""
        before = {each.receipt.device: each.receipt for each in self.receipts}
        shown = {device: self._operators.pop(device, set()) for device in before}
        after = (receipts.with_operators(before[device], taken) for device, taken in shown.items())
        changed = [each for each in after if each != before[each.device]]
        if not changed:
            return
        try:
            signed = await self._signer.sign_receipts(changed)
        except ShoalError as error:  # written when something is due the next time
            self._log.warning("receipts_not_signed", code=error.code, error=str(error))
            for device, taken in shown.items():
                self._operators.setdefault(device, set()).update(taken)
            return
        for each in signed:
            if any(known.receipt == before[each.receipt.device] for known in self.receipts):  # not replaced meanwhile
                self.receipts = receipts.with_receipt(self.receipts, each)
        await self._save()
        self._on_receipt()

    async def _save(self) -> None:
        """What is not written is probed again after a restart, no sooner."""
        try:
            await self._journal.save_receipts(self.receipts)
        except ShoalError as error:
            self._log.warning("receipts_not_saved", code=error.code, error=str(error))

    def _next_device(self) -> str | None:
        """The first device to be probed that has not failed lately: one that fails holds up no other."""
        now = self._clock.now()
        return next((name for name in self._pending if self._retry_at.get(name, now) <= now), None)

    def _seconds_to_retry(self) -> Seconds | None:
        """Until the first device that failed is probed again; None if nothing waits for that."""
        left = [self._retry_at[name] - self._clock.now() for name in self._pending]
        return Seconds(max(self._settings.poll_s, min(left))) if left else None

    async def _wait_for_starts(self) -> None:
        until = self._clock.now() + self._settings.probe_wait_s
        while self._is_any_starting() and self._clock.now() < until:
            await self._clock.sleep(Seconds(self._settings.poll_s))
