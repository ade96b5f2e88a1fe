"""What workloads cost as they stand: shares of devices, and bids of other regions."""

import math

from harness.builders.agent_values import assignment
from harness.builders.offers import offer
from shoal.coordinator.core.placement.model import Slot
from shoal.coordinator.core.workloads.model import DelegatedWorkload
from shoal.coordinator.core.workloads.spending import rates
from shoal.types.units import UsdPerHour
from shoal.types.workload import WorkloadKey

OCR, ASR, FAR, ODD = (WorkloadKey("shop", name) for name in ("ocr", "asr", "far", "odd"))


def test_a_device_costs_its_price_once_and_whoever_is_on_it_shares() -> None:
    desired = {
        "edge": (
            assignment("a-1", workload=OCR, device="npu"),
            assignment("a-2", workload=ASR, device="npu"),
            assignment("a-3", workload=OCR, device="npu"),
        ),
        "cloud": (assignment("a-4", workload=ASR, device="gpu"), assignment("a-5", workload=ASR, device="cpu")),
        "idle": (),
    }
    costs = {slot: UsdPerHour(price) for slot, price in ((Slot("edge", "npu"), 0.3), (Slot("cloud", "gpu"), 0.8))}
    costs[Slot("idle", "cpu")] = UsdPerHour(9.0)
    found = rates(desired, costs, {})
    assert {key: round(rate, 9) for key, rate in found.items()} == {(OCR, ""): 0.2, (ASR, ""): 0.9}


def test_another_region_costs_its_bid_beside_what_is_at_home() -> None:
    desired = {"edge": (assignment("a-1", workload=FAR, device="npu"),)}
    delegated = {
        FAR: DelegatedWorkload("ag-1", "east", (), is_ready=True, bid=offer("east", cost=0.25)),
        OCR: DelegatedWorkload("ag-2", "east", (), is_ready=True, bid=offer("east", cost=math.nan)),
        ASR: DelegatedWorkload("ag-3", "east", (), is_ready=True),
        ODD: DelegatedWorkload("ag-4", "east", (), is_ready=True, bid=offer("east", cost=-1.0)),
    }
    found = rates(desired, {Slot("edge", "npu"): UsdPerHour(0.1)}, delegated)
    assert found == {(FAR, ""): 0.1, (FAR, "east"): 0.25}, "no price is not free; no counter goes down"
