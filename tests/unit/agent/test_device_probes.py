"""Which devices a node probes as it starts."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from harness.builders.agent_values import CPU, GPU, receipt
from harness.fakes.log import RecordingLog
from shoal.agent.clock import SystemClock
from shoal.agent.supervisor.device_probes import DeviceProbes
from shoal.agent.supervisor.settings import SupervisorSettings
from shoal.types.codes import Code, refuse
from shoal.types.device import Node
from shoal.types.receipt import Receipt, SignedReceipt
from shoal.types.units import Bytes

ENDS_S = 10.0


def probes_after(*earlier: SignedReceipt) -> DeviceProbes:
    """Of a node that has these receipts of an earlier run."""

    async def load_receipts() -> tuple[SignedReceipt, ...]:
        return earlier

    ports: Any = SimpleNamespace(
        workers=None, journal=SimpleNamespace(load_receipts=load_receipts), signer=None, clock=None, log=None
    )
    unused = cast("Any", None)
    made = DeviceProbes(
        unused, ports, unused, is_any_starting=lambda: False, report_event=unused, on_receipt=lambda: None
    )
    asyncio.run(made.load())
    return made


def test_a_receipt_of_an_older_agent_holds_until_it_is_completed_once() -> None:
    newer = receipt(GPU)
    newer = replace(newer, receipt=replace(newer.receipt, provider_bytes=Bytes(1)))
    older, node = receipt(CPU), cast("Node", SimpleNamespace(name="edge-1", devices=(CPU, GPU)))
    probes = probes_after(older, newer)
    probes.on_devices_found(node)
    assert probes.receipts == (older, newer), "it still tells what the device can do"
    assert (probes.is_due(CPU.name), probes.is_due(GPU.name)) == (True, False)
    probes._pending.clear()  # it was probed, and the provider takes nothing that can be measured
    probes.on_devices_found(node)
    assert not probes.is_due(CPU.name)


def test_a_device_that_comes_later_has_its_receipt_completed_too() -> None:
    probes = probes_after(receipt(CPU), receipt(GPU))
    for devices, due in (((), ()), ((CPU,), (CPU,)), ((CPU, GPU), (GPU,))):
        probes.on_devices_found(cast("Node", SimpleNamespace(name="edge-1", devices=devices)))
        assert [each for each in (CPU, GPU) if probes.is_due(each.name)] == list(due)
        probes._pending.clear()


async def test_on_a_full_disk_what_loads_have_shown_counts_all_the_same() -> None:
    """The supervisor would end with what it waits for."""
    told = asyncio.Event()
    log = RecordingLog()

    async def save_receipts(_: tuple[SignedReceipt, ...]) -> None:
        raise refuse(Code.DISK_FULL)

    async def sign_receipts(receipts: list[Receipt]) -> tuple[SignedReceipt, ...]:
        return tuple(replace(receipt(GPU), receipt=each) for each in receipts)

    ports: Any = SimpleNamespace(
        workers=None,
        journal=SimpleNamespace(save_receipts=save_receipts),
        signer=SimpleNamespace(sign_receipts=sign_receipts),
        clock=SystemClock(),
        log=log,
    )
    unused = cast("Any", None)
    probes = DeviceProbes(
        SupervisorSettings(), ports, unused, is_any_starting=lambda: False, report_event=unused, on_receipt=told.set
    )
    probes.receipts = (receipt(GPU),)
    probes.on_operators(GPU.name, ("Conv",))
    probing = asyncio.create_task(probes.probe_forever())
    try:
        await asyncio.wait_for(told.wait(), ENDS_S)
    finally:
        probing.cancel()
    assert "Conv" in probes.receipts[0].receipt.operators
    assert log.events == ["receipts_not_saved"]
