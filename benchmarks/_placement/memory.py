"""Placements near the limit of a machine's memory, of which a process that is not Shoal's takes what it likes.

A control group stands for the machine: an agent's real workers, the benchmark and the foreign process share it. Before
each placement the foreign process grows or shrinks until so much is free as the schedule says: between half and twice
what that load was seen to need when the machine was empty. A placed model stays for up to four more placements. While
a model loads, the foreign process keeps what it has: what is taken after a decision, no decision foresees.

Three rules decide about the same placements, each on the same machine:

- Shoal: the region's check and the agent's, as they are (`admissible_bytes`, `admission.admit`), by the upper end of
  the prediction. A model is measured once it has run; the first time it is predicted from the loads of others;
- count: as many models as the machine holds if all were of their mean;
- file size: where the model's file fits into what is free now.

Memory ran out where the kernel killed for it, whatever it killed, or where a load was refused memory by the runtime.
"""

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Protocol

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from _placement.foreign_memory import ForeignMemory
from _placement.memory_group import MemoryGroup, memory_group
from _placement.memory_node import MemoryNode, is_shortage, memory_node, profile_at_batch_1
from _prediction.live_models import MODELS, LiveModel

from shoal.agent.core import admission
from shoal.coordinator.core.fleet.commitments import NO_COMMITMENT, admissible_bytes
from shoal.coordinator.core.fleet.state import NodeState
from shoal.coordinator.core.prediction.demand import demand_of
from shoal.coordinator.core.prediction.load_law import load_needs
from shoal.coordinator.core.prediction.model import Prediction
from shoal.coordinator.core.prediction.predict import predict
from shoal.coordinator.core.prediction.region_residuals import RegionResiduals
from shoal.coordinator.core.prediction.residuals import Residual, class_of_device, residual_of
from shoal.types.assignment import Assignment, Measured
from shoal.types.device import Node, Reading, Role
from shoal.types.profile import ModelProfile
from shoal.types.receipt import Receipt

MIB: Final = 2**20
QUICK_MODELS: Final = ("det", "cls", "magika", "vad", "vgg", "bert")
QUICK_PLACEMENTS: Final = 14
_LEFT: Final = (0.5, 2.0)
"""Free memory before a placement, in parts of what its load needs."""
_STAYS: Final = 4
"""Most placements for which a model stays."""
_LOOK_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class Arrival:
    """One placement that is asked for."""

    # Name of the model.
    model: str
    # What is free when it is decided.
    left_bytes: int
    # It leaves before the placement of this number.
    leaves_at: int


@dataclass(frozen=True, slots=True)
class MemoryTrial:
    """What came of one."""

    # `served`, `refused`, `short` (memory ran out) or `failed`.
    outcome: str
    # What was free at the decision.
    free_bytes: int
    # By how much the rule judged.
    asked_bytes: int
    # What the load was seen to need when the machine was empty.
    needed_bytes: int
    # Models that were lost, this one included.
    lost: int


@dataclass(frozen=True, slots=True)
class RuleFigures:
    """One rule, over all placements."""

    # Asked for.
    placements: int
    # Loaded, warmed up, and nothing killed.
    served: int
    # Not placed.
    refused: int
    # Of the refused: what was free was at least what the load needs.
    refused_needlessly: int
    # Memory ran out.
    out_of_memory: int
    # Models that were lost to it, the placed ones included.
    models_lost: int
    # Not loaded for another reason.
    failed: int


class MemoryRule(Protocol):
    """Decides whether a model is placed."""

    def asked_bytes(self, model: str) -> int:
        """By how much it judges."""
        ...

    def allows(self, assignment: Assignment, reading: Reading, resident: Sequence[Assignment]) -> bool: ...

    def limit_bytes(self, model: str) -> int:
        """What the model's worker may take; 0: anything."""
        ...

    def on_loaded(self, model: str, measured: Measured) -> None: ...


class ShoalRule:
    """As region and agent decide."""

    def __init__(self, node: MemoryNode, receipt: Receipt, profiles: Mapping[str, ModelProfile]) -> None:
        self._device, self._pool, self._receipt, self._profiles = node.device, node.pool, receipt, profiles
        self._measured = dict[str, Measured]()
        self._residuals = dict[str, Residual]()
        memory = node.device.memory_bytes
        self._node = Node(
            "bench", "bench", Role.AGENT, {}, "0", "linux", "", memory, memory, (node.device,), "", "", "bench"
        )  # fmt: skip

    def asked_bytes(self, model: str) -> int:
        profile = self._profiles[model]
        law = RegionResiduals(self._residuals.values()).load(class_of_device(self._device), load_needs(profile))
        found = predict(
            self._device, self._receipt, profile, profile.precision, measured=self._measured.get(model), load=law
        )
        assert isinstance(found, Prediction), found
        return int(found.memory_bytes.high)

    def limit_bytes(self, model: str) -> int:
        return self.asked_bytes(model)

    def allows(self, assignment: Assignment, reading: Reading, resident: Sequence[Assignment]) -> bool:
        commitment = NO_COMMITMENT
        for each in resident:
            commitment = commitment.plus(each.memory_bytes, loaded=True)
        state = NodeState(self._node, readings={reading.device: reading})
        if assignment.memory_bytes > admissible_bytes(self._device, state, commitment):
            return False
        beside = self._pool.worker_bytes()
        return admission.admit(assignment, reading, None, (), {self._device.name}, beside) is None

    def on_loaded(self, model: str, measured: Measured) -> None:
        self._measured[model] = measured
        profile = self._profiles[model]
        demand, needs = demand_of(profile), load_needs(profile)
        found = residual_of(model, self._device, self._receipt.rates, profile.precision, demand, measured, needs)
        if found is not None:
            self._residuals[model] = found


class CountRule:
    """As many models as fit if each were of their mean."""

    def __init__(self, room_bytes: int, needs: Mapping[str, int]) -> None:
        self._mean = round(statistics.mean(needs.values()))
        self._most = room_bytes // self._mean

    def asked_bytes(self, model: str) -> int:
        return self._mean

    def limit_bytes(self, model: str) -> int:
        return 0

    def allows(self, assignment: Assignment, reading: Reading, resident: Sequence[Assignment]) -> bool:
        return len(resident) < self._most

    def on_loaded(self, model: str, measured: Measured) -> None:
        """It learns nothing."""


class FileSizeRule:
    """Where the file fits into what is free now."""

    def __init__(self, profiles: Mapping[str, ModelProfile]) -> None:
        self._profiles = profiles

    def asked_bytes(self, model: str) -> int:
        return self._profiles[model].size_bytes

    def limit_bytes(self, model: str) -> int:
        return 0

    def allows(self, assignment: Assignment, reading: Reading, resident: Sequence[Assignment]) -> bool:
        return assignment.model_bytes <= reading.free_bytes

    def on_loaded(self, model: str, measured: Measured) -> None:
        """It learns nothing."""


class MemoryRun:
    """All rules on one machine."""

    def __init__(self, node: MemoryNode, group: MemoryGroup, models: Mapping[str, LiveModel]) -> None:
        self._node, self._group, self._models = node, group, models
        self.profiles = {name: profile_at_batch_1(each) for name, each in models.items()}
        self._foreign = ForeignMemory(self._free_bytes)
        # No worker came or went since memory stood still. Most placements are refused: then nothing is waited for.
        self._is_still = False

    async def needs(self) -> dict[str, int]:
        """What loading each model takes of the machine, which has nothing else to hold: by the peak of what is in use
        until a spare worker stands again."""
        found = dict[str, int]()
        for name, model in self._models.items():
            await self._node.settle()
            before = lowest = self._free_bytes()
            loading = asyncio.create_task(self._load_and_settle(name, model))
            while not loading.done():
                lowest = min(lowest, self._free_bytes())
                await asyncio.sleep(_LOOK_S)
            await loading
            found[name] = before - lowest
            await self._node.remove(name)
        return found

    async def trials(
        self, rule: MemoryRule, arrivals: Sequence[Arrival], needs: Mapping[str, int], budget_s: float
    ) -> list[MemoryTrial]:
        """Of the first ones, none of them begun after `budget_s` seconds."""
        found, resident = list[MemoryTrial](), dict[str, tuple[Assignment, int]]()
        ends = time.monotonic() + budget_s
        for number, arrival in enumerate(arrivals):
            if time.monotonic() >= ends:
                break
            for name, (_, leaves_at) in list(resident.items()):
                if leaves_at <= number:
                    await self._remove(name, resident)
            if not self._is_still:
                await self._settle()
            self._foreign.leave(arrival.left_bytes)
            self._group.take_shortages()
            found.append(await self._place(rule, arrival, f"{arrival.model}-{number}", needs[arrival.model], resident))
        for name in list(resident):
            await self._remove(name, resident)
        self._foreign.hold_nothing()
        return found

    def close(self) -> None:
        self._foreign.close()

    async def _place(
        self, rule: MemoryRule, arrival: Arrival, name: str, needed: int, resident: dict[str, tuple[Assignment, int]]
    ) -> MemoryTrial:
        asked = rule.asked_bytes(arrival.model)
        assignment = self._node.assignment(name, self.profiles[arrival.model], rule.limit_bytes(arrival.model))
        reading = self._node.read()
        if not rule.allows(assignment, reading, [each for each, _ in resident.values()]):
            return MemoryTrial("refused", reading.free_bytes, asked, needed, 0)
        resident[name] = assignment, arrival.leaves_at
        ended = await self._node.load(self._models[arrival.model], assignment)
        await self._settle()
        shortages, foreign = self._group.take_shortages(), self._foreign.is_alive
        if not foreign:
            self._foreign.revive()
        gone = [each for each in resident if each in self._node.lost]
        if isinstance(ended, Measured):
            rule.on_loaded(arrival.model, ended)
        elif name not in gone:
            gone.append(name)
        for each in gone:
            await self._remove(each, resident)
        short = shortages > 0 or not foreign or is_shortage(ended)
        outcome = "short" if short else "served" if isinstance(ended, Measured) else "failed"
        return MemoryTrial(outcome, reading.free_bytes, asked, needed, len(gone))

    async def _load_and_settle(self, name: str, model: LiveModel) -> None:
        ended = await self._node.load(model, self._node.assignment(name, self.profiles[name], 0))
        assert isinstance(ended, Measured), ended
        await self._node.settle()

    async def _remove(self, name: str, resident: dict[str, tuple[Assignment, int]]) -> None:
        del resident[name]
        self._is_still = False
        await self._node.remove(name)

    async def _settle(self) -> None:
        await self._node.settle()
        self._is_still = True

    def _free_bytes(self) -> int:
        return self._node.read().free_bytes


def schedule(needs: Mapping[str, int], count: int, seed: int) -> list[Arrival]:
    rng = random.Random(seed)
    names = sorted(needs)
    found = []
    for number in range(count):
        name = rng.choice(names)
        left = round(needs[name] * rng.uniform(*_LEFT))
        found.append(Arrival(name, left, number + 1 + rng.randint(1, _STAYS)))
    return found


def figures(trials: Sequence[MemoryTrial]) -> RuleFigures:
    outcomes = Counter(each.outcome for each in trials)
    refused = [each for each in trials if each.outcome == "refused"]
    return RuleFigures(
        placements=len(trials),
        served=outcomes["served"],
        refused=len(refused),
        refused_needlessly=sum(each.free_bytes >= each.needed_bytes for each in refused),
        out_of_memory=outcomes["short"],
        models_lost=sum(each.lost for each in trials),
        failed=outcomes["failed"],
    )


def main(names: Sequence[str], placements: int, room_mib: int, seed: int, budget_s: float) -> int:
    """budget_s: of each rule. The exit status: 1 where memory ran out under Shoal."""
    models = {name: MODELS[name]() for name in names}
    with memory_group() as group, tempfile.TemporaryDirectory(prefix="shoal-memory-") as folder:
        found = asyncio.run(_measure(Path(folder), group, models, placements, room_mib * MIB, seed, budget_s))
        version = group.version
    document = {name: asdict(each) for name, each in found.items()}
    print(json.dumps({**document, "models": len(models), "room_mib": room_mib, "seed": seed, "cgroup": version}))
    return int(found["shoal"].out_of_memory > 0)


async def _measure(
    folder: Path, group: MemoryGroup, models: Mapping[str, LiveModel], placements: int, room: int, seed: int,
    budget_s: float,
) -> dict[str, RuleFigures]:  # fmt: skip
    group.limit(room)
    async with memory_node(folder) as node:
        run = MemoryRun(node, group, models)
        try:
            receipt = await node.pool.probe(node.device)
            needs = await run.needs()
            print("# a load needs, MiB: " + ", ".join(f"{name} {need / MIB:.0f}" for name, need in needs.items()))
            arrivals = schedule(needs, placements, seed)
            rules: dict[str, MemoryRule] = {
                "shoal": ShoalRule(node, receipt, run.profiles),
                "count": CountRule(room, needs),
                "file_size": FileSizeRule(run.profiles),
            }
            print(f"{'rule':10} {'model':18} {'free':>7} {'asked':>7} {'needed':>7}  outcome (MiB)")
            found = dict[str, RuleFigures]()
            for name, rule in rules.items():
                trials = await run.trials(rule, arrivals, needs, budget_s)
                for arrival, each in zip(arrivals, trials, strict=False):
                    sizes = (each.free_bytes, each.asked_bytes, each.needed_bytes)
                    shown = " ".join(f"{size / MIB:7.1f}" for size in sizes)
                    print(f"{name:10} {arrival.model:18} {shown}  {each.outcome}", flush=True)
                found[name] = figures(trials)
            return found
        finally:
            run.close()
