"""Capability receipts: which still hold, and what must be measured."""

from shoal.types.codes import Code, Refusal
from shoal.types.device import Device
from shoal.types.receipt import MAX_SPREAD, Receipt, SignedReceipt


def unsteady(receipt: Receipt) -> Refusal | None:
    """Why it is to be measured again, at a quieter moment: no coordinator would take it."""
    if receipt.spread <= MAX_SPREAD:
        return None
    found = f"{receipt.device}: times that differ by {receipt.spread:.3g} of their median"
    return Refusal(Code.RECEIPT_ABSURD, found, f"at most {MAX_SPREAD:g}", "it is measured again")


def holds(receipt: Receipt, device: Device) -> bool:
    """A receipt is valid for (device, provider, driver version, runtime version); a change of any voids it."""
    return unsteady(receipt) is None and (
        receipt.device,
        receipt.provider,
        receipt.driver_version,
        receipt.runtime_version,
        receipt.emulated,
    ) == (device.name, device.provider, device.driver_version, device.runtime_version, device.emulated)


def valid(receipts: tuple[SignedReceipt, ...], devices: tuple[Device, ...]) -> tuple[SignedReceipt, ...]:
    """The newest receipt of each device that still holds, in the devices' order."""
    newest: dict[str, SignedReceipt] = {}
    for signed in sorted(receipts, key=lambda each: each.receipt.measured_at):
        newest[signed.receipt.device] = signed
    return tuple(
        newest[device.name]
        for device in devices
        if device.name in newest and holds(newest[device.name].receipt, device)
    )


def to_probe(receipts: tuple[SignedReceipt, ...], devices: tuple[Device, ...]) -> tuple[Device, ...]:
    measured = {signed.receipt.device for signed in valid(receipts, devices)}
    return tuple(device for device in devices if device.name not in measured)


def with_new(receipts: tuple[SignedReceipt, ...], measured: SignedReceipt) -> tuple[SignedReceipt, ...]:
    """`measured` in place of the device's earlier receipt."""
    return (*(each for each in receipts if each.receipt.device != measured.receipt.device), measured)
