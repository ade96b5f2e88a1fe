"""What a model is to answer: as was pushed with its workload, else as the first replica of it did. Who records that."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from shoal.coordinator.core.fleet.state import Fleet, Liveness, NodeState
from shoal.coordinator.core.workloads.model import Content, References
from shoal.types.assignment import Assignment, Phase
from shoal.types.migration import Against, MigrationRule, Recording, has_answers

_WARM = frozenset({Phase.VERIFYING, Phase.READY})
_Rank = tuple[bool, bool, float, str]
RuleOf = Callable[[Assignment], MigrationRule | None]


def referred(rule: MigrationRule, model: str, references: References) -> MigrationRule:
    """With what was recorded of the model, where it is to be judged by a reference and nobody pushed one."""
    if not records(rule):
        return rule
    found = references.get((model, _samples(rule)))
    return replace(rule, pack=found.pack) if found is not None else rule


def records(rule: MigrationRule) -> bool:
    """Whether the reference that it asks for has to be recorded."""
    return rule.against is Against.REFERENCE and not has_answers(rule)


def recorders(
    desired: Mapping[str, Content], fleet: Fleet, rule_of: RuleOf, references: References
) -> Mapping[str, bool]:  # fmt: skip
    """Assignments that record, one for each model (and samples) that has no reference yet: the one that was asked
    already, as long as it can; else one that serves, which then records beside that (True); else the first that is
    warm. None, where none is. Once there is one, who made it is asked for it until it serves: it is not to be judged by
    itself."""
    best = dict[tuple[str, str], tuple[_Rank, bool]]()
    for node, content in desired.items():
        state = fleet.nodes.get(node)
        for one in content.assignments if state is not None else ():
            rule = rule_of(one)
            if rule is None or not records(rule):
                continue
            assert state is not None
            key, rank, serves = (one.model, _samples(rule)), _rank(one, state), _serves(one, state)
            if (held := references.get(key)) is not None and (held.by != one.id or not _asked(one) or serves):
                continue
            if rank is not None and (key not in best or rank < best[key][0]):
                best[key] = rank, serves
    return {rank[-1]: serves for rank, serves in best.values()}


def _rank(one: Assignment, state: NodeState) -> _Rank | None:
    """The least records; None: it cannot."""
    lost = state.revoked or state.liveness is Liveness.LOST or state.device(one.device) is None
    if lost or one.draining or one.staged or one.session:
        return None
    asked = _asked(one)
    observed = state.observed.get(one.id)
    if state.liveness is not Liveness.READY or not state.reported:
        return (False, False, 0.0, one.id) if asked else None  # it goes on, whatever is heard of it
    if observed is None or observed.phase not in _WARM:
        return None
    if observed.verdict is not None and not observed.verdict.passed:
        return None  # it was tried, or answers otherwise than it should
    return (not asked, observed.phase is not Phase.READY, observed.since, one.id)


def _serves(one: Assignment, state: NodeState) -> bool:
    observed = state.observed.get(one.id)
    if not state.reported or observed is None:
        return one.verification is not None and one.verification.beside
    return observed.phase is Phase.READY


def _asked(one: Assignment) -> bool:
    return one.verification is not None and one.verification.recording is Recording.HERE


def _samples(rule: MigrationRule) -> str:
    """The inputs that are to be answered; empty: made-up ones."""
    return rule.pack.digest if rule.pack is not None else ""
