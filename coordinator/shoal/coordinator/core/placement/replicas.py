"""A workload's current replicas: which ones still count, and why the others do not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.placement.accuracy import batching_of, comparison_of, preparation_of
from shoal.coordinator.core.placement.feasible import Option, Scope
from shoal.coordinator.core.placement.model import Inputs, Judged, Move, Slot, Triple
from shoal.types.assignment import Assignment, Batching, Phase
from shoal.types.codes import PERMANENT_LOAD_FAILURES, Code, Refusal
from shoal.types.workload import Intent


@dataclass(frozen=True, slots=True)
class CurrentReplica:
    """A replica that counts."""

    # Node that has the assignment.
    node: str
    # As the node was last told.
    assignment: Assignment
    # Its model on its device, predicted from its own measurements.
    option: Option
    # True where its node reports it as ready.
    ready: bool
    # True where it is all that its role asks for: ready, or staged if it is a staged standby.
    ready_in_role: bool

    @property
    def may_be_ready_in_role(self) -> bool:
        """True also where its node has not reported yet: it is not known that it serves no longer."""
        return self.ready_in_role or not self.option.state.has_full_status

    @property
    def slot(self) -> Slot:
        return Slot(self.node, self.assignment.device)


@dataclass(frozen=True, slots=True)
class FailedReplica:
    """A replica that no longer counts. It keeps running until it can be replaced."""

    node: str
    assignment: Assignment
    # Why it does not count.
    refusal: Refusal

    @property
    def is_preempted(self) -> bool:
        """Whether it has to leave before it is replaced."""
        return self.refusal.code is Code.PREEMPTED


@dataclass(frozen=True, slots=True)
class WorkloadReplicas:
    """All replicas of a workload that are assigned and not draining, by node and id."""

    # Replicas for requests that count.
    active: tuple[CurrentReplica, ...]
    # Replicas that do not count, standbys included.
    failed: tuple[FailedReplica, ...]
    # Standbys that count.
    standbys: tuple[CurrentReplica, ...] = ()

    @property
    def healthy(self) -> tuple[CurrentReplica, ...]:
        """All replicas that take a share of quotas and of devices' time."""
        return (*self.active, *self.standbys)


def replicas_of(
    scope: Scope, intent: Intent, moving: Sequence[Move] = (), preempted: Mapping[str, Refusal] = MappingProxyType({})
) -> WorkloadReplicas:
    """A workload's current replicas. moving: its moves that look for a place; the other moves have one already.
    preempted: by assignment, why it has to leave."""
    active, failed, standbys = list[CurrentReplica](), list[FailedReplica](), list[CurrentReplica]()
    excluded = {move.excluded_assignment: move.why for move in (*scope.placed_moves, *moving)} | dict(preempted)
    for node, assignment in scope.current.get(intent.key, ()):
        found = excluded.get(assignment.id) or _classify(scope, intent, node, assignment)
        if isinstance(found, CurrentReplica) and assignment.standby and found.option.state.cordoned:
            # It serves no requests, and must not take over on a node that accepts nothing new.
            found = Refusal(Code.NODE_CORDONED, f"{node} is cordoned", "a node that takes new work")
        if isinstance(found, CurrentReplica):
            (standbys if assignment.standby else active).append(found)
        else:
            failed.append(FailedReplica(node, assignment, found))
    return WorkloadReplicas(tuple(active), tuple(failed), tuple(standbys))


def may_retry(inputs: Inputs, intent: Intent, replica: FailedReplica) -> bool:
    """Whether a replica that its runtime could not load may be tried again: an operator cleared the model, or the
    document asks for another load. The retry needs another assignment, because its node has given up this one."""
    state = inputs.fleet.nodes.get(replica.node)
    device = state.device(replica.assignment.device) if state is not None else None
    if device is None or replica.refusal.code not in PERMANENT_LOAD_FAILURES:
        return False
    tried = replica.assignment
    if (tried.shapes, tried.partial) != (intent.shapes, intent.require.partial):
        return True
    judged = Judged.of(
        tried.precision,
        intent.samples_of(tried.model),
        preparation_of(intent, tried.precision) if tried.preparation is not None else None,
        comparison_of(intent, device, tried.precision),
    )
    if judged != Judged.of_assignment(tried):
        return True
    return Triple.of_assignment(tried, device) not in inputs.unloadable


def _classify(scope: Scope, intent: Intent, node: str, assignment: Assignment) -> CurrentReplica | Refusal:
    """The replica if it counts, else why it does not. A ready replica counts even if its model is poisoned or marked as
    unloadable, because it serves."""
    inputs = scope.inputs
    if (refusal := inputs.broken_assignments.get(assignment.id)) is not None:
        return refusal
    state = inputs.fleet.nodes.get(node)
    if state is None:
        return Refusal(Code.NODE_UNKNOWN, node, "an enrolled node")
    if state.liveness in (Liveness.SUSPECT, Liveness.LOST) and node not in scope.deferred_nodes:
        code = Code.NODE_SUSPECT if state.liveness is Liveness.SUSPECT else Code.NODE_LOST
        return Refusal(code, f"{node} is silent", "a node that reports")
    device = state.device(assignment.device)
    if device is None:
        return Refusal(Code.DEVICE_LOST, f"{node} has no {assignment.device} any more", assignment.device)
    model = next((model for model in intent.models if model.variant == assignment.variant), None)
    if model is None or model.digest not in inputs.profiles:
        asked = ", ".join(f"{each.source} ({each.digest[:19]})" for each in intent.models)
        return Refusal(Code.CONFLICT, f"it runs another model, {assignment.model[:19]}", asked)
    if assignment.shared_worker != intent.shared_worker:
        return Refusal(Code.CONFLICT, "its isolation changed", "a worker as the document says")
    if assignment.partial != intent.require.partial:
        return Refusal(Code.CONFLICT, "what may run beside its device changed", "a share as the document says")
    has_other_samples = assignment.samples != intent.samples_of(assignment.model)
    if assignment.preparation is not None and has_other_samples:
        return Refusal(Code.CONFLICT, "the samples that it was prepared by changed", "those of the document")
    if assignment.shapes != intent.shapes:
        return Refusal(Code.CONFLICT, "its shapes changed", "the shapes that the document says")
    if _batch_limits(assignment.batching) != _batch_limits(batching_of(intent, device, assignment.precision)):
        return Refusal(Code.CONFLICT, "its batching changed", "batches as the document says")
    observed = state.observed.get(assignment.id)
    phase = observed.phase if observed is not None else None
    ready = phase is Phase.READY
    ready_in_role = ready or (assignment.standby and assignment.staged and phase is Phase.STAGED)
    if not ready and assignment.comparison is not None and has_other_samples:
        return Refusal(Code.CONFLICT, "the samples that it is compared by changed", "those of the document")
    triple = Triple(assignment.model, device.provider, device.runtime_version)
    if not ready and inputs.is_poisoned(triple, assignment.workload):
        return Refusal(Code.POISONED, "it crashed its runtime again and again", "a model that survives it")
    if not ready and (shown := inputs.unloadable.get(Triple.of_assignment(assignment, device))) is not None:
        return shown
    measured, served = (observed.measured, observed.served) if observed is not None else (None, ())
    option = scope.option(intent, model, state, device, served, measured)
    return CurrentReplica(node, assignment, option, ready, ready_in_role)


def _batch_limits(batching: Batching | None) -> tuple[int, float, bool]:
    """What a loaded replica cannot change. Another latency bound or tolerance counts at its next load."""
    return (1, 0.0, False) if batching is None else (batching.max, batching.delay_s, batching.padding)
