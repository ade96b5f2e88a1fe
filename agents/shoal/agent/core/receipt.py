"""Capability receipts: which are valid, and which devices must be measured."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from shoal.types.codes import Code, Refusal
from shoal.types.device import Device
from shoal.types.receipt import MAX_SPREAD, Receipt, SignedReceipt
from shoal.types.units import show_number

MAX_OPERATORS: Final = 512
"""Operators in one receipt. ONNX defines some 200, and a tenant's model may name any other."""


def check_spread(receipt: Receipt) -> Refusal | None:
    """Return why the receipt must be measured again at a quieter moment, or None. No coordinator accepts a larger
    spread."""
    if receipt.spread <= MAX_SPREAD:
        return None
    found = f"{receipt.device}: times that differ by {show_number(receipt.spread)} of their median"
    return Refusal(Code.RECEIPT_ABSURD, found, f"at most {MAX_SPREAD:g}", "it is measured again")


def is_valid(receipt: Receipt, device: Device) -> bool:
    """Whether the receipt holds for the device as it is.

    A receipt is valid for one (device, provider, driver version, runtime version); a change of any voids it.
    """
    return check_spread(receipt) is None and (
        receipt.device,
        receipt.provider,
        receipt.driver_version,
        receipt.runtime_version,
        receipt.emulated,
    ) == (device.name, device.provider, device.driver_version, device.runtime_version, device.emulated)


def valid_receipts(receipts: tuple[SignedReceipt, ...], devices: tuple[Device, ...]) -> tuple[SignedReceipt, ...]:
    """The newest valid receipt of each device, in the devices' order."""
    newest: dict[str, SignedReceipt] = {}
    for signed in sorted(receipts, key=lambda each: each.receipt.measured_at):
        newest[signed.receipt.device] = signed
    return tuple(
        newest[device.name]
        for device in devices
        if device.name in newest and is_valid(newest[device.name].receipt, device)
    )


def devices_to_probe(receipts: tuple[SignedReceipt, ...], devices: tuple[Device, ...]) -> tuple[Device, ...]:
    measured = {signed.receipt.device for signed in valid_receipts(receipts, devices)}
    return tuple(device for device in devices if device.name not in measured)


def devices_to_probe_again(receipts: tuple[SignedReceipt, ...], devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Those whose valid receipt does not say what the provider takes, as none of an older agent does. Of an emulated
    device that is no simulator there is nothing to say."""
    unknown = {
        signed.receipt.device
        for signed in valid_receipts(receipts, devices)
        if signed.receipt.provider_bytes == 0 and signed.receipt.provider_host_bytes == 0
    }
    return tuple(device for device in devices if device.name in unknown and (device.simulated or not device.emulated))


def with_receipt(receipts: tuple[SignedReceipt, ...], measured: SignedReceipt) -> tuple[SignedReceipt, ...]:
    """`receipts` with `measured` in place of the device's earlier receipt."""
    return (*(each for each in receipts if each.receipt.device != measured.receipt.device), measured)


def with_operators(receipt: Receipt, taken: Iterable[str]) -> Receipt:
    """The receipt with these operators among those that the provider was seen to take."""
    known = sorted({*receipt.operators, *taken})
    return replace(receipt, operators=tuple(known[:MAX_OPERATORS]))
