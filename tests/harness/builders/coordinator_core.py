"""A small region for tests: builders of its nouns, and agents that follow their desired sets."""

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.coordinator.controllers.workloads.migrations import underway
from shoal.coordinator.core.fleet import updates
from shoal.coordinator.core.fleet.liveness import update_liveness
from shoal.coordinator.core.fleet.state import Fleet, LivenessTiming, NodeState
from shoal.coordinator.core.migration.advance import AdvanceResult, advance, migration_effects
from shoal.coordinator.core.migration.machine import start
from shoal.coordinator.core.migration.model import Cause, Migration, PlannedState, ReplicaPlace
from shoal.coordinator.core.migration.triggers.view import NO_TURNS
from shoal.coordinator.core.placement.changes import is_material
from shoal.coordinator.core.placement.model import Aim, Inputs, PlacementPlan, RegionFacts, Slot
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.workloads.audit import differences
from shoal.coordinator.core.workloads.decide import inputs_of, next_placement
from shoal.coordinator.core.workloads.invariants import RegionSnapshot, check
from shoal.coordinator.core.workloads.kept import KeptDecisions
from shoal.coordinator.core.workloads.model import (
    Decision,
    DelegatedWorkload,
    DesiredContent,
    ModelFetch,
    ReconcilerMemory,
    Reference,
    RegionEvent,
    RegionState,
)
from shoal.coordinator.core.workloads.replica_counts import WantedReplicas
from shoal.types.assignment import (
    AgreementCounts,
    Assignment,
    Measured,
    Observed,
    PeerTrust,
    Phase,
    Served,
    Status,
    Subscriptions,
)
from shoal.types.codes import Code, Refusal
from shoal.types.device import Device, DeviceKind, EnergySource, Node, Reading, Role
from shoal.types.latency import Counts, bucket_of
from shoal.types.migration import Against, MigrationRule, PackRef, Recording, Verdict
from shoal.types.profile import PROFILE_VERSION, ModelProfile, OperatorCost
from shoal.types.receipt import Rates, Receipt
from shoal.types.units import Bytes, Elapsed, Joules, PerSecond, Seconds, UsdPerHour, Wall, Watts
from shoal.types.workload import (
    Intent,
    Limits,
    ModelRef,
    PartitionRule,
    Quota,
    Relaxation,
    Requirements,
    Spread,
    Standby,
    Traffic,
    WorkloadKey,
)

MIB = 2**20
GIB = 2**30
MOST_STEPS = 20
PLANS_EVERY = int(os.environ.get("SHOAL_PLANS_EVERY", "4"))
"""Of the steps that change nothing one of so many is planned too, from what was decided before and from everything;
every other step always is. `make test-long` plans each."""
START = 1_700_000_000.0
"""Wall clock when the elapsed time is 0."""
DIGEST = "sha256:" + "a" * 64
SMALL = "sha256:" + "b" * 64


WRONG = "y: max_rel 0.8, at most 0.001"
"""Reason in the verdicts of an agent with wrong answers."""


def counts_of(seconds: Sequence[float]) -> Counts:
    found = Counter(map(bucket_of, seconds))
    return tuple(found[at] for at in range(max(found, default=-1) + 1))


def device(name: str = "cpu0", *, kind: str = "cpu", memory: int = 8 * GIB, **more: Any) -> Device:
    values: dict[str, Any] = {"driver_version": "1", "runtime_version": "1.31", "provider": f"{kind}-provider"} | more
    return Device(name, DeviceKind(kind), "maker", "model", "driver", memory_bytes=Bytes(memory), **values)


def node(
    name: str,
    *devices: Device,
    labels: Mapping[str, str] | None = None,
    boot: str = "boot-1",
    role: Role = Role.AGENT,
    subscribes: bool = False,
) -> Node:
    """A gateway has no devices."""
    return Node(
        name=name,
        region="eu-west",
        role=role,
        labels={"entry": "*", **(labels or {})},
        agent_version="0",
        os="linux",
        arch="x86_64",
        memory_bytes=Bytes(16 * GIB),
        memory_limit_bytes=Bytes(16 * GIB),
        devices=devices or (() if role is Role.GATEWAY else (device(),)),
        data_address=f"{name}:8001",
        metrics_address=f"{name}:9000",
        boot_id=boot,
        subscribes=subscribes,
    )


def receipt(
    of: Node, on: Device, *, flops: float = 1e11, watts: float = 20.0, at: float = START, **more: Any
) -> Receipt:
    rates = Rates(
        matmul_flops={"fp32": flops, "int8": 2 * flops},
        conv_flops={"fp32": flops, "int8": 2 * flops},
        elementwise_bytes=1e10,
        copy_bytes=1e10,
        launch_s=Seconds(1e-5),
        node_s=Seconds(1e-6),
        load_bytes=1e8,
        idle_w=Watts(watts / 4),
        active_w=Watts(watts),
        energy_source=EnergySource.ESTIMATED,
    )
    values: dict[str, Any] = {
        "node": of.name,
        "device": on.name,
        "provider": on.provider,
        "driver_version": on.driver_version,
        "runtime_version": on.runtime_version,
        "precisions": ("fp32", "int8"),
        "operators": (),
        "rates": rates,
        "memory_bytes": on.memory_bytes,
        "spread": 0.05,
        "measured_at": Wall(at),
        "probe_s": Seconds(2.0),
        "emulated": on.emulated,
        "source": "probe",
    }
    return Receipt(**(values | more))


def reading(on: Device, *, free: float | None = None, at: float = START, **more: Any) -> Reading:
    values: dict[str, Any] = {"utilisation": 0.1, "temperature_c": 40.0, "power_w": 10.0, "energy_j": math.nan} | more
    return Reading(on.name, Bytes(int(on.memory_bytes * 0.9 if free is None else free)), taken_at=Wall(at), **values)


def profile(digest: str = DIGEST, *, size: int = 10 * MIB, flops: float = 1e9, precision: str = "fp32") -> ModelProfile:
    return ModelProfile(
        digest=digest,
        size_bytes=Bytes(size),
        ir_version=8,
        opset=17,
        domains={"": 17},
        producer="test",
        precision=precision,
        inputs=(),
        outputs=(),
        reference_shapes={"x": (1, 3, 224, 224)},
        costs=(
            OperatorCost("Conv", 20, 0.8 * flops, 2e7),
            OperatorCost("MatMul", 5, 0.2 * flops, 1e7),
            OperatorCost("Relu", 20, 1e6, 8e6),
            OperatorCost("Transpose", 3, 0.0, 2e6),
        ),
        weight_bytes=Bytes(int(0.95 * size)),
        activation_bytes=Bytes(4 * MIB),
        confident=True,
        metadata={},
        version=PROFILE_VERSION,
    )


def require(**changes: Any) -> Requirements:
    values: dict[str, Any] = {
        "latency_p95_s": None,
        "latency_from_origin": True,
        "where": "",
        "residency": (),
        "precisions": (),
        "replicas": 1,
        "spread": Spread.NODE,
        "standby": Standby.NONE,
        "recovery_s": None,
        "measured_only": False,
        "measured_within_s": None,
    }
    return Requirements(**(values | changes))


def intent(name: str = "ocr", *, tenant: str = "shop", models: tuple[ModelRef, ...] = (), **changes: Any) -> Intent:
    asked = require(**{key: changes.pop(key) for key in tuple(changes) if key in Requirements.__dataclass_fields__})
    values: dict[str, Any] = {
        "key": WorkloadKey(tenant, name),
        "revision": 1,
        "labels": {},
        "policy": "policy",
        "models": models or (ModelRef("model.onnx", DIGEST, ""),),
        "require": asked,
        "limits": Limits(),
        "weights": {"latency": 1.0},
        "relax": (),
        "traffic": (),
        "partition": PartitionRule(),
        "priority": 100,
        "shared_worker": False,
    }
    return Intent(**(values | changes))


def relaxation(base: Intent, change: str, **changes: Any) -> Relaxation:
    return Relaxation(change, replace(base.require, **changes), base.limits)


def traffic(rate: float, origin: str = "eu-west") -> tuple[Traffic, ...]:
    return (Traffic(origin, PerSecond(rate), PerSecond(rate)),)


def fleet_of(*nodes: Node, now: float = 0.0, flops: Mapping[str, float] | None = None, **more: Any) -> Fleet:
    """All of `nodes` connected, measured and reporting, at `now`."""
    fleet = Fleet()
    wall = Wall(START + now)
    for each in nodes:
        fleet = updates.connect(fleet, each, 1, Elapsed(now), wall)
        rate = (flops or {}).get(each.name, 1e11)
        measured = tuple(receipt(each, on, flops=rate, **more) for on in each.devices)
        fleet, refusals = updates.merge_receipts(fleet, each.name, measured, Elapsed(now), wall)
        assert not refusals
        fleet, refusals = merge_status(fleet, each.name, 1, status(each, 1, at=now), Elapsed(now), wall)
        assert not refusals
    return update_liveness(fleet, Elapsed(now))[0]


def merge_status(
    fleet: Fleet, node: str, epoch: int, told: Status, now: Elapsed, wall: Wall
) -> tuple[Fleet, tuple[Refusal, ...]]:
    """The fleet after a node's status, and what of it was refused; the same fleet where nothing of it counts."""
    known = fleet.nodes.get(node)
    state, refusals = updates.with_status(known, node, epoch, told, now, wall)
    return (fleet if state is None or state is known else fleet.with_node(state)), refusals


def status(of: Node, sequence: int, *, at: float, epoch: int = 1, **changes: Any) -> Status:
    values: dict[str, Any] = {
        "node": of.name,
        "epoch": epoch,
        "sequence": sequence,
        "full": True,
        "version": None,
        "observed": (),
        "gone": (),
        "readings": tuple(reading(on, at=START + at) for on in of.devices),
        "ingress": (),
        "taken_at": Wall(START + at),
        "front_ready": True,
    }
    return Status(**(values | changes))


def inputs(fleet: Fleet, *intents: Intent, now: float = 0.0, **changes: Any) -> Inputs:
    values: dict[str, Any] = {
        "region": RegionFacts("eu-west", "eu"),
        "fleet": fleet,
        "intents": intents,
        "profiles": {DIGEST: profile(), SMALL: profile(SMALL, size=3 * MIB, precision="int8")},
        "desired": {},
        "now": Elapsed(now),
        "wall": Wall(START + now),
    }
    return Inputs(**(values | changes))


def observation(of: Assignment, phase: Phase, *, at: float = 0.0, **changes: Any) -> Observed:
    values: dict[str, Any] = {
        "assignment": of.id,
        "workload": of.workload,
        "model": of.model,
        "device": of.device,
        "phase": phase,
        "since": Wall(START + at),
        "code": None,
        "reason": "",
        "retry_at": None,
        "gives_up_at": None,
        "in_flight": 0,
        "restarts": 0,
        "measured": None,
        "served": (),
    }
    return Observed(**(values | changes))


def warm(p50: float = 0.02, memory: int = 60 * MIB, samples: int = 16, p95_over_p50: float = 1.2) -> Measured:
    return Measured(
        *(Seconds(1.0), Bytes(memory), Seconds(p50), Seconds(p95_over_p50 * p50)),
        *(Joules(p50 * 20), EnergySource.ESTIMATED, samples),
    )


@dataclass
class CoreAgent:
    """A node that does what its desired set says, on virtual time."""

    # As its hello describes it.
    node: Node
    # Epoch of its session.
    epoch: int = 1
    # Number of its last status in the session.
    sequence: int = 1
    # False: its process is dead.
    up: bool = True
    # False: nothing passes between it and the coordinator, though it runs.
    heard: bool = True
    # Seconds from assigned to ready.
    load_s: float = 2.0
    # Measured latency of its replicas, in seconds.
    p50_s: float = 0.02
    # And by how much the slowest take longer.
    p95_over_p50: float = 1.2
    # Code with which every load fails; None: loads succeed.
    fail: Code | None = None
    # Code with which the load of this assignment fails; None: as `fail` says.
    refuses: Callable[[Assignment], Code | None] = lambda _: None
    # Whether it has not taken this assignment up, and does not mention it.
    ignores: Callable[[Assignment], bool] = lambda _: False
    # True: what crashes does so while it loads, with no request in flight.
    at_load: bool = True
    # Seconds from loaded to verified.
    verify_s: float = 1.0
    # True: its answers differ from the other replicas', so its verdicts fail.
    wrong: bool = False
    # What each of its ready replicas reports as served.
    served: tuple[Served, ...] = ()
    # Latency histogram that each of its ready replicas reports.
    latencies: Counts = ()
    # Requests to other regions that its status reports.
    agreement_counts: tuple[AgreementCounts, ...] = ()
    # As its status reports.
    front_ready: bool = True
    # What it subscribes to; None: it does not report that.
    subscriptions: Subscriptions | None = None
    # Ids of assignments that keep failing.
    stuck: set[str] = field(default_factory=set)
    # Workloads whose replicas crash once they are loaded.
    crashing: set[WorkloadKey] = field(default_factory=set)
    # Workload of every crash so far.
    crashed: list[WorkloadKey] = field(default_factory=list)
    # Requests that a draining replica still has.
    in_flight: int = 0
    # Assignment id -> virtual seconds at which its load began.
    since: dict[str, float] = field(default_factory=dict)
    # Assignment id -> failed attempts.
    restarts: dict[str, int] = field(default_factory=dict)
    # The last desired set that reached it.
    content: DesiredContent = field(default_factory=DesiredContent)
    # Assignment ids in the order in which their loads began.
    started: list[str] = field(default_factory=list)
    # Assignment id -> its verdict.
    verified: dict[str, Verdict] = field(default_factory=dict)
    # (model, sample pack) -> assignment that has just recorded its answers as the reference.
    recorded: dict[tuple[str, str], str] = field(default_factory=dict)
    # Migration -> virtual seconds since when another region's answers are compared with this node's.
    compared: dict[str, float] = field(default_factory=dict)
    # Ids of assignments that became ready without verification.
    unasked: set[str] = field(default_factory=set)

    @property
    def _warm(self) -> Measured:
        return warm(self.p50_s, p95_over_p50=self.p95_over_p50)

    @property
    def why(self) -> str:
        """Reason in its verdicts."""
        return WRONG if self.wrong else ""

    def reports(self, now: float) -> tuple[Observed, ...]:
        names = {each.id for each in self.content.assignments}
        self.since = {name: at for name, at in self.since.items() if name in names}
        return tuple(self._observe(each, now) for each in self.content.assignments if not self.ignores(each))

    def _observe(self, each: Assignment, now: float) -> Observed:
        if each.staged:
            self.since.pop(each.id, None)
            return observation(each, Phase.GONE if each.draining else Phase.STAGED)
        if each.id not in self.since:
            self.since[each.id] = now
            self.started.append(each.id)
            self.unasked.discard(each.id)
        if each.draining:
            return observation(each, Phase.DRAINING, in_flight=self.in_flight)
        if now - self.since[each.id] < self.load_s:
            return observation(each, Phase.LOADING, gives_up_at=Wall(START + now + 60))
        if each.workload in self.crashing:
            self.restarts[each.id] = self.restarts.get(each.id, 0) + 1
            self.crashed.append(each.workload)
            return observation(
                each,
                Phase.FAILED,
                code=Code.POISONED if self.restarts[each.id] >= 3 else Code.WORKER_CRASHED,
                reason="as told",
                retry_at=Wall(START + now + 1),
                restarts=self.restarts[each.id],
                crashed_at_load=self.at_load,
            )
        fail = self.refuses(each) or self.fail
        if fail is not None or each.id in self.stuck:
            self.restarts[each.id] = self.restarts.get(each.id, 0) + 1
            return observation(
                each,
                Phase.FAILED,
                code=fail or Code.LOAD_FAILED,
                reason="as told",
                retry_at=Wall(START + now + 1),
                restarts=self.restarts[each.id],
                crashed_at_load=self.at_load,
            )
        asked = each.verification
        recording = asked.recording if asked is not None else None
        if asked is not None and recording is Recording.HERE and (asked.beside or self._is_due(each, now)):
            self.recorded[each.model, asked.pack] = each.id
            self.verified[each.id] = Verdict(
                asked.migration, True, None, "", asked.against, asked.inputs, asked.samples, recorded=True
            )
            return observation(each, Phase.READY, measured=self._warm, verdict=self.verified[each.id])
        if asked is not None and asked.beside:
            held = self.verified.get(each.id)
            begun = self.compared.setdefault(asked.migration, now)
            if now - begun >= self.verify_s and (held is None or held.migration != asked.migration):
                code = Code.VERIFY_FAILED if self.wrong else None
                held = Verdict(
                    asked.migration,
                    not self.wrong,
                    code,
                    self.why,
                    asked.against,
                    asked.inputs,
                    asked.samples,
                )
                self.verified[each.id] = held
            return observation(
                each, Phase.READY, measured=warm(), verdict=held, served=self.served, latencies=self.latencies
            )
        if asked is None or asked.against is Against.NONE:
            self.unasked.add(each.id)
        if asked is None or each.id in self.unasked or each.id in self.verified:
            verdict = self.verified.get(each.id)
            return observation(
                each,
                Phase.READY,
                measured=self._warm,
                verdict=verdict,
                served=self.served,
                latencies=self.latencies,
            )
        if recording is not None or not self._is_due(each, now):
            return observation(each, Phase.VERIFYING, gives_up_at=Wall(START + now + 60))
        code = Code.VERIFY_FAILED if self.wrong else None
        verdict = Verdict(
            asked.migration,
            not self.wrong,
            code,
            self.why,
            asked.against,
            asked.inputs,
            asked.samples,
        )
        if self.wrong:
            again = Wall(START + now + 60)
            return observation(each, Phase.FAILED, code=code, reason="too far", verdict=verdict, gives_up_at=again)
        self.verified[each.id] = verdict
        return observation(
            each, Phase.READY, measured=self._warm, verdict=verdict, served=self.served, latencies=self.latencies
        )

    def _is_due(self, each: Assignment, now: float) -> bool:
        return now - self.since[each.id] >= self.load_s + self.verify_s


class CoreRegion:
    """A coordinator's loop on virtual time: heartbeats, liveness, decision, sending. Every step checks that no
    invariant is violated and that the same step again changes nothing."""

    def __init__(
        self, *nodes: Node, flops: Mapping[str, float] | None = None, timing: LivenessTiming | None = None
    ) -> None:
        self.agents = {each.name: CoreAgent(each) for each in nodes}
        self.fleet = fleet_of(*nodes, flops=flops)
        if timing is not None:
            self.fleet = replace(self.fleet, timing=timing)
        self.intents: tuple[Intent, ...] = ()
        self.desired: Mapping[str, DesiredContent] = {}
        self.memory = ReconcilerMemory()
        self.costs: dict[Slot, UsdPerHour] = {}
        self.quotas: dict[str, Quota] = {}
        self.delegated: dict[WorkloadKey, DelegatedWorkload] = {}
        self.peers: tuple[PeerTrust, ...] = ()
        self.migrations: dict[str, Migration] = {}
        self.references: dict[tuple[str, str], Reference] = {}
        self.facts = RegionFacts("eu-west", "eu")
        self.fetched: tuple[ModelFetch, ...] = ()
        self.sensors: dict[str, Callable[[Reading], Reading]] = {}
        self.now = 0.0
        self.events: list[RegionEvent] = []
        self.told: list[Mapping[str, DesiredContent]] = []
        self.decision: Decision | None = None
        self.profiles = {DIGEST: profile(), SMALL: profile(SMALL, size=3 * MIB, precision="int8")}
        self.kept = KeptDecisions()
        self.turns = NO_TURNS
        self.prepared_turns = 0
        """How often `kept` prepares something after each decision."""
        self.counts = WantedReplicas()
        self.decided_about: list[int] = []
        """Workloads that each decision was about which used what had been decided before."""
        self._noted: Mapping[str, NodeState] = {}
        # Since the last one that changed something.
        self._quiet_steps = 0

    def run(self, seconds: float, *, tick: float = 0.5) -> Decision:
        """Take steps of `tick` until `seconds` have passed; return the last decision."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.step(tick)
        assert self.decision is not None
        return self.decision

    def step(self, tick: float = 0.5) -> Decision:
        self.now = round(self.now + tick, 6)
        now, wall = Elapsed(self.now), Wall(START + self.now)
        for name, agent in self.agents.items():
            if agent.up and agent.heard:
                agent.sequence += 1
                beat = status(
                    agent.node, agent.sequence, at=self.now, epoch=agent.epoch, observed=agent.reports(self.now),
                    readings=self._readings(name), agreement_counts=agent.agreement_counts,
                    front_ready=agent.front_ready, subscriptions=agent.subscriptions,
                )  # fmt: skip
                self.fleet, refusals = merge_status(self.fleet, name, agent.epoch, beat, now, wall)
                assert not refusals
                for key, by in agent.recorded.items():
                    pack = PackRef(f"sha256:{by}", Bytes(1000), 16, answers=True)
                    self.references.setdefault(key, Reference(pack, by))
                agent.recorded.clear()
        self.fleet, _ = update_liveness(self.fleet, now)
        remembered, world, turns, is_changed = self.memory, self.world(), self.turns, False
        for _ in range(MOST_STEPS):
            remembered, world, turns = self.memory, self.world(), self.turns
            before = self._assignments()
            advanced = advance(world, self.migrations, now, wall, turns=self.turns)
            # What a coordinator goes on with, and the same by value: what is kept is of these very objects.
            memory = self._check_kept(world, advanced, now, wall)
            self.decision, self.desired, self.memory = advanced.decision, advanced.decision.desired, memory
            self.events += advanced.decision.events
            is_changed = bool(advanced.changed)
            self.migrations |= advanced.changed
            self._send()
            # Where nothing left, there is no room that the next step would give to others. A replica that came may yet
            # take the reason from a move, which the next step then ends.
            after = self._assignments()
            is_quiet = not advanced.changed and self.memory.residuals is remembered.residuals
            if is_quiet and before <= after and (before == after or not underway(self.migrations.values())):
                break
        decision = self.decision
        assert decision is not None
        after_it = self.world()
        # Where the step left the world as it found it, the next one is asked the very same.
        if is_changed or after_it != world:
            again = advance(after_it, self.migrations, now, wall, turns=turns)
            assert again.changed == {}
            assert again.decision.desired == decision.desired
            assert again.decision.memory == decision.memory
            if decision.memory == remembered:  # a plan depends on the memory before it
                assert again.decision.plan.hash == decision.plan.hash
        violations = check(
            RegionSnapshot(
                self.fleet, self.intents, self.desired, self.memory, decision.waits, now, wall,
                frozenset(each.workload for each in decision.plan.workloads if each.refusal is None),
                moves=underway(self.migrations.values()), quotas=self.quotas,
            )
        )  # fmt: skip
        assert violations == (), violations
        return decision

    def _check_kept(self, world: RegionState, whole: AdvanceResult, now: Elapsed, wall: Wall) -> ReconcilerMemory:
        """A decision about what changed is the one about everything, and starts the same moves. Returns its memory."""
        plan = self._check_plan(world, whole, now, wall)
        part = advance(world, self.migrations, now, wall, kept=self.kept, turns=self.turns)
        if plan is not None:  # it is not stored
            effects = migration_effects(world, self.migrations, now)
            assert next_placement(world, effects, now, wall, self.kept).plan(False).hash == plan.hash
        assert differences(world, part.decision, whole.decision) == ()
        assert repr(part.changed) == repr(whole.changed)  # unknown figures are not equal to themselves
        assert part.decision.events == whole.decision.events
        assert part.decision.replacements == whole.decision.replacements
        self.kept.adopt(world, migration_effects(world, self.migrations, now), part.decision, now)
        self.kept.learn(part.decision.memory)
        for _ in range(self.prepared_turns):
            self.kept.prepare(part.decision.memory)
        self.decided_about.append(len(part.decision.plan.workloads))
        # Triggers, which see those that may move and what the others take, come to the same.
        assert repr((part.move_holds, part.new_holds)) == repr((whole.move_holds, whole.new_holds))
        assert part.turns == whole.turns
        self.turns = part.turns
        assert part.decision.memory == whole.decision.memory
        return part.decision.memory

    def _check_plan(self, world: RegionState, whole: AdvanceResult, now: Elapsed, wall: Wall) -> PlacementPlan | None:
        """A plan about what changed is the one about everything. Returns it; None where it was not asked for, see
        PLANS_EVERY."""
        is_quiet = not whole.changed and not whole.decision.events and whole.decision.desired == world.desired
        self._quiet_steps = self._quiet_steps + 1 if is_quiet else 0
        if self._quiet_steps % PLANS_EVERY:
            return None
        effects = migration_effects(world, self.migrations, now)
        plan = place(inputs_of(world, effects, now, wall), explain=False)
        assert next_placement(world, effects, now, wall, self.kept).plan(False).hash == plan.hash
        return plan

    def _decided_fleet(self) -> Fleet:
        """Each node as of its last change that may change a decision."""
        known = self._noted
        self._noted = {
            name: before if (before := known.get(name)) is not None and not is_material(before, state) else state
            for name, state in self.fleet.nodes.items()
        }
        return replace(self.fleet, nodes=self._noted)

    def _assignments(self) -> set[tuple[str, bool]]:
        """Ids, and whether they drain."""
        return {(each.id, each.draining) for content in self.desired.values() for each in content.assignments}

    def _readings(self, name: str) -> tuple[Reading, ...]:
        plain = [reading(on, at=START + self.now) for on in self.agents[name].node.devices]
        return tuple(self.sensors[name](each) if name in self.sensors else each for each in plain)

    def _send(self) -> None:
        """Keep everything that was sent, because a coordinator may die after any of it."""
        self.told.append(self.desired)
        for name, agent in self.agents.items():
            if agent.up and agent.heard:
                agent.content = self.desired.get(name, DesiredContent())

    def world(self) -> RegionState:
        fleet, now, wall = self._decided_fleet(), Elapsed(self.now), Wall(START + self.now)
        return RegionState(
            region=self.facts,
            fleet=fleet,
            live=self.fleet,
            intents=self.counts.count(self.intents, fleet, self.facts, self.profiles, now, wall),
            profiles=self.profiles,
            desired=self.desired,
            memory=self.memory,
            # As they are now: a decision that is kept must not see a later change of what it was made from.
            costs={**self.costs},
            quotas={**self.quotas},
            delegations={**self.delegated},
            peers=self.peers,
            fetches=self.fetched,
            fetches_counted_since=Wall(START),
            references=self.references,
        )

    def migrate(self, to: str, name: str = "ocr", *, at: str = "", **rule: Any) -> str:
        """An operator migrates the workload's first replica (the one on node `at`, if named); returns the migration's
        id."""
        migration = f"m-{len(self.migrations)}"
        node, one = next(
            (node, each)
            for node, content in sorted(self.desired.items())
            for each in content.assignments
            if each.workload.name == name and not each.draining and at in ("", node)
        )
        source = ReplicaPlace(one.id, node, one.device, one.model, one.precision)
        rules = MigrationRule(**rule)
        asked = Migration(
            migration, one.workload, Cause.OPERATOR, "ops", source, Aim.parse(to) if to else Aim(), rules,
            PlannedState(Elapsed(0), Elapsed(0)),
        )  # fmt: skip
        self.migrations[migration] = start(asked, Elapsed(self.now), Wall(START + self.now))[0]
        return migration

    def restart(self) -> None:
        """The coordinator restarts: it knows what the store holds and has no report yet."""
        self.fleet = updates.restore(tuple(self.fleet.nodes.values()), self.fleet, Elapsed(self.now))

    def relabel(self, name: str, labels: Mapping[str, str]) -> None:
        """An operator sets the labels of a node."""
        self.fleet = updates.with_labels(self.fleet, name, labels)
        agent = self.agents[name]
        agent.node = replace(agent.node, labels=labels)

    def join(self, new: Node) -> None:
        """A node joins: it connects, is measured, and reports."""
        fleet = fleet_of(new, now=self.now)
        self.fleet = self.fleet.with_node(fleet.nodes[new.name])
        self.agents[new.name] = CoreAgent(new, sequence=1)

    def reconnect(self, name: str, *, boot: str | None = None) -> None:
        """The node's agent opens a new session; with `boot`, after a reboot."""
        agent = self.agents[name]
        agent.up = agent.heard = True
        agent.epoch += 1
        agent.sequence = 0
        if boot is not None:
            agent.node = replace(agent.node, boot_id=boot)
            agent.since = {}
        now, wall = Elapsed(self.now), Wall(START + self.now)
        self.fleet = updates.connect(self.fleet, agent.node, agent.epoch, now, wall)

    def replicas(self, name: str = "ocr") -> dict[str, tuple[str, bool]]:
        """Assignment id -> (node, draining), of one workload."""
        return {
            each.id: (node, each.draining)
            for node, content in self.desired.items()
            for each in content.assignments
            if each.workload.name == name
        }

    def routed_nodes(self, at: str, name: str = "ocr") -> list[str]:
        """Nodes that `at` may send requests of one workload to."""
        return [
            endpoint.node
            for route in self.desired[at].routes
            if route.workload.name == name
            for endpoint in route.endpoints
        ]
