"""Checks of a workload together with its policy that need more than their two documents."""

from shoal.policies import Policy, Workload, name_of
from shoal.policies.kinds import StateTensors
from shoal.types.codes import Code, Refusal
from shoal.types.migration import PackRef


def no_reference(workload: Workload, policy: Policy | None, pack: PackRef | None) -> Refusal | None:
    """A policy that verifies against a reference needs one: pushed answers, or a recording of the first replica. pack:
    the workload's samples.
    """
    migration = policy.spec.migration if policy is not None else None
    verify = migration.verify if migration is not None else None
    if policy is None or verify is None or verify.against != "reference":
        return None
    if not isinstance(workload.spec.session, StateTensors) or (pack is not None and pack.answers):
        return None
    return Refusal(
        Code.VERIFY_IMPOSSIBLE,
        f"policy {policy.metadata.name} verifies against a reference, {name_of(workload)} has none and keeps sessions",
        "spec.model.samples with every output of the model: nothing is recorded of what keeps state",
        "write the outputs into the .npz beside the inputs, or verify against: source",
    )
