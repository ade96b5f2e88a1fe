"""Builders of federation members and of their messages."""

from typing import Any

from shoal.types.offer import Advertisement, CapacityClass, Member
from shoal.types.units import Bytes, Seconds, UsdPerHour

GIB = 2**30


def capacity(**changes: Any) -> CapacityClass:
    values: dict[str, Any] = {
        "device_class": "gpu H100",
        "runtime": "CUDAExecutionProvider",
        "precisions": ("fp16", "fp32"),
        "devices": 2,
        "free_bytes": Bytes(100 * GIB),
        "cost_usd_per_h": UsdPerHour(2.0),
        "joules_per_tflop": 5.0,
        "carbon_g_per_kwh": 250.0,
        "confidence": 1.0,
    }
    return CapacityClass(**(values | changes))


def advertisement(region: str = "eu", sequence: int = 1, **changes: Any) -> Advertisement:
    values: dict[str, Any] = {"classes": (capacity(),), "residency": "", "lease_s": Seconds(10.0)}
    return Advertisement(region, sequence, **(values | changes))


def member(region: str = "eu", **changes: Any) -> Member:
    values: dict[str, Any] = {"address": f"{region}:7447", "roots": (f"CA of {region}",), "residency": ""}
    return Member(region, **(values | changes))
