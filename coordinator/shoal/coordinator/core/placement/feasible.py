"""May this model run on this device for this workload? Every constraint that says no, in one stable order."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from functools import cached_property
from typing import Any

from shoal.coordinator.core.fleet.judge import held
from shoal.coordinator.core.fleet.state import Liveness, NodeState
from shoal.coordinator.core.placement.model import Inputs, Move, Slot, Trial, Triple
from shoal.coordinator.core.placement.relax import CATEGORY, Give, physical, rounded_up
from shoal.coordinator.core.placement.signatures import expired, unsigned
from shoal.coordinator.core.prediction.demand import CONV, Demand, demand_of
from shoal.coordinator.core.prediction.model import Prediction
from shoal.coordinator.core.prediction.predict import predict
from shoal.policies.cel import Expression, device_fields, model_fields, node_fields
from shoal.types.assignment import Assignment, Measured, Served
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Device
from shoal.types.profile import ModelProfile
from shoal.types.receipt import Receipt
from shoal.types.units import (
    CARBON,
    COST,
    DURATION,
    ENERGY,
    POWER,
    show_bytes,
    show_joules,
    show_quantity,
    show_seconds,
    show_usd_per_hour,
    show_watts,
)
from shoal.types.workload import Intent, Limits, ModelRef, Requirements, WorkloadKey


class Order(IntEnum):
    """The order in which constraints are named; the first that fails is the candidate's reason."""

    NODE = 0
    SELECTOR = 1
    RESIDENCY = 2
    SIGNATURE = 3
    PRECISION = 4
    OPERATORS = 5
    CAPABILITY = 6
    POISONED = 7
    FAILED_HERE = 8
    SIGNATURE_AGE = 9
    MEMORY = 10
    LATENCY = 11
    COST = 12
    ENERGY = 13
    CARBON = 14
    POWER = 15
    UTILISATION = 16
    QUOTA = 17
    SPREAD = 18


HARD = frozenset({Order.SELECTOR, Order.RESIDENCY, Order.SIGNATURE, Order.PRECISION})
"""What a running replica must still meet when nothing in its documents changed. The rest was judged when it was placed:
figures that move with the weather (latency, cost, energy) do not by themselves move work."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One constraint that a candidate breaks, and what would have to give."""

    order: Order
    refusal: Refusal
    give: Give


@dataclass(frozen=True, slots=True)
class Option:
    """One model of a workload on one device: all that does not depend on the requirements' figures.

    prediction: None where it was refused (`unpredicted`). cost: USD/h of the whole device, NaN where unknown.
    broken: why an assignment of this workload and model already failed here.
    """

    state: NodeState
    device: Device
    model: ModelRef
    precision: str
    profile: ModelProfile
    receipt: Receipt | None
    prediction: Prediction | None
    unpredicted: Refusal | None
    cost: float
    broken: Refusal | None

    @property
    def slot(self) -> Slot:
        return Slot(self.state.name, self.device.name)

    @property
    def names(self) -> tuple[str, str, str]:
        return self.state.name, self.device.name, self.model.digest


class Scope:
    """One call of `place`: what is shared by all its workloads, computed once."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._demands = dict[str, Demand]()
        self._nodes = dict[str, dict[str, object]]()
        self._devices = dict[Slot, dict[str, object]]()
        self._models = dict[str, dict[str, object]]()
        self._selected = dict[tuple[str, str, str, str], Refusal | None]()

    @cached_property
    def devices(self) -> tuple[tuple[NodeState, Device], ...]:
        """Every device of the region, by node and device name."""
        nodes = self.inputs.fleet.nodes
        return tuple(
            (nodes[name], device)
            for name in sorted(nodes)
            for device in sorted(nodes[name].node.devices, key=lambda each: each.name)
        )

    @cached_property
    def current(self) -> Mapping[WorkloadKey, tuple[tuple[str, Assignment], ...]]:
        """Each workload's current replicas (assigned, not draining) with their nodes, by node and id."""
        found = dict[WorkloadKey, list[tuple[str, Assignment]]]()
        for node in sorted(self.inputs.desired):
            for assignment in sorted(self.inputs.desired[node], key=lambda each: each.id):
                if not assignment.draining:
                    found.setdefault(assignment.workload, []).append((node, assignment))
        return {key: tuple(pairs) for key, pairs in found.items()}

    @cached_property
    def moving(self) -> tuple[Move, ...]:
        """Moves that have a place."""
        return tuple(move for move in self.inputs.moves if move.target)

    @cached_property
    def held(self) -> frozenset[str]:
        return held(self.inputs.fleet, self.inputs.now)

    @cached_property
    def region(self) -> dict[str, object]:
        region = self.inputs.region
        return {"name": region.name, "residency": region.residency, "carbon": region.carbon_g_per_kwh}

    @cached_property
    def moment(self) -> datetime:
        return datetime.fromtimestamp(self.inputs.wall, UTC)

    def demand(self, profile: ModelProfile) -> Demand:
        if profile.digest not in self._demands:
            self._demands[profile.digest] = demand_of(profile)
        return self._demands[profile.digest]

    def _seen(self, option: Option) -> dict[str, object]:
        """What an expression sees of a candidate."""
        slot, digest = option.slot, option.profile.digest
        if slot.node not in self._nodes:
            self._nodes[slot.node] = node_fields(option.state.node)
        if slot not in self._devices:
            self._devices[slot] = device_fields(option.device)
        if digest not in self._models:
            self._models[digest] = model_fields(option.profile)
        return {
            "node": self._nodes[slot.node],
            "device": self._devices[slot],
            "model": self._models[digest],
            "region": self.region,
            "now": self.moment,
        }

    def option(
        self, intent: Intent, model: ModelRef, state: NodeState, device: Device, served: tuple[Served, ...] = (),
        measured: Measured | None = None, broken: Refusal | None = None,
    ) -> Option:  # fmt: skip
        profile = self.inputs.profiles[model.digest]
        receipt = state.receipts.get(device.name)
        precision = model.precision or profile.precision
        known = measured or self.inputs.measured.get(Trial(model.digest, state.name, device.name))
        answer = predict(device, receipt, profile, precision, intent.max_batch, known, served, self.demand(profile))
        prediction = answer if isinstance(answer, Prediction) else None
        return Option(
            state=state,
            device=device,
            model=model,
            precision=precision,
            profile=profile,
            receipt=receipt,
            prediction=prediction,
            unpredicted=answer if isinstance(answer, Refusal) else None,
            cost=self.inputs.costs.get(Slot(state.name, device.name), math.nan),
            broken=broken,
        )

    def replica_rate(self, intent: Intent, replicas: int) -> float:
        """Requests a second that each replica is to take; 0 where no traffic is declared."""
        return math.fsum(traffic.rate for traffic in intent.traffic) / max(1, replicas)

    def latency_s(self, option: Option, intent: Intent, replicas: int, *, high: bool = False) -> float:
        """Predicted p95 as the policy means it: the worker's, queueing, and the way from the farthest origin.

        Queueing: mean wait of M/D/1 at the replica's own utilisation (guide, equation 8)."""
        if option.prediction is None:
            return math.nan
        p95, p50 = option.prediction.latency_p95_s, option.prediction.latency_p50_s
        busy = self.replica_rate(intent, replicas) * p50.mid / max(1, option.device.parallelism)
        queue = math.inf if busy >= 1 else p50.mid * busy / (2 * (1 - busy))
        away = max((self.inputs.rtt_s.get(each.origin, 0.0) for each in intent.traffic), default=0.0)
        return (p95.high if high else p95.mid) + queue + (away if intent.require.latency_from_origin else 0.0)

    def carbon_g_per_h(self, option: Option, intent: Intent, replicas: int) -> float:
        """Grams an hour of one replica: joules x declared rate, at full load where none is declared."""
        if option.prediction is None:
            return math.nan
        rate = self.replica_rate(intent, replicas) or 1 / max(option.prediction.latency_p50_s.mid, 1e-9)
        return option.prediction.joules.mid * rate * 3600 / 3.6e6 * self.inputs.region.carbon_g_per_kwh

    def node_watts(self, option: Option, intent: Intent, replicas: int) -> float:
        """What the option's node draws with this replica on it; NaN where a device of it tells nothing and was never
        measured. Each device as it says it draws, else at its receipt's idle power; what the replica adds counts where
        no reading has it yet: its joules at the declared rate (at full load where none is declared), above idle."""
        state, device, prediction = option.state, option.device, option.prediction
        known = dict[str, float]()
        metered = set[str]()
        for each in state.node.devices:
            reading, receipt = state.readings.get(each.name), state.receipts.get(each.name)
            if reading is not None and math.isfinite(reading.power_w):
                known[each.name] = reading.power_w
                metered.add(each.name)
            else:
                known[each.name] = receipt.rates.idle_w if receipt is not None else math.nan
        runs = any(
            (node, one.device, one.model) == option.names for node, one in self.current.get(intent.key, ())
        )  # fmt: skip
        if prediction is None or (runs and device.name in metered):
            return math.fsum(known.values())
        busy = min(1.0, self.replica_rate(intent, replicas) * prediction.latency_p50_s.mid or 1.0)
        idle = option.receipt.rates.idle_w if option.receipt is not None else 0.0
        active = prediction.joules.mid / max(prediction.latency_p50_s.mid, 1e-9)
        return math.fsum(known.values()) + busy * max(0.0, active - idle)

    def faults(self, option: Option, intent: Intent, require: Requirements, limits: Limits) -> tuple[Fault, ...]:
        """Every constraint that `option` breaks, but for those that depend on what else is placed."""
        return tuple(
            fault
            for found in (
                self.node_fault(option),
                *self.document_faults(option, require),
                self._blocked(option, intent),
                *self._device_faults(option, require),
                *self.figure_faults(option, intent, require, limits),
            )
            if (fault := found) is not None
        )

    def node_fault(self, option: Option) -> Fault | None:
        """Why nothing new may be placed on this node."""
        state = option.state
        name = state.name
        if state.revoked:
            refusal = Refusal(Code.CERT_REVOKED, f"{name} was revoked", "a member of the region")
            return Fault(Order.NODE, refusal, physical(f"join {name} again with a new token"))
        if state.cordoned:
            refusal = Refusal(Code.NODE_CORDONED, f"{name} is cordoned", "a node that takes new work")
            return Fault(Order.NODE, refusal, physical(f"shoal uncordon {name}"))
        if state.liveness in (Liveness.SUSPECT, Liveness.LOST):
            code = Code.NODE_SUSPECT if state.liveness is Liveness.SUSPECT else Code.NODE_LOST
            refusal = Refusal(code, f"{name} is silent", "a node that reports")
            return Fault(Order.NODE, refusal, physical(f"bring {name} back"))
        if state.quarantined:
            found = f"{name} reports what cannot be: {state.refusal.found if state.refusal else ''}"
            refusal = Refusal(Code.NODE_QUARANTINED, found, "telemetry that can be true")
            return Fault(Order.NODE, refusal, physical(f"look at the sensors and the agent of {name}"))
        if state.liveness is Liveness.NEVER_SEEN or not state.reported:
            refusal = Refusal(Code.NODE_NOT_READY, f"{name} has not reported yet", "a node that reports")
            return Fault(Order.NODE, refusal, physical(f"start the agent on {name}"))
        if not state.front_ready:
            refusal = Refusal(Code.NODE_NOT_READY, f"the front of {name} does not answer yet", "a front that serves")
            return Fault(Order.NODE, refusal, physical(f"look at the agent's log on {name}"))
        return None

    def _blocked(self, option: Option, intent: Intent) -> Fault | None:
        """A move to this very place failed."""
        slot, digest = option.slot, option.model.digest
        refusal = self.inputs.blocked.get((intent.key, Trial(digest, slot.node, slot.device)))
        if refusal is None:
            return None
        return Fault(Order.FAILED_HERE, refusal, physical(f"shoal model clear {option.model.source}"))

    def document_faults(self, option: Option, require: Requirements) -> Iterator[Fault]:
        """`HARD` constraints: where, residency, the publisher's signature, precision."""
        if require.where and (refusal := self._selector(option, require.where)) is not None:
            admits = f'node.name == "{option.state.name}" && device.name == "{option.device.name}"'
            yield Fault(Order.SELECTOR, refusal, Give(where=admits, distance=CATEGORY))
        region = self.inputs.region
        if not require.may_be_in(region.name, region.residency):
            here = region.residency or region.name
            refusal = Refusal(Code.RESIDENCY, f"{region.name} lies in {here}", ", ".join(require.residency))
            yield Fault(Order.RESIDENCY, refusal, Give(residency=here, distance=2 * CATEGORY))
        if (missing := unsigned(self.inputs.signatures, option.model, require)) is not None:
            yield Fault(Order.SIGNATURE, *missing)
        if require.precisions and option.precision not in require.precisions:
            refusal = Refusal(Code.PRECISION_DENIED, option.precision, f"one of {', '.join(require.precisions)}")
            yield Fault(Order.PRECISION, refusal, Give(precision=option.precision, distance=CATEGORY))

    def _selector(self, option: Option, where: str) -> Refusal | None:
        key = (where, *option.names)
        if key not in self._selected:
            try:
                self._selected[key] = Expression.compile(where).refusal(**self._seen(option))
            except ShoalError as error:
                self._selected[key] = error.refusal
        return self._selected[key]

    def _device_faults(self, option: Option, require: Requirements) -> Iterator[Fault]:
        receipt, device = option.receipt, option.device
        where = f"{option.state.name}/{device.name}"
        if option.state.reported and device.name not in option.state.readings:
            refusal = Refusal(Code.DEVICE_LOST, f"{where} does not answer its node", "a device that can be read")
            yield Fault(Order.NODE, refusal, physical(f"look at the driver of {where}"))
        computes = option.profile.flops > 0  # what only moves values asks for no arithmetic of their type
        if computes and receipt is not None and receipt.precisions and option.precision not in receipt.precisions:
            found = f"{where} runs {', '.join(receipt.precisions)}"
            refusal = Refusal(Code.PRECISION_DENIED, found, option.precision)
            yield Fault(Order.PRECISION, refusal, physical(f"add a variant in {' or '.join(receipt.precisions)}"))
        if receipt is not None and option.precision in receipt.precisions and receipt.rates.conv_flops:
            layers = sorted(
                {cost.operator for cost in option.profile.costs if cost.operator in CONV and cost.flops > 0}
            )
            if layers and option.precision not in receipt.rates.conv_flops:
                found = f"{device.provider} was not seen to run a convolution in {option.precision}"
                refusal = Refusal(Code.OP_UNSUPPORTED, found, ", ".join(layers))
                variant = physical(f"add a variant in {' or '.join(receipt.rates.conv_flops)}")
                yield Fault(Order.OPERATORS, refusal, variant)
        if receipt is not None and receipt.operators:
            missing = sorted(set(option.profile.operators) - set(receipt.operators))
            if missing:
                found = f"{device.provider} was not seen to run {', '.join(missing[:8])}"
                refusal = Refusal(Code.OP_UNSUPPORTED, found, f"every operator of {option.model.source}")
                yield Fault(Order.OPERATORS, refusal, physical(f"add a variant without {', '.join(missing[:8])}"))
        yield from self._capability(option, require, where)
        triple = Triple(option.model.digest, device.provider, device.runtime_version)
        if triple in self.inputs.poisoned:
            found = f"it crashed {device.provider} {device.runtime_version} again and again"
            refusal = Refusal(Code.POISONED, found, "a model that survives its runtime")
            yield Fault(Order.POISONED, refusal, physical("push another model, or change the runtime's version"))
        if (ended := expired(self.inputs.signatures, option.model, require, self.inputs.wall)) is not None:
            yield Fault(Order.SIGNATURE_AGE, *ended)
        if option.broken is not None:
            yield Fault(Order.FAILED_HERE, option.broken, physical(f"mend {where}: {option.broken.code}"))

    def _capability(self, option: Option, require: Requirements, where: str) -> Iterator[Fault]:
        receipt, device = option.receipt, option.device
        if option.unpredicted is not None:
            refusal = option.unpredicted
            yield Fault(Order.CAPABILITY, refusal, physical(f"let {where} be measured (shoal-agent doctor)"))
        if receipt is None:
            return
        versions = (device.driver_version, device.runtime_version)
        if (receipt.driver_version, receipt.runtime_version) != versions:
            refusal = Refusal(Code.CAPABILITY_STALE, f"measured with {receipt.runtime_version}", " ".join(versions))
            yield Fault(Order.CAPABILITY, refusal, physical(f"let {where} be measured again"))
        if require.measured_only and receipt.source != "probe":
            refusal = Refusal(Code.CAPABILITY_UNMEASURED, f"figures of {receipt.source}", "measured figures")
            yield Fault(Order.CAPABILITY, refusal, Give(unmeasured=True, distance=CATEGORY))
        age = max(0.0, self.inputs.wall - receipt.measured_at)
        if require.measured_within_s is not None and age > require.measured_within_s:
            found, asked = f"measured {show_seconds(age)} ago", f"within {show_seconds(require.measured_within_s)}"
            give = Give(within_s=rounded_up(age * 1.1, DURATION), distance=age / require.measured_within_s - 1)
            yield Fault(Order.CAPABILITY, Refusal(Code.CAPABILITY_STALE, found, asked), give)

    def figure_faults(self, option: Option, intent: Intent, require: Requirements, limits: Limits) -> Iterator[Fault]:
        """Those that go with the weather: latency, cost, energy, carbon, power."""
        if option.prediction is None:
            return
        replicas = require.replicas
        if (bound := require.latency_p95_s) is not None:
            high = self.latency_s(option, intent, replicas, high=True)
            if not high <= bound:
                mid = self.latency_s(option, intent, replicas)
                found = f"p95 {show_seconds(mid)}, at most {show_seconds(high)}" if mid < math.inf else "overloaded"
                refusal = Refusal(Code.SLO_UNREACHABLE, found, f"p95 {show_quantity(bound, DURATION)}")
                yield Fault(Order.LATENCY, refusal, _more("latency_p95_s", high, bound))
        figures = (
            (Order.COST, Code.COST_OVER, "cost", limits.cost, option.cost, show_usd_per_hour, replicas),
            (Order.ENERGY, Code.ENERGY_OVER, "energy", limits.energy, option.prediction.joules.high, show_joules, 1),
            (Order.CARBON, Code.CARBON_OVER, "carbon", limits.carbon, self.carbon_g_per_h(option, intent, replicas),
             _show_carbon, replicas),
            (Order.POWER, Code.POWER_OVER, "node_power", limits.node_power,
             math.nan if limits.node_power is None else self.node_watts(option, intent, replicas), show_watts, 1),
        )  # fmt: skip
        for order, code, name, limit, value, show, shares in figures:
            if limit is None or value * shares <= limit:
                continue
            found = "unknown here" if math.isnan(value) else show(value) + (f" x {shares}" if shares > 1 else "")
            yield Fault(order, Refusal(code, found, f"at most {show(limit)}"), _more(name, value * shares, limit))


QUANTITIES = {"latency_p95_s": DURATION, "cost": COST, "energy": ENERGY, "carbon": CARBON, "node_power": POWER}


def _more(name: str, value: float, bound: float) -> Give:
    """Room for `value` where `bound` was; no bound at all where the value is unknown or has none."""
    if not math.isfinite(value):
        far, room = 10 * CATEGORY, math.inf
    else:
        far, room = (value / bound - 1 if bound > 0 else CATEGORY), rounded_up(value, QUANTITIES[name])
    bounds: dict[str, Any] = {name: room}
    return Give(distance=far, **bounds)


def _show_carbon(value: float) -> str:
    return f"{value:.3g} gCO2/h"


def memory_fault(option: Option, needed: float, admissible: float) -> Fault | None:
    if needed <= admissible:
        return None
    slot = f"{option.state.name}/{option.device.name}"
    found = f"{show_bytes(max(0.0, admissible))} free on {slot}"
    refusal = Refusal(Code.MEMORY_SHORT, found, show_bytes(needed))
    return Fault(Order.MEMORY, refusal, physical(f"free {show_bytes(needed - max(0.0, admissible))} on {slot}"))


def utilisation_fault(option: Option, needed: float, booked: float, most: float, replicas: int) -> Fault | None:
    if needed <= 0 or booked + needed <= most:
        return None
    slot = f"{option.state.name}/{option.device.name}"
    found, asked = f"{booked:.0%} of {slot} is taken", f"{needed:.0%} more, at most {most:.0%} in all"
    room = most - booked
    wanted = math.ceil(replicas * needed / room) if room > 0 else 0
    give = (
        Give(replicas=wanted, distance=wanted / replicas - 1)
        if replicas < wanted <= 100
        else physical(f"take other work off {slot}")
    )
    return Fault(Order.UTILISATION, Refusal(Code.UTILISATION_SHORT, found, asked), give)
