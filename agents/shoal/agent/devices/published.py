"""What a profile says of a device that is not here: by published results (`agents/derive_profiles`)."""

import math
from collections.abc import Mapping
from typing import Any

from shoal.agent.driver_port import EmulatedPace
from shoal.agent.emulation import PublishedFigure
from shoal.types.device import EnergySource
from shoal.types.receipt import Rates
from shoal.types.units import Bytes, Seconds, Watts


def pace_of(
    profile: Mapping[str, Any],
    memory: Bytes,
    *,
    time_scale: float = 1.0,
    idle_w: Watts = Watts(math.nan),
    note: str = "",
    simulated: bool = False,
) -> EmulatedPace:
    """memory, time_scale, idle_w, simulated: as in EmulatedPace. note: what is different here from the profile."""
    said, active_w = profile["rates"], Watts(_number(profile["active_w"]))
    rates = Rates(
        matmul_flops=said["flops_per_s"],
        conv_flops=said["flops_per_s"],
        elementwise_bytes=said["bytes_per_s"],
        copy_bytes=said["bytes_per_s"],
        launch_s=Seconds(said["launch_s"]),
        node_s=Seconds(0.0),
        load_bytes=math.nan,
        idle_w=idle_w,
        active_w=active_w,
        energy_source=EnergySource.PROFILE,
    )
    return EmulatedPace(
        profile=profile["name"],
        source=source_of(profile, note),
        figures=tuple(_figure(each) for each in profile["figures"]),
        launch_s=Seconds(profile["launch_s"]),
        rates=rates,
        time_scale=time_scale,
        memory_bytes=memory,
        active_w=active_w,
        idle_w=idle_w,
        system=profile["system"],
        simulated=simulated,
    )


def source_of(profile: Mapping[str, Any], note: str = "") -> str:
    """Where its figures are from, for people."""
    parts = [
        f"paced by {'; '.join(profile['sources'])}",
        f"rates by {'; '.join(profile['rates']['sources'])}",
        profile["watts_source"],
        note,
    ]
    return f"{profile['name']}: {'; '.join(filter(None, parts))}"


def _figure(said: Mapping[str, Any]) -> PublishedFigure:
    return PublishedFigure(
        model=said["model"],
        precision=said["precision"],
        flops=said["flops"],
        weights=said["weights"],
        attention=said["attention"],
        latency_s=said["latency_s"],
        joules=_number(said["joules"]),
    )


def _number(said: float | None) -> float:
    return math.nan if said is None else said
