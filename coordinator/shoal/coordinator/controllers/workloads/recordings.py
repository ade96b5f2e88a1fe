"""Recordings of answers that this region asked its replicas for."""

from shoal.coordinator.controllers.workloads.step import WorkloadsController
from shoal.coordinator.core.catalog.model import Provenance
from shoal.types.codes import Code, refuse
from shoal.types.migration import Recording
from shoal.types.units import Wall


def provenance_of(workloads: WorkloadsController, node: str, assignment: str, model: str, wall: Wall) -> Provenance:
    """Provenance of a recording that this replica was asked to make, from the coordinator's own knowledge alone.

    Raises ShoalError(ROLE_DENIED).
    """
    desired, state = workloads.desired.get(node), workloads.fleet.nodes.get(node)
    for one in desired.assignments if desired is not None else ():
        asked, device = one.verification, state.device(one.device) if state is not None else None
        if (one.id, one.model) == (assignment, model) and asked and asked.recording is Recording.HERE:
            return Provenance(
                model, asked.pack, one.workload, one.id, node, one.device, one.provider,
                device.runtime_version if device is not None else "", one.precision, wall,
                prepared=one.preparation is not None,
            )  # fmt: skip
    raise refuse(
        Code.ROLE_DENIED, f"{node} was not asked to record {model!r:.80} by {assignment!r:.80}",
        "the replica that the coordinator chose", "it is judged by what another recorded",
    )  # fmt: skip
