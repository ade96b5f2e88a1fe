"""Instances of placement made of published measurements: services and devices of one region, as placement reads them.

`edge_cloud_matrix.csv.gz` has the latency of image classifiers on processors from Raspberry Pi to AWS instances, and
the joules of some. MLPerf Inference results, MLCommons, open division, rearranged by mlcommons/cm4mlperf-results
(84d8b84c6d6e), Apache-2.0. The MLPerf name is a trademark of MLCommons; not verified by MLCommons.

What the file does not have is drawn from the instance's seed: prices (faster processors tend to cost more), watts where
no joules were published, distances (AWS is 10 to 60 ms away, the rest 0.5 to 5 ms), memory, rates, bounds and weights.
"""

import csv
import gzip
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from harness.builders.coordinator_core import GIB, MIB, START, device, fleet_of, intent, node, profile
from shoal.coordinator.core.placement.model import Inputs, RegionFacts, Slot, Trial
from shoal.types.assignment import Measured
from shoal.types.device import EnergySource
from shoal.types.units import Bytes, Elapsed, Joules, PerSecond, Seconds, UsdPerHour, Wall
from shoal.types.workload import ModelRef, Traffic

MATRIX: Final = Path(__file__).parent / "edge_cloud_matrix.csv.gz"
SERVICES_MOST, DEVICES_MOST = 200, 60
DEVICE: Final = "cpu0"
ENTRY: Final = "entry"
_TWINS: Final = (("non-quantized", "quantized"), ("_float", "_uint8"), ("fp32", "int8"))
"""How the two precisions of one network are named."""


@dataclass(frozen=True, slots=True)
class Processor:
    """One processor of one system."""

    # As published.
    name: str
    # True for an instance of a cloud.
    is_cloud: bool
    # Seconds of one inference, by network.
    latency_s: Mapping[str, float]
    # Joules of one inference, by network; networks without a published figure are absent.
    joules: Mapping[str, float]


def read_processors(path: Path = MATRIX) -> tuple[tuple[Processor, ...], ...]:
    """The two blocks of the matrix: in each, every processor ran every network."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    latency, joules = dict[str, dict[str, float]](), dict[str, dict[str, float]]()
    for row in rows:
        name = f"{row['system']}, {row['compute']}"
        latency.setdefault(name, {})[row["model"]] = float(row["latency_p90_ms"]) / 1e3
        if row["joules_per_query"]:
            joules.setdefault(name, {})[row["model"]] = float(row["joules_per_query"])
    processors = [
        Processor(name, name.startswith("AWS"), figures, joules.get(name, {}))
        for name, figures in sorted(latency.items())
    ]
    first = [each for each in processors if "efficientnet-fp32-lite0" in each.latency_s]
    second = [each for each in processors if "efficientnet-lite0-quantized" in each.latency_s]
    return _common(first), _common(second)


def _common(processors: Sequence[Processor]) -> tuple[Processor, ...]:
    """With the networks that all of them ran."""
    shared = set.intersection(*(set(each.latency_s) for each in processors))
    return tuple(
        replace(each, latency_s={name: each.latency_s[name] for name in sorted(shared)}) for each in processors
    )


def make_instance(blocks: Sequence[Sequence[Processor]], number: int, seed: int) -> Inputs:
    """Instance `number` of a seed; the first is the largest, the others are of all sizes."""
    rng = random.Random(f"{seed}/{number}")
    processors = rng.choices(blocks, weights=(3, 1))[0]
    networks = list(processors[0].latency_s)
    if number == 0:
        services, machines = SERVICES_MOST, DEVICES_MOST
    else:
        machines = round(4 * (DEVICES_MOST / 4) ** rng.random())
        services = min(SERVICES_MOST, max(3, round(machines * rng.uniform(1.0, 4.0))))
    chosen = [rng.choice(processors) for _ in range(machines)]
    names = [f"node-{index:03}" for index in range(machines)]
    nodes = [
        node(
            name,
            device(DEVICE, memory=round(rng.choice((1, 2, 4, 8)) * GIB)),
            labels={"rtt": f"{rng.uniform(10, 60) if each.is_cloud else rng.uniform(0.5, 5):.3g}ms"},
        )
        for name, each in zip(names, chosen, strict=True)
    ]
    mean = {each.name: sum(each.latency_s.values()) / len(networks) for each in chosen}
    fastest = min(mean.values())
    watts = {each.name: rng.uniform(4, 150) for each in processors}
    costs = {
        Slot(name, DEVICE): UsdPerHour(0.4 * (fastest / mean[each.name]) ** 0.7 * rng.lognormvariate(0, 0.6))
        for name, each in zip(names, chosen, strict=True)
    }
    intents, profiles, measured = [], {}, dict[Trial, Measured]()
    load = rng.uniform(0.3, 0.75)  # of the fleet's time, about
    for index in range(services):
        network = rng.choice(networks)
        twin = _twin(network)
        variants = [network, twin] if twin in networks and rng.random() < 0.4 else [network]
        models = []
        for position, variant in enumerate(variants):
            digest = f"sha256:{index:032x}{position:032x}"
            size = round(rng.uniform(5, 60) * MIB)
            profiles[digest] = profile(digest, size=size, precision="int8" if position else "fp32")
            models.append(ModelRef(f"{variant}.onnx", digest, ""))
            for name, each in zip(names, chosen, strict=True):
                seconds = each.latency_s[variant]
                joules = each.joules.get(variant, seconds * watts[each.name])
                measured[Trial(digest, name, DEVICE)] = Measured(
                    Seconds(1.0),
                    Bytes(4 * size),
                    Seconds(seconds),
                    Seconds(seconds),
                    Joules(joules),
                    EnergySource.MEASURED,
                    1_000_000,
                )
        typical = sorted(each.latency_s[network] for each in chosen)[machines // 2]
        rate = load * machines / services / typical * rng.lognormvariate(-0.5, 0.5) * 0.7
        cuts = sorted((0.0, rng.random(), rng.random(), 1.0))
        weights = {name: cuts[at + 1] - cuts[at] for at, name in enumerate(("latency", "cost", "energy"))}
        bound = None if rng.random() < 0.3 else Seconds(typical * rng.uniform(2, 10) + 0.06)
        intents.append(
            intent(
                f"service-{index:03}",
                models=tuple(models),
                weights=weights,
                latency_p95_s=bound,
                traffic=(Traffic(ENTRY, PerSecond(rate), PerSecond(rate)),),
            )
        )
    return Inputs(
        region=RegionFacts("eu-west", "eu"),
        fleet=fleet_of(*nodes),
        intents=tuple(intents),
        profiles=profiles,
        desired={},
        now=Elapsed(0.0),
        wall=Wall(START),
        seed=number,
        measured=measured,
        costs=costs,
    )


def _twin(network: str) -> str:
    """The quantised form of a network; empty where it is one, or has none."""
    return next((network.replace(a, b) for a, b in _TWINS if a in network), "")
