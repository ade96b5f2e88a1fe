"""A workload's current replicas: which of them still count, and why the others do not."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.placement.feasible import Option, Scope
from shoal.coordinator.core.placement.model import Move, Slot, Triple
from shoal.types.assignment import Assignment, Phase
from shoal.types.codes import Code, Refusal
from shoal.types.workload import Intent


@dataclass(frozen=True, slots=True)
class Standing:
    """One that counts. option: where it runs, as it measures there."""

    node: str
    assignment: Assignment
    option: Option
    ready: bool

    @property
    def slot(self) -> Slot:
        return Slot(self.node, self.assignment.device)


@dataclass(frozen=True, slots=True)
class Fallen:
    """One that does not count any more. It runs on until it can be replaced."""

    node: str
    assignment: Assignment
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Current:
    """All replicas of a workload that are assigned and not draining, by node and id. reserve: those that stand by."""

    standing: tuple[Standing, ...]
    fallen: tuple[Fallen, ...]
    reserve: tuple[Standing, ...] = ()

    @property
    def counted(self) -> tuple[Standing, ...]:
        """All that hold a share of quotas and of devices' time."""
        return (*self.standing, *self.reserve)


def current_of(scope: Scope, intent: Intent, moving: Sequence[Move] = ()) -> Current:
    """A workload's replicas as they are now. moving: those that look for a place; the others have one already."""
    standing, fallen, reserve = list[Standing](), list[Fallen](), list[Standing]()
    uncounted = {move.uncounted: move.why for move in (*scope.moving, *moving)}
    for node, assignment in scope.current.get(intent.key, ()):
        found = uncounted.get(assignment.id) or _judge(scope, intent, node, assignment)
        if isinstance(found, Standing) and assignment.standby and found.option.state.cordoned:
            # It serves nobody, and shall not be what takes over where nothing new may come.
            found = Refusal(Code.NODE_CORDONED, f"{node} is cordoned", "a node that takes new work")
        if isinstance(found, Standing):
            (reserve if assignment.standby else standing).append(found)
        else:
            fallen.append(Fallen(node, assignment, found))
    return Current(tuple(standing), tuple(fallen), tuple(reserve))


def _judge(scope: Scope, intent: Intent, node: str, assignment: Assignment) -> Standing | Refusal:
    inputs = scope.inputs
    if (refusal := inputs.broken.get(assignment.id)) is not None:
        return refusal
    state = inputs.fleet.nodes.get(node)
    if state is None:
        return Refusal(Code.NODE_UNKNOWN, node, "an enrolled node")
    if state.liveness in (Liveness.SUSPECT, Liveness.LOST) and node not in scope.held:
        code = Code.NODE_SUSPECT if state.liveness is Liveness.SUSPECT else Code.NODE_LOST
        return Refusal(code, f"{node} is silent", "a node that reports")
    device = state.device(assignment.device)
    if device is None:
        return Refusal(Code.DEVICE_LOST, f"{node} has no {assignment.device} any more", assignment.device)
    model = next((model for model in intent.models if model.digest == assignment.model), None)
    if model is None or model.digest not in inputs.profiles:
        return Refusal(Code.CONFLICT, "it runs another model", ", ".join(model.source for model in intent.models))
    if assignment.shared_worker != intent.shared_worker:
        return Refusal(Code.CONFLICT, "its isolation changed", "a worker as the document says")
    observed = state.observed.get(assignment.id)
    ready = observed is not None and observed.phase is Phase.READY
    if not ready and Triple(assignment.model, device.provider, device.runtime_version) in inputs.poisoned:
        return Refusal(Code.POISONED, "it crashed its runtime again and again", "a model that survives it")
    measured, served = (observed.measured, observed.served) if observed is not None else (None, ())
    return Standing(node, assignment, scope.option(intent, model, state, device, served, measured), ready)
