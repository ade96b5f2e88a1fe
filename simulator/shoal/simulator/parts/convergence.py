"""What keeps a region of the simulator from being converged once the faults are over."""

from collections import Counter
from typing import TYPE_CHECKING

from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.placement.model import WorkloadPlan
from shoal.coordinator.core.workloads.failures import POISON_AFTER
from shoal.simulator.parts.machine import SimMachine
from shoal.simulator.parts.migration_events import pending_moves
from shoal.simulator.parts.network import REGION
from shoal.types.device import PowerState
from shoal.types.workload import Intent, Spread, Standby, WorkloadKey

if TYPE_CHECKING:
    from shoal.simulator.parts.cluster import SimCluster


class ConvergenceCheck:
    """Compares what the coordinator of a cluster wants with what its machines run."""

    def __init__(self, cluster: "SimCluster") -> None:
        self._cluster = cluster

    async def missing(self, within_s: float = 0.0) -> list[str]:
        """What keeps the region from being converged; empty if nothing. within_s: also count migrations that begin by
        themselves within this many seconds."""
        found = self._missing_now(within_s) or await self._refused_requests()
        return found or self._missing_now(within_s)  # requests may take seconds, and the region goes on meanwhile

    def _missing_now(self, within_s: float) -> list[str]:
        region = self._cluster.region
        if region is None or self._cluster.coordinator is None or not self._cluster.coordinator.alive:
            return ["no coordinator"]
        found: list[str] = []
        for machine in self._cluster.surviving_machines():
            found += self.missing_at(region, machine) or [
                *self._wrong_routes(region, machine),
                *self._awake_devices(region, machine),
            ]
        found += self._missing_replicas(region)
        found += [
            f"{name} is not lost yet" for name in sorted(self._cluster.permanently_dead) if not _is_lost(region, name)
        ]
        assigned = [each for wanted in region.workloads.desired.values() for each in wanted.assignments]
        draining = [each.id for each in assigned if each.draining]
        found += [f"{name} is still to be drained" for name in draining]
        found += [f"{each.id} is {each.stage}" for each in region.workloads.migrations.live if each.target is not None]
        decided, moves = region.workloads, region.workloads.migrations.all.values()
        found += pending_moves(
            decided.move_holds,
            decided.last_plan,
            moves,
            self._cluster.clock.now(),
            self._cluster.clock.wall(),
            within_s,
        )
        return found

    async def _refused_requests(self) -> list[str]:
        """What the fronts refuse although a replica is ready. To be called while there is a coordinator."""
        intents = self._cluster.region.workloads.intents if self._cluster.region is not None else ()
        asked = [(machine.name, each.key) for machine in self._cluster.surviving_machines() for each in intents]
        return [
            f"{name} answers {key} with {code}"
            for name, key in asked
            if self._ready_replicas(key) and (code := await self._cluster.operators.request(name, key))
        ]

    def quiescent_state(self) -> tuple[object, ...]:
        """What must not change once the region has converged."""
        region = self._cluster.region
        starts = sum(
            event.kind == "worker.start"
            and not event.facts["to_zero"]  # a request may wake it
            and self._cluster.spec.behaviours[event.facts["model"]].crash_at_load < 1.0
            for event in self._cluster.world.history.events
        )
        versions = () if region is None else tuple((n, each.version) for n, each in region.workloads.desired.items())
        return starts, versions

    def missing_at(self, region: RegionalCoordinator, machine: SimMachine) -> list[str]:
        """What one machine lacks of its desired set, except routes."""
        name = machine.name
        state = region.fleet.fleet.nodes.get(name)
        if machine.supervisor is None or not machine.supervisor.alive:
            return [f"{name} is down"]
        if state is None or not state.connected or state.liveness is not Liveness.READY:
            return [f"{name} is not seen: {state and (state.liveness, state.connected)}"]
        if not state.has_full_status:
            return [f"{name} has not reported in full"]
        if state.quarantined:
            return [f"{name} is not trusted again"]
        if dark := sorted({each.name for each in state.node.devices} - state.readings.keys()):
            return [f"{name}'s {', '.join(dark)} was not measured again"]
        wanted = region.workloads.desired.get(name)
        held = self._cluster.supervisors[name].snapshot.version
        if wanted is None or held != wanted.version:
            return [f"{name} holds {held}, wanted is {wanted and wanted.version}"]
        found = [] if machine.front.alive else [f"{name}'s front is down"]
        assigned = {each.id for each in wanted.assignments if not each.staged}
        found += [f"{other} still runs on {name}" for other in sorted(machine.workers) if other not in assigned]
        found += [
            f"{each} has not come up on {name}"
            for each in sorted(assigned)
            if not machine.is_ready(each) and not machine.is_unloaded(each)
        ]
        found += [
            f"{each.id} is not staged on {name}"
            for each in wanted.assignments
            if each.staged and each.model not in machine.cached_models  # a corrupt file is only found when it is loaded
        ]
        return found

    def _awake_devices(self, region: RegionalCoordinator, machine: SimMachine) -> list[str]:
        """Devices without a replica that are awake although the region lets them sleep."""
        wanted = region.workloads.desired[machine.name]
        taken = {each.device for each in wanted.assignments}
        may = region.workloads.catalog.facts(REGION).sleep_after_s is not None
        able = [name for name, known in sorted(machine.chips.items()) if may and known.device.rest is not None]
        return [
            f"{machine.name}'s {name} is {machine.power(name)}"
            for name in able
            if name not in taken and machine.power(name) is not PowerState.ASLEEP
        ]

    def _wrong_routes(self, region: RegionalCoordinator, machine: SimMachine) -> list[str]:
        name, found, wanted = machine.name, list[str](), region.workloads.desired[machine.name]
        listed = {route.workload for route in wanted.routes}
        found += [f"{name} gives up {route.workload} soon" for route in wanted.routes if route.is_unknown]
        for intent in region.workloads.intents:
            if wanted.routes_on_demand and intent.key not in listed:
                continue
            route = machine.front.routes.get(intent.key)
            routed = {each.assignment for each in route.endpoints} if route else set()
            if routed != self._ready_replicas(intent.key):
                ready = sorted(self._ready_replicas(intent.key))
                found.append(f"{name} routes {intent.key} to {sorted(routed)}, ready are {ready}")
        return found

    def _missing_replicas(self, region: RegionalCoordinator) -> list[str]:
        """Replicas that are missing or superfluous, counted independently of placement.

        As many as spread, quota and sound models allow must be ready, and one more on standby where a node has no
        active one. A replica that the plan does not want may exist only while the plan lacks one, since the old one
        keeps serving.
        """
        found: list[str] = []
        room = placed = old = 0
        for intent in region.workloads.intents:
            plan = region.workloads.last_plan.of(intent.key) if region.workloads.last_plan else None
            if plan is None:
                return [f"{intent.key} is not planned"]
            standbys = [target for target in plan.targets if target.standby]
            placed += plan.placed + len(standbys)
            if self._may_be_poisoned(intent):  # then what serves stays, and nothing new is started
                room += plan.placed + len(standbys)
            else:
                room += self._max_replicas(intent) + self._expected_standbys(intent, plan)
            ready = self._ready_replicas(intent.key) | self._staged_replicas(region, intent.key)
            wanted = {target.existing_assignment for target in plan.targets}
            found += [f"{name or 'a new one'} of {intent.key} is not ready" for name in sorted(wanted - ready)]
            old += len(ready - wanted)
            if plan.refusal is None:
                assigned = {
                    each.id
                    for desired in region.workloads.desired.values()
                    for each in desired.assignments
                    if each.workload == intent.key
                }
                found += [f"{name} of {intent.key} is not wanted" for name in sorted((ready | assigned) - wanted)]
        can_be = min(room, self._cluster.operators.quota)
        if not can_be - old <= placed <= can_be:
            plans = region.workloads.last_plan.workloads if region.workloads.last_plan else ()
            refused = [str(plan.refusal) for plan in plans if plan.refusal is not None]
            found.append(f"{placed} replicas are placed and {old} old ones serve, {can_be} can be: {refused}")
        return found

    def _max_replicas(self, intent: Intent) -> int:
        if any(self._cluster.spec.behaviours[model.digest].crash_at_load == 1.0 for model in intent.models):
            return 0
        nodes = [machine for machine in self._cluster.surviving_machines() if machine.chips]
        devices = sum(len(machine.chips) for machine in nodes)
        replicas = intent.require.replicas
        most = {Spread.NODE: min(replicas, len(nodes)), Spread.DEVICE: min(replicas, devices), Spread.NONE: replicas}
        return most[Spread(intent.require.spread)]  # no scenario spreads over a label

    def _may_be_poisoned(self, intent: Intent) -> bool:
        """Whether workers of one of its models crashed so often by themselves that the region may have given it up."""
        crashes = sum((machine.own_crashes for machine in self._cluster.machines), Counter[str]())
        return any(crashes[model.digest] >= POISON_AFTER for model in intent.models)

    def _expected_standbys(self, intent: Intent, plan: WorkloadPlan) -> int:
        used = {target.node for target in plan.targets if not target.standby}
        free = {machine.name for machine in self._cluster.surviving_machines() if machine.chips} - used
        return int(intent.require.standby is not Standby.NONE and 0 < plan.wanted <= plan.placed and bool(free))

    def _staged_replicas(self, region: RegionalCoordinator, workload: WorkloadKey) -> set[str]:
        return {
            each.id
            for desired in region.workloads.desired.values()
            for each in desired.assignments
            if each.workload == workload and each.staged
        }

    def _ready_replicas(self, workload: WorkloadKey) -> set[str]:
        """Also those that are scaled to zero: they take requests."""
        found: set[str] = set()
        for machine in self._cluster.surviving_machines():
            mine = (name for name, each in machine.workers.items() if each.assignment.workload == workload)
            found.update(name for name in mine if machine.is_ready(name))
            found.update(
                each.assignment
                for each in machine.unloaded_replicas
                if each.failure is None and each.workload == workload
            )
        return found


def _is_lost(region: RegionalCoordinator, node: str) -> bool:
    state = region.fleet.fleet.nodes.get(node)
    return state is None or state.liveness is Liveness.LOST
