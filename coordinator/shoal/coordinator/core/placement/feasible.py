"""Checks whether a model may run on a device for a workload: every constraint that forbids it, in one stable order."""

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from functools import cached_property
from typing import Any, Final

from shoal.coordinator.core.fleet.liveness import deferred_nodes
from shoal.coordinator.core.fleet.state import Liveness, NodeState
from shoal.coordinator.core.placement.accuracy import comparison_of, preparation_of
from shoal.coordinator.core.placement.domains import Domain, domain_of, is_label, show_spread, weaker
from shoal.coordinator.core.placement.loadable import load_refusal
from shoal.coordinator.core.placement.model import Inputs, Judged, Move, Poisoning, Slot, Trial, Triple, requester_of
from shoal.coordinator.core.placement.preparable import prepare_refusal
from shoal.coordinator.core.placement.relax import (
    CATEGORY_SIZE,
    LIMIT_DIMENSIONS,
    RequiredRelaxation,
    manual_remedy,
    round_up,
)
from shoal.coordinator.core.placement.signatures import missing_signature, signature_expiry
from shoal.coordinator.core.prediction.demand import (
    CONV,
    ModelDemand,
    block_channels,
    demand_of,
    open_axis,
    served_profile,
)
from shoal.coordinator.core.prediction.load_law import LoadEstimate, load_needs
from shoal.coordinator.core.prediction.model import Correction, Prediction
from shoal.coordinator.core.prediction.predict import predict
from shoal.coordinator.core.prediction.region_residuals import RegionResiduals, region_residuals
from shoal.coordinator.core.prediction.residuals import class_of_device
from shoal.coordinator.core.prediction.roofline import service_parts
from shoal.policies.cel import Expression, device_fields, model_fields, node_fields
from shoal.policies.resolve import RTT_LABEL, node_rtt_s
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import Assignment, Measured, Served
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Device, EnergySource, Node, Rest
from shoal.types.profile import ModelProfile
from shoal.types.receipt import Receipt
from shoal.types.units import (
    DURATION,
    Watts,
    show_bytes,
    show_carbon,
    show_joules,
    show_number,
    show_quantity,
    show_seconds,
    show_usd_per_hour,
    show_watts,
)
from shoal.types.workload import Intent, Limits, ModelRef, Requirements, WorkloadKey

_Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""By input name, as a key."""


_BEYOND_TOLERANCE: Final = (Code.PREPARE_FAILED, Code.DRIFT_OVER)
_OTHER_TOLERANCE: Final = "another tolerance (require.precision), or a variant that was made for this precision"
_OTHER_RUNTIME: Final = "export the model for this runtime, or update the runtime"


LABELS_SHOWN: Final = 8
"""Names of labels that a refusal lists."""


class Constraint(IntEnum):
    """The order in which constraints are reported. The first that fails is the candidate's reason."""

    NODE = 0
    SELECTOR = 1
    RESIDENCY = 2
    SIGNATURE = 3
    PRECISION = 4
    LABEL = 5
    OPERATORS = 6
    CAPABILITY = 7
    POISONED = 8
    FAILED_HERE = 9
    SIGNATURE_AGE = 10
    MEMORY = 11
    LATENCY = 12
    COST = 13
    ENERGY = 14
    CARBON = 15
    POWER = 16
    UTILISATION = 17
    QUOTA = 18
    SPREAD = 19


HARD_CONSTRAINTS = frozenset({Constraint.SELECTOR, Constraint.RESIDENCY, Constraint.SIGNATURE, Constraint.PRECISION})
"""Constraints that a running replica must still meet while its documents are unchanged. The others were checked when it
was placed: figures that fluctuate (latency, cost, energy) must not move work by themselves."""


@dataclass(frozen=True, slots=True)
class PlacementFault:
    """One constraint that a candidate violates."""

    constraint: Constraint
    # The reason, with what was found and what was asked.
    refusal: Refusal
    # What would have to change so that the candidate meets it.
    relaxation: RequiredRelaxation


@dataclass(frozen=True, slots=True)
class Option:
    """One model of a workload on one device: everything that does not depend on the figures of the requirements."""

    # The node.
    state: NodeState
    # The device.
    device: Device
    # The model variant.
    model: ModelRef
    # As the document says, else as the model's profile says.
    precision: str
    # The model's profile.
    profile: ModelProfile
    # The device's capability receipt; None: not measured yet.
    receipt: Receipt | None
    # None where the prediction was refused.
    prediction: Prediction | None
    # Why there is no prediction; None where there is one.
    prediction_refusal: Refusal | None
    # USD/h of the whole device; NaN where unknown.
    cost: float
    # Why an assignment of this workload and model already failed here; None: none did.
    earlier_failure: Refusal | None
    # By input name: the only shapes that the workload serves.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # By what its answers are judged before it serves; None: by nothing.
    judged: Judged | None = None
    # True where the device would sleep without this replica.
    wakes: bool = False

    @property
    def slot(self) -> Slot:
        return Slot(self.state.name, self.device.name)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.state.name, self.device.name, self.model.variant

    def domain(self, spread: str) -> Domain:
        """What no other replica of its workload may share with it; empty: nothing."""
        return domain_of(spread, self.state, self.device.name)

    @property
    def where(self) -> str:
        """For people: marks a device that is not real."""
        return f"{self.state.name}/{self.device.name}" + (f" ({self.device.stand_in})" if self.device.stand_in else "")


class Scope:
    """One call of `place`: values that all its workloads share, computed once."""

    def __init__(self, inputs: Inputs, standing: Mapping[Slot, int] | None = None) -> None:
        """standing: number of replicas on each device that are not among the inputs."""
        self.inputs = inputs
        self._standing = standing or {}
        self._demands = dict[tuple[str, int, _Shapes, int], ModelDemand]()
        self._nodes = dict[str, dict[str, object]]()
        self._devices = dict[Slot, dict[str, object]]()
        self._models = dict[str, dict[str, object]]()
        self._selector_refusals = dict[tuple[str, str, str, str], Refusal | None]()
        self._rtts = dict[str, float]()
        self._unmeasured = dict[int, tuple[Option, Prediction | Refusal]]()
        """By the id of an option, which is held so that its id stays its own."""

    @cached_property
    def devices(self) -> tuple[tuple[NodeState, Device], ...]:
        """Every device of the region, sorted by node and device name."""
        nodes = self.inputs.fleet.nodes
        return tuple(
            (nodes[name], device)
            for name in sorted(nodes)
            for device in sorted(nodes[name].node.devices, key=lambda each: each.name)
        )

    def find(self, slot: Slot) -> tuple[NodeState, Device] | None:
        """One device; None: the region has none of that name."""
        state = self.inputs.fleet.nodes.get(slot.node)
        device = state.device(slot.device) if state is not None else None
        return (state, device) if state is not None and device is not None else None

    @cached_property
    def current(self) -> Mapping[WorkloadKey, tuple[tuple[str, Assignment], ...]]:
        """Each workload's current replicas (assigned, not draining) with their nodes, sorted by node and id."""
        found = dict[WorkloadKey, list[tuple[str, Assignment]]]()
        for node in sorted(self.inputs.desired):
            for assignment in sorted(self.inputs.desired[node], key=lambda each: each.id):
                if not assignment.draining:
                    found.setdefault(assignment.workload, []).append((node, assignment))
        return {key: tuple(pairs) for key, pairs in found.items()}

    @cached_property
    def placed_moves(self) -> tuple[Move, ...]:
        """Moves whose target has a place."""
        return tuple(move for move in self.inputs.moves if move.target)

    @cached_property
    def deferred_nodes(self) -> frozenset[str]:
        return deferred_nodes(self.inputs.fleet, self.inputs.now)

    @cached_property
    def residuals(self) -> RegionResiduals:
        return region_residuals(self.inputs.residuals)

    @cached_property
    def region(self) -> Mapping[str, object]:
        return self.inputs.region.fields

    @cached_property
    def moment(self) -> datetime:
        return datetime.fromtimestamp(self.inputs.wall, UTC)

    def demand(self, profile: ModelProfile, state: NodeState, device: Device, precision: str) -> ModelDemand:
        """`demand_of(profile)` on the device, computed once for each model and its shapes."""
        block = block_channels(device, state.node.arch, precision)
        key = profile.digest, profile.weight_bytes, tuple(profile.reference_shapes.items()), block
        if key not in self._demands:
            self._demands[key] = demand_of(profile, block)
        return self._demands[key]

    def profile(self, model: ModelRef, intent: Intent) -> ModelProfile:
        """The model's profile at the shapes that the workload serves, as it runs."""
        pushed = self.inputs.profiles[model.digest]
        return served_profile(pushed, intent.shapes, model.precision if model.prepared else "")

    def _expression_variables(self, option: Option) -> dict[str, object]:
        """The variables of a CEL expression about a candidate."""
        slot, variant = option.slot, option.model.variant
        if slot.node not in self._nodes:
            self._nodes[slot.node] = node_fields(option.state.node)
        if slot not in self._devices:
            self._devices[slot] = device_fields(option.device)
        if variant not in self._models:
            fields = model_fields(option.profile)
            self._models[variant] = {**fields, "precision": option.precision} if option.model.prepared else fields
        return {
            "node": self._nodes[slot.node],
            "device": self._devices[slot],
            "model": self._models[variant],
            "region": self.region,
            "now": self.moment,
        }

    def option(
        self, intent: Intent, model: ModelRef, state: NodeState, device: Device, served: tuple[Served, ...] = (),
        measured: Measured | None = None, earlier_failure: Refusal | None = None,
    ) -> Option:  # fmt: skip
        """One model on one device, with its prediction. measured, served: figures of a current replica there. Without
        them the warm-up of an earlier replica on that device is used."""
        profile = self.profile(model, intent)
        receipt = state.receipts.get(device.name)
        precision = model.precision or profile.precision
        shown = measured if measured is not None and measured.samples else None
        known = shown or self.inputs.measured.get(Trial(model.variant, state.name, device.name))
        demand = None if known is not None else self.demand(profile, state, device, precision)
        missed = None if demand is None else self._correction(model, device, receipt, precision, demand)
        load = None if known is not None else self._load(profile, device, receipt, intent.max_batch)
        repeats = None if known is None else self.residuals.repeats.get(class_of_device(device))
        answer = predict(
            device, receipt, profile, precision, intent.max_batch, known, served, demand, missed, load, repeats
        )
        prediction = answer if isinstance(answer, Prediction) else None
        return Option(
            state=state,
            device=device,
            model=model,
            precision=precision,
            profile=profile,
            receipt=receipt,
            prediction=prediction,
            prediction_refusal=answer if isinstance(answer, Refusal) else None,
            cost=self.inputs.costs.get(Slot(state.name, device.name), math.nan),
            earlier_failure=earlier_failure,
            shapes=intent.shapes,
            judged=Judged.of(
                precision,
                intent.samples_of(model.digest),
                preparation_of(intent, precision) if model.prepared else None,
                comparison_of(intent, device, precision),
            ),
            wakes=self.may_sleep(device) and not self._is_kept_awake(Slot(state.name, device.name), intent.key),
        )

    def prediction_unmeasured(self, option: Option) -> Prediction | Refusal:
        """What would be predicted of an option if the model had never run on that device. Computed once for each: it is
        what a replica's place is compared by with all others."""
        known = self._unmeasured.get(id(option))
        if known is None:
            known = self._unmeasured[id(option)] = option, self._predict_unmeasured(option)
        return known[1]

    def _predict_unmeasured(self, option: Option) -> Prediction | Refusal:
        demand = self.demand(option.profile, option.state, option.device, option.precision)
        missed = self._correction(option.model, option.device, option.receipt, option.precision, demand)
        return predict(
            option.device, option.receipt, option.profile, option.precision, demand=demand, correction=missed
        )

    def _correction(
        self, model: ModelRef, device: Device, receipt: Receipt | None, precision: str, demand: ModelDemand
    ) -> Correction | None:
        """Of what the receipt promises; None where the region measured nothing, or the receipt promises nothing."""
        if receipt is None or not self.inputs.residuals:
            return None
        parts = service_parts(demand, receipt.rates, precision)
        promised = math.fsum(parts)
        if not promised > 0:
            return None
        mix = tuple(part / promised for part in parts)
        return self.residuals.correction(model.variant, class_of_device(device), mix)

    def _load(self, profile: ModelProfile, device: Device, receipt: Receipt | None, batch: int) -> LoadEstimate | None:
        """What loading takes, by the region's loads; None where there are too few."""
        if not self.inputs.residuals:
            return None
        provider_bytes = 0 if receipt is None else receipt.provider_bytes
        return self.residuals.load(class_of_device(device), load_needs(profile, batch), provider_bytes)

    def may_sleep(self, device: Device) -> bool:
        """Whether a device sleeps while it has nothing to do: it can, and the region lets devices sleep."""
        return device.rest is not None and self.inputs.region.sleep_after_s is not None

    def _is_kept_awake(self, slot: Slot, workload: WorkloadKey) -> bool:
        """Whether others than this workload have something on the device."""
        return bool(self._standing.get(slot) or self._occupants.get(slot, frozenset()) - {workload})

    @cached_property
    def _occupants(self) -> Mapping[Slot, Set[WorkloadKey]]:
        """Workloads that have a replica on a device that does not drain, or capacity reserved there."""
        found = dict[Slot, set[WorkloadKey]]()
        for key, pairs in self.current.items():
            for node, assignment in pairs:
                found.setdefault(Slot(node, assignment.device), set()).add(key)
        for each in self.inputs.reserved:
            found.setdefault(each.slot, set()).add(WorkloadKey(GUEST_TENANT, each.bid))
        return found

    def replica_rate(self, intent: Intent, replicas: int) -> float:
        """Requests per second that each replica has to take; 0 without declared traffic."""
        return math.fsum(traffic.rate for traffic in intent.traffic) / max(1, replicas)

    def latency_s(self, option: Option, intent: Intent, replicas: int, *, high: bool = False) -> float:
        """Predicted p95 as the policy means it: at the worker, plus queueing, plus the RTT from the farthest origin
        and from where requests enter the region to the node, where the policy measures from there. NaN without a
        prediction; inf where the replica is overloaded.

        Queueing: mean wait of M/D/1 at the replica's own utilisation (docs/guides/prediction.md).
        """
        if option.prediction is None:
            return math.nan
        p95, p50 = option.prediction.latency_p95_s, option.prediction.latency_p50_s
        busy = self.replica_rate(intent, replicas) * p50.mid / max(1, option.device.parallelism)
        queue = math.inf if busy >= 1 else p50.mid * busy / (2 * (1 - busy))
        away = max((self.inputs.rtt_s.get(each.origin, 0.0) for each in intent.traffic), default=0.0)
        away += self._node_rtt_s(option.state.node)
        return (p95.high if high else p95.mid) + queue + (away if intent.require.latency_from_origin else 0.0)

    def _node_rtt_s(self, node: Node) -> float:
        """RTT from where requests enter the region to a node, in seconds, as its label says; NaN where that cannot be
        read, because an unknown distance must never count as a short one."""
        if RTT_LABEL not in node.labels:
            return 0.0
        if node.name not in self._rtts:
            self._rtts[node.name] = node_rtt_s(node.labels)
        return self._rtts[node.name]

    def carbon_g_per_h(self, option: Option, intent: Intent, replicas: int) -> float:
        """What `limits.carbon` bounds: emissions of a replica in gCO2/h, at the declared rate, or at full load without
        declared traffic. NaN where unknown."""
        if option.prediction is None:
            return math.nan
        rate = self.replica_rate(intent, replicas) or 1 / max(option.prediction.latency_p50_s.mid, 1e-9)
        return option.prediction.joules.mid * rate * 3600 / 3.6e6 * self.inputs.region.carbon_g_per_kwh

    def energy_rate(self, intent: Intent, replicas: int) -> float:
        """`replica_rate`; without declared traffic one request a second. Over it the power of staying awake is spread:
        at full load it would not count, and without requests nothing else would."""
        return self.replica_rate(intent, replicas) or 1.0

    def energy_j(self, option: Option, intent: Intent, replicas: int) -> float:
        """Joules that the region spends more for each inference: its own, and for a device that would sleep otherwise
        what it draws between inferences, above sleep. NaN where unknown."""
        if option.prediction is None:
            return math.nan
        joules, rest = option.prediction.joules.mid, option.device.rest
        if not option.wakes or rest is None or option.receipt is None:
            return joules
        rate = self.energy_rate(intent, replicas)
        awake = (awake_w(rest, option.receipt, rate * joules) - rest.asleep_w) / rate
        return max(joules, awake)

    def emissions_g_per_h(self, joules: float, intent: Intent, replicas: int) -> float:
        """Emissions in gCO2/h of one replica whose inferences take so many joules, at `energy_rate`: at full load, a
        faster device would emit more for the same requests. NaN where unknown."""
        return joules * self.energy_rate(intent, replicas) * 3600 / 3.6e6 * self.inputs.region.carbon_g_per_kwh

    def node_watts(self, option: Option, intent: Intent, replicas: int) -> float:
        """Power of the option's node with this replica on it. NaN where one of its devices, or what its meter counts,
        reports no power and was never measured.

        Devices whose power one meter counts count once, with the most that one of them reports, because a figure that
        contains another is not below it; else with the most of their receipts' idle power. The replica adds its joules
        at the declared rate (at full load without declared traffic), above idle, unless a reading contains it already.
        """
        state, device, prediction = option.state, option.device, option.prediction
        read, idle = dict[str, float](), dict[str, float]()
        for each in state.node.devices:
            root, reading = each.power_root, state.readings.get(each.name)
            receipt = state.receipts.get(each.name)
            if reading is not None:
                read[root] = _most(read.get(root, math.nan), reading.power_w)
            idle[root] = _most(idle.get(root, math.nan), math.nan if receipt is None else receipt.rates.idle_w)
        metered = {root for root, watts in read.items() if math.isfinite(watts)}
        total = math.fsum(read[root] if root in metered else watts for root, watts in idle.items())
        runs = any(
            (node, one.device, one.variant) == option.key for node, one in self.current.get(intent.key, ())
        )  # fmt: skip
        if prediction is None or (runs and device.power_root in metered):
            return total
        busy = min(1.0, self.replica_rate(intent, replicas) * prediction.latency_p50_s.mid or 1.0)
        idle_w = option.receipt.rates.idle_w if option.receipt is not None else 0.0
        active_w = prediction.joules.mid / max(prediction.latency_p50_s.mid, 1e-9)
        return total + busy * max(0.0, active_w - idle_w)

    def faults(
        self, option: Option, intent: Intent, require: Requirements, limits: Limits, *, is_running: bool = False
    ) -> tuple[PlacementFault, ...]:
        """Every constraint that `option` violates, except those that depend on what else is placed. is_running: see
        `figure_faults`."""
        return tuple(
            fault
            for found in (
                node_fault(option.state),
                *self.document_faults(option, require),
                self._label_fault(option, intent, require),
                self._blocked_fault(option, intent),
                self._prepare_fault(option, intent, require),
                self._shapes_fault(option, intent),
                *self._device_faults(option, require),
                self._poisoning_fault(option, intent),
                *self.figure_faults(option, intent, require, limits, is_running=is_running),
            )
            if (fault := found) is not None
        )

    def faults_of_place(self, option: Option, refused: Refusal | None) -> tuple[PlacementFault, ...]:
        """Those of `faults` that another device of the same kind may not have. refused: what the selector says of it;
        None: it admits it, or there is none."""
        found = (
            node_fault(option.state),
            _selector_fault(option, refused) if refused is not None else None,
            _silence_fault(option),
        )
        return tuple(fault for fault in found if fault is not None)

    def _blocked_fault(self, option: Option, intent: Intent) -> PlacementFault | None:
        """The fault of a place where an earlier move of this workload failed."""
        slot = option.slot
        refusal = self.inputs.blocked.get((intent.key, Trial(option.model.variant, slot.node, slot.device)))
        if refusal is None:
            return None
        return PlacementFault(
            Constraint.FAILED_HERE, refusal, manual_remedy(f"shoal model clear {option.model.source}")
        )

    def _prepare_fault(self, option: Option, intent: Intent, require: Requirements) -> PlacementFault | None:
        """The fault of a model that its node would have to prepare, where it cannot or where that gains nothing."""
        if not option.model.prepared:
            return None
        found = prepare_refusal(
            option.model,
            require,
            option.receipt,
            self.demand(option.profile, option.state, option.device, option.precision),
            option.where,
            samples=option.model.digest in intent.packs,
        )
        return PlacementFault(Constraint.PRECISION, *found) if found is not None else None

    def _shapes_fault(self, option: Option, intent: Intent) -> PlacementFault | None:
        """The fault of a device that takes no open shapes, where the model has one that the workload does not fix."""
        found = open_axis(option.profile, intent.shapes) if option.device.fixed_shapes else ""
        if not found:
            return None
        refusal = Refusal(Code.SHAPES_OPEN, f"{option.model.source} has {found}", f"fixed shapes on {option.where}")
        return PlacementFault(
            Constraint.OPERATORS, refusal, manual_remedy("say the only shapes that are served: spec.model.shapes")
        )

    def _poisoning_fault(self, option: Option, intent: Intent) -> PlacementFault | None:
        """The fault of a model that crashed this runtime version, for everybody's requests or for this requester's."""
        device = option.device
        triple = Triple(option.model.digest, device.provider, device.runtime_version)
        if not self.inputs.is_poisoned(triple, intent.key):
            return None
        found = f"it crashed {device.provider} {device.runtime_version} again and again"
        if Poisoning(triple, "") not in self.inputs.poisoned:
            found = f"{found} with requests of {requester_of(intent.key)}"
        refusal = Refusal(Code.POISONED, found, "a model that survives its runtime")
        return PlacementFault(
            Constraint.POISONED, refusal, manual_remedy("push another model, or change the runtime's version")
        )

    def document_faults(self, option: Option, require: Requirements) -> Iterator[PlacementFault]:
        """Violations of HARD_CONSTRAINTS: selector, residency, publisher's signature, precision."""
        if require.where and (refusal := self._selector_refusal(option, require.where)) is not None:
            yield _selector_fault(option, refusal)
        region = self.inputs.region
        if not require.may_be_in(region.name, region.residency):
            here = region.residency or region.name
            refusal = Refusal(Code.RESIDENCY, f"{region.name} lies in {here}", ", ".join(require.residency))
            # Residency is law, not a preference, so it is never proposed as a relaxation.
            elsewhere = f"run it in a region in {' or '.join(require.residency)}; residency is not relaxed"
            yield PlacementFault(Constraint.RESIDENCY, refusal, manual_remedy(elsewhere))
        if (missing := missing_signature(self.inputs.signatures, option.model, require)) is not None:
            yield PlacementFault(Constraint.SIGNATURE, *missing)
        if require.precisions and option.precision not in require.precisions:
            refusal = Refusal(Code.PRECISION_DENIED, option.precision, f"one of {', '.join(require.precisions)}")
            yield PlacementFault(
                Constraint.PRECISION, refusal, RequiredRelaxation(precision=option.precision, size=CATEGORY_SIZE)
            )

    def _label_fault(self, option: Option, intent: Intent, require: Requirements) -> PlacementFault | None:
        """The fault of a node without the label in whose value replicas must differ."""
        label, node = require.spread, option.state.node
        if not is_label(label) or label in node.labels:
            return None
        others = sorted({name for state in self.inputs.fleet.nodes.values() for name in state.node.labels})
        known = any(label in state.node.labels for state in self.inputs.fleet.nodes.values())
        found = f"{node.name} has no label {label}"
        if not known:
            found = f"no node has a label {label}, only {', '.join(others[:LABELS_SHOWN]) or 'nodes without labels'}"
        asked = f"per: {{label: {label}}}" if intent.per else f"spread: {show_spread(label)}"
        refusal = Refusal(Code.LABEL_MISSING, found, asked)
        relaxation = RequiredRelaxation(spread=weaker(label)[0], size=CATEGORY_SIZE)
        if intent.per:
            relaxation = manual_remedy(f"shoal node label {node.name} {label}=VALUE")
        return PlacementFault(Constraint.LABEL, refusal, relaxation)

    def preference(self, option: Option, intent: Intent) -> int:
        """The first alternative of `prefer` that admits the option, from 0 on; as many as there are where none does."""
        admits = (index for index, where in enumerate(intent.prefer) if self._selector_refusal(option, where) is None)
        return next(admits, len(intent.prefer))

    def _selector_refusal(self, option: Option, where: str) -> Refusal | None:
        """Why the expression does not admit the candidate; also its error where evaluation fails. Cached per
        candidate."""
        key = (where, *option.key)
        if key not in self._selector_refusals:
            try:
                self._selector_refusals[key] = Expression.compile(where).refusal(**self._expression_variables(option))
            except ShoalError as error:
                self._selector_refusals[key] = error.refusal
        return self._selector_refusals[key]

    def _device_faults(self, option: Option, require: Requirements) -> Iterator[PlacementFault]:
        """Violations by the device itself: unreadable, precision, operators, capability, expired signature, earlier
        failure."""
        receipt, device = option.receipt, option.device
        where = f"{option.state.name}/{device.name}"
        if (silence := _silence_fault(option)) is not None:
            yield silence
        computes = option.profile.flops > 0  # a model that only moves values needs no arithmetic of their type
        if computes and receipt is not None and receipt.precisions and option.precision not in receipt.precisions:
            found = f"{where} runs {', '.join(receipt.precisions)}"
            refusal = Refusal(Code.PRECISION_DENIED, found, option.precision)
            yield PlacementFault(
                Constraint.PRECISION, refusal, manual_remedy(f"add a variant in {' or '.join(receipt.precisions)}")
            )
        if receipt is not None and option.precision in receipt.precisions and receipt.rates.conv_flops:
            layers = sorted(
                {cost.operator for cost in option.profile.costs if cost.operator in CONV and cost.flops > 0}
            )
            if layers and option.precision not in receipt.rates.conv_flops:
                found = f"{device.provider} was not seen to run a convolution in {option.precision}"
                refusal = Refusal(Code.OP_UNSUPPORTED, found, ", ".join(layers))
                variant = manual_remedy(f"add a variant in {' or '.join(receipt.rates.conv_flops)}")
                yield PlacementFault(Constraint.OPERATORS, refusal, variant)
        if (known := self._load_refusal(option, require)) is not None:
            remedy = known.remedy if known.code in _BEYOND_TOLERANCE else _OTHER_RUNTIME
            yield PlacementFault(Constraint.OPERATORS, known, manual_remedy(remedy or _OTHER_TOLERANCE))
        yield from self._capability_faults(option, require, where)
        if (ended := signature_expiry(self.inputs.signatures, option.model, require, self.inputs.wall)) is not None:
            yield PlacementFault(Constraint.SIGNATURE_AGE, *ended)
        if option.earlier_failure is not None:
            yield PlacementFault(
                Constraint.FAILED_HERE,
                option.earlier_failure,
                manual_remedy(f"mend {where}: {option.earlier_failure.code}"),
            )

    def _load_refusal(self, option: Option, require: Requirements) -> Refusal | None:
        """What actual loads showed takes precedence over what the runtime reports about itself."""
        device, receipt = option.device, option.receipt
        load = Triple.of_load(option.model.digest, device, option.shapes, require.partial, option.judged)
        if (shown := self.inputs.unloadable.get(load)) is not None:
            return shown
        if receipt is None or receipt.runtime is None or receipt.runtime_version != device.runtime_version:
            return None
        return load_refusal(option.profile, receipt.runtime, device.runtime_version)

    def _capability_faults(self, option: Option, require: Requirements, where: str) -> Iterator[PlacementFault]:
        """Faults of the device's measurement: missing, outdated by a new driver or runtime, not from a probe, or too
        old."""
        receipt, device = option.receipt, option.device
        if option.prediction_refusal is not None:
            refusal = option.prediction_refusal
            yield PlacementFault(
                Constraint.CAPABILITY, refusal, manual_remedy(f"let {where} be measured (shoal-agent doctor)")
            )
        if receipt is None:
            return
        versions = (device.driver_version, device.runtime_version)
        if (receipt.driver_version, receipt.runtime_version) != versions:
            refusal = Refusal(Code.CAPABILITY_STALE, f"measured with {receipt.runtime_version}", " ".join(versions))
            yield PlacementFault(Constraint.CAPABILITY, refusal, manual_remedy(f"let {where} be measured again"))
        if require.measured_only and receipt.source != "probe":
            refusal = Refusal(Code.CAPABILITY_UNMEASURED, f"figures of {receipt.source}", "measured figures")
            yield PlacementFault(
                Constraint.CAPABILITY, refusal, RequiredRelaxation(unmeasured=True, size=CATEGORY_SIZE)
            )
        age = max(0.0, self.inputs.wall - receipt.measured_at)
        if require.measured_within_s is not None and age > require.measured_within_s:
            found, asked = f"measured {show_seconds(age)} ago", f"within {show_seconds(require.measured_within_s)}"
            far = age / require.measured_within_s - 1 if require.measured_within_s > 0 else CATEGORY_SIZE
            give = RequiredRelaxation(within_s=round_up(age * 1.1, DURATION), size=far)
            yield PlacementFault(Constraint.CAPABILITY, Refusal(Code.CAPABILITY_STALE, found, asked), give)

    def figure_faults(
        self, option: Option, intent: Intent, require: Requirements, limits: Limits, *, is_running: bool = False
    ) -> Iterator[PlacementFault]:
        """Violations of bounds on figures that fluctuate: latency, cost, energy, carbon, power.

        is_running: a replica serves there. Of estimated energy the middle counts then, since the upper end is what
        other processors draw, and no measurement of this one would bring it down.
        """
        if option.prediction is None:
            return
        replicas = require.replicas
        if (bound := require.latency_p95_s) is not None:
            high = self.latency_s(option, intent, replicas, high=True)
            if not high <= bound:
                mid = self.latency_s(option, intent, replicas)
                rate = self.replica_rate(intent, replicas)
                found = (
                    f"overloaded by {show_number(rate)} requests/s"
                    if mid == math.inf
                    else f"label `{RTT_LABEL}` of {option.state.name} is no duration"
                )
                if mid < math.inf:
                    # A plan's column P95 has neither.
                    more = ("queueing" if rate else "", "network" if require.latency_from_origin else "")
                    beyond = f" with {' and '.join(filter(None, more))}" if any(more) else ""
                    found = f"p95 {show_seconds(mid)}{beyond}, up to {show_seconds(high)}"
                refusal = Refusal(Code.SLO_UNREACHABLE, found, f"p95 of at most {show_quantity(bound, DURATION)}")
                yield PlacementFault(Constraint.LATENCY, refusal, _raise_bound("latency_p95_s", high, bound))
        joules, is_estimated = option.prediction.joules, option.prediction.energy_source is EnergySource.ESTIMATED
        figures = (
            (Constraint.COST, Code.COST_OVER, "cost", limits.cost, option.cost, show_usd_per_hour, replicas),
            (
                Constraint.ENERGY,
                Code.ENERGY_OVER,
                "energy",
                limits.energy,
                joules.mid if is_running and is_estimated else joules.high,
                show_joules,
                1,
            ),
            (
                Constraint.CARBON,
                Code.CARBON_OVER,
                "carbon",
                limits.carbon,
                self.carbon_g_per_h(option, intent, replicas),
                show_carbon,
                replicas,
            ),
            (
                Constraint.POWER,
                Code.POWER_OVER,
                "node_power",
                limits.node_power,
                math.nan if limits.node_power is None else self.node_watts(option, intent, replicas),
                show_watts,
                1,
            ),
        )
        for order, code, name, limit, value, show, shares in figures:
            if limit is None or value * shares <= limit:
                continue
            found = "unknown here" if math.isnan(value) else show(value) + (f" x {shares}" if shares > 1 else "")
            yield PlacementFault(
                order,
                Refusal(code, found, f"at most {show_quantity(limit, _DIMENSIONS[name])}"),
                _raise_bound(name, value * shares, limit),
            )


def node_fault(state: NodeState) -> PlacementFault | None:
    """Why nothing new may be placed on this node; None where it may."""
    name = state.name
    if state.revoked:
        refusal = Refusal(Code.CERT_REVOKED, f"{name} was revoked", "a member of the region")
        return PlacementFault(Constraint.NODE, refusal, manual_remedy(f"join {name} again with a new token"))
    if state.cordoned:
        refusal = Refusal(Code.NODE_CORDONED, f"{name} is cordoned", "a node that takes new work")
        return PlacementFault(Constraint.NODE, refusal, manual_remedy(f"shoal uncordon {name}"))
    if state.liveness in (Liveness.SUSPECT, Liveness.LOST):
        code = Code.NODE_SUSPECT if state.liveness is Liveness.SUSPECT else Code.NODE_LOST
        refusal = Refusal(code, f"{name} is silent", "a node that reports")
        return PlacementFault(Constraint.NODE, refusal, manual_remedy(f"bring {name} back"))
    if state.quarantined:
        found = f"{name} reports what cannot be: {state.refusal.found if state.refusal else ''}"
        refusal = Refusal(Code.NODE_QUARANTINED, found, "telemetry that can be true")
        return PlacementFault(Constraint.NODE, refusal, manual_remedy(f"look at the sensors and the agent of {name}"))
    if state.liveness is Liveness.NEVER_SEEN or not state.has_full_status:
        refusal = Refusal(Code.NODE_NOT_READY, f"{name} has not reported yet", "a node that reports")
        return PlacementFault(Constraint.NODE, refusal, manual_remedy(f"start the agent on {name}"))
    if not state.front_ready:
        refusal = Refusal(Code.NODE_NOT_READY, f"the front of {name} does not answer yet", "a front that serves")
        return PlacementFault(Constraint.NODE, refusal, manual_remedy(f"look at the agent's log on {name}"))
    return None


def does_not_answer(state: NodeState, device: Device) -> bool:
    """Whether the node reported all of its devices but this one."""
    return state.has_full_status and device.name not in state.readings


def _selector_fault(option: Option, refusal: Refusal) -> PlacementFault:
    admits = f'node.name == "{option.state.name}" && device.name == "{option.device.name}"'
    return PlacementFault(Constraint.SELECTOR, refusal, RequiredRelaxation(where=admits, size=CATEGORY_SIZE))


def _silence_fault(option: Option) -> PlacementFault | None:
    """The fault of a device that its node does not report."""
    state, device, where = option.state, option.device, f"{option.state.name}/{option.device.name}"
    if not does_not_answer(state, device):
        return None
    silent = state.silent.get(device.name)
    refusal = Refusal(Code.DEVICE_LOST, f"{where} does not answer its node", "a device that can be read")
    if silent is not None:
        found = Refusal.parse(silent.reason, silent.code).found
        refusal = Refusal(silent.code, f"{where}: {found}", refusal.asked)
    return PlacementFault(Constraint.NODE, refusal, manual_remedy(f"look at the driver of {where}"))


def awake_w(rest: Rest, receipt: Receipt, working_w: float) -> Watts:
    """Watts of a device that stays awake for one replica. working_w: joules of its inferences per second; only the
    part above idle power adds to the draw."""
    return Watts(rest.idle_w + max(0.0, 1.0 - rest.idle_w / receipt.rates.active_w) * working_w)


_DIMENSIONS: Final = {"latency_p95_s": DURATION, **LIMIT_DIMENSIONS}


def _raise_bound(name: str, value: float, bound: float) -> RequiredRelaxation:
    """A bound that admits `value`, or no bound where the value is unknown or infinite."""
    if not math.isfinite(value):
        far, room = 10 * CATEGORY_SIZE, math.inf
    else:
        far, room = (value / bound - 1 if bound > 0 else CATEGORY_SIZE), round_up(value, _DIMENSIONS[name], bound)
    bounds: dict[str, Any] = {name: room}
    return RequiredRelaxation(size=far, **bounds)


def _most(a: float, b: float) -> float:
    """The larger of the two that are known; NaN: neither is."""
    return b if math.isnan(a) else a if math.isnan(b) else max(a, b)


def memory_fault(option: Option, needed: float, admissible: float) -> PlacementFault | None:
    """The fault where fewer than `needed` bytes are admissible on the device; else None."""
    if needed <= admissible:
        return None
    slot = f"{option.state.name}/{option.device.name}"
    found = f"{show_bytes(max(0.0, admissible))} free on {slot}"
    refusal = Refusal(Code.MEMORY_SHORT, found, show_bytes(needed))
    return PlacementFault(
        Constraint.MEMORY, refusal, manual_remedy(f"free {show_bytes(needed - max(0.0, admissible))} on {slot}")
    )


def utilisation_fault(
    option: Option, needed: float, booked: float, most: float, replicas: int
) -> PlacementFault | None:
    """The fault where declared traffic would fill the device beyond the share `most`; else None. More replicas share
    the traffic, so it proposes the number at which each fits, up to 100."""
    if needed <= 0 or booked + needed <= most:
        return None
    slot = f"{option.state.name}/{option.device.name}"
    found, asked = f"{booked:.0%} of {slot} is taken", f"{needed:.0%} more, at most {most:.0%} in all"
    room = most - booked
    wanted = math.ceil(replicas * needed / room) if room > 0 else 0
    give = (
        RequiredRelaxation(replicas=wanted, size=wanted / replicas - 1)
        if replicas < wanted <= 100
        else manual_remedy(f"take other work off {slot}")
    )
    return PlacementFault(Constraint.UTILISATION, Refusal(Code.UTILISATION_SHORT, found, asked), give)
