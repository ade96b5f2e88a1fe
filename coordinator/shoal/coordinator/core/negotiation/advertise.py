"""A region's advertised capacity: its free devices summed by kind, without node names."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.core.fleet.commitments import NO_COMMITMENT, admissible_bytes, commitments
from shoal.coordinator.core.fleet.state import Liveness, NodeState
from shoal.coordinator.core.placement.model import Inputs, Slot
from shoal.types.device import Device
from shoal.types.offer import CapacityClass
from shoal.types.receipt import Receipt
from shoal.types.units import Bytes, UsdPerHour, Wall

FRESH_S: Final = 30 * 86400.0
"""An older receipt counts as declared, not measured."""
CLASSES_MOST: Final = 64
_OTHER: Final = re.compile(r"[^A-Za-z0-9 ._:@()+/-]+")


@dataclass(frozen=True, slots=True)
class _FreeDevice:
    device: Device
    bytes: int
    cost: UsdPerHour | None
    receipt: Receipt | None


def capacity_classes(inputs: Inputs) -> tuple[CapacityClass, ...]:
    """Free capacity by device class and runtime, without what is committed, held for a bid, cordoned, silent or
    quarantined.

    The largest `CLASSES_MOST` if there are more.
    """
    kinds = dict[tuple[str, str], list[_FreeDevice]]()
    for each in _free(inputs):
        kinds.setdefault((_class_of(each.device), each.device.provider), []).append(each)
    found = [_capacity_class(*kind, free, inputs) for kind, free in sorted(kinds.items())]
    found.sort(key=lambda each: -each.free_bytes)
    return tuple(sorted(found[:CLASSES_MOST], key=lambda each: (each.device_class, each.runtime)))


def _free(inputs: Inputs) -> Iterator[_FreeDevice]:
    books = commitments(inputs.fleet, inputs.desired)
    held = dict[Slot, int]()
    for reservation in inputs.reserved:
        held[reservation.slot] = held.get(reservation.slot, 0) + reservation.memory_bytes
    for name, state in sorted(inputs.fleet.nodes.items()):
        if not _is_open(state):
            continue
        for device in state.node.devices:
            if device.hardware:
                continue  # its memory is that device's
            slot, book = Slot(name, device.name), NO_COMMITMENT
            for each in state.same_memory(device):
                promised = Bytes(held.get(Slot(name, each), 0))
                book = book.beside(books.get((name, each), NO_COMMITMENT)).plus(promised, loaded=False)
            free = admissible_bytes(device, state, book)
            if free > 0:
                yield _FreeDevice(device, free, inputs.costs.get(slot), state.receipts.get(device.name))


def _is_open(state: NodeState) -> bool:
    return state.liveness is Liveness.READY and not (state.cordoned or state.quarantined or state.revoked)


def _class_of(device: Device) -> str:
    """Kind and model; devices that are not real are marked."""
    words = f"{device.kind} {device.profile or device.model}" + (f" ({device.stand_in})" if device.stand_in else "")
    return _OTHER.sub("-", words)[:80]


def _capacity_class(kind: str, runtime: str, free: list[_FreeDevice], inputs: Inputs) -> CapacityClass:
    """Prices and joules are means over the devices that have them; unknown if none has."""
    receipts = [each.receipt for each in free if each.receipt is not None]
    costs = [each.cost for each in free if each.cost is not None and not math.isnan(each.cost)]
    joules = [found for receipt in receipts if not math.isnan(found := _joules_per_tflop(receipt))]
    sure = sum(1 for receipt in receipts if _is_measured(receipt, inputs.wall))
    return CapacityClass(
        device_class=kind,
        runtime=_OTHER.sub("-", runtime)[:80],
        precisions=tuple(sorted({precision for receipt in receipts for precision in receipt.precisions}))[:16],
        devices=len(free),
        free_bytes=Bytes(sum(each.bytes for each in free)),
        cost_usd_per_h=UsdPerHour(sum(costs) / len(costs) if costs else math.nan),
        joules_per_tflop=sum(joules) / len(joules) if joules else math.nan,
        carbon_g_per_kwh=inputs.region.carbon_g_per_kwh,
        confidence=sure / len(free),
    )


def _joules_per_tflop(receipt: Receipt) -> float:
    """In the device's most efficient precision."""
    fastest = max(receipt.rates.matmul_flops.values(), default=math.nan)
    return float(receipt.rates.active_w / fastest * 1e12) if fastest > 0 else math.nan


def _is_measured(receipt: Receipt, wall: Wall) -> bool:
    return receipt.source == "probe" and wall - receipt.measured_at < FRESH_S
