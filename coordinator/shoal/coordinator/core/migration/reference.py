"""Reference answers of a model: pushed with its workload, or else recorded from a replica; and which replica
records."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from shoal.coordinator.core.fleet.state import Fleet, Liveness, NodeState
from shoal.coordinator.core.workloads.model import DesiredContent, References
from shoal.types.assignment import Assignment, Phase
from shoal.types.migration import Against, MigrationRule, Recording, has_answers

_WARM = frozenset({Phase.VERIFYING, Phase.READY})
_Rank = tuple[bool, bool, float, str]
RuleOf = Callable[[Assignment], MigrationRule | None]


def with_reference(rule: MigrationRule, model: str, references: References) -> MigrationRule:
    """The rule with the recorded reference of the model (by `variant_of`), if it asks for one and none was pushed."""
    if not needs_recording(rule):
        return rule
    found = references.get((model, _samples(rule)))
    return replace(rule, pack=found.pack) if found is not None else rule


def needs_recording(rule: MigrationRule) -> bool:
    """True if the reference that the rule asks for has to be recorded."""
    return rule.against is Against.REFERENCE and not has_answers(rule)


def recorders(
    desired: Mapping[str, DesiredContent], fleet: Fleet, rule_of: RuleOf, references: References
) -> Mapping[str, bool]:  # fmt: skip
    """Assignments that record: one for each (model, samples) without a reference. True: it serves, and records beside
    that.

    The one already asked keeps recording for as long as it can. Otherwise a serving one is chosen, or else the first
    that is warm; if there is none, no replica records. Once the reference exists, its author stays in the result until
    it serves, because it must not be judged by its own answers.
    """
    best = dict[tuple[str, str], tuple[_Rank, bool]]()
    for node, content in desired.items():
        state = fleet.nodes.get(node)
        for one in content.assignments if state is not None else ():
            rule = rule_of(one)
            if rule is None or not needs_recording(rule):
                continue
            assert state is not None
            key, rank, serves = (one.variant, _samples(rule)), _rank(one, state), _serves(one, state)
            if (held := references.get(key)) is not None and (held.by != one.id or not _is_recording(one) or serves):
                continue
            if rank is not None and (key not in best or rank < best[key][0]):
                best[key] = rank, serves
    return {rank[-1]: serves for rank, serves in best.values()}


def _rank(one: Assignment, state: NodeState) -> _Rank | None:
    """Rank of a recorder, the least is chosen; None: it cannot record."""
    lost = state.revoked or state.liveness is Liveness.LOST or state.device(one.device) is None
    if lost or one.draining or one.staged or one.session:
        return None
    asked = _is_recording(one)
    observed = state.observed.get(one.id)
    if state.liveness is not Liveness.READY or not state.has_full_status:
        return (False, False, 0.0, one.id) if asked else None  # it continues, whatever its node reports
    if observed is None or observed.phase not in _WARM:
        return None
    if observed.verdict is not None and not observed.verdict.passed:
        return None  # it was tried, or its answers are wrong
    return (not asked, observed.phase is not Phase.READY, observed.since, one.id)


def _serves(one: Assignment, state: NodeState) -> bool:
    observed = state.observed.get(one.id)
    if not state.has_full_status or observed is None:
        return one.verification is not None and one.verification.beside
    return observed.phase is Phase.READY


def _is_recording(one: Assignment) -> bool:
    return one.verification is not None and one.verification.recording is Recording.HERE


def _samples(rule: MigrationRule) -> str:
    """Digest of the inputs to answer; empty: generated ones."""
    return rule.pack.digest if rule.pack is not None else ""
