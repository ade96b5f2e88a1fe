"""How many replicas a workload wants that has one for each matching node, or for each value of a node label (`per`)."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from shoal.coordinator.core.fleet.liveness import deferred_nodes
from shoal.coordinator.core.fleet.state import Fleet, Liveness, NodeState
from shoal.coordinator.core.placement.domains import Domain, domain_of, is_label
from shoal.coordinator.core.placement.model import RegionFacts
from shoal.coordinator.core.workloads.changed import difference
from shoal.policies.cel import Expression, device_fields, model_fields, node_fields
from shoal.types.codes import ShoalError
from shoal.types.device import Node
from shoal.types.profile import ModelProfile
from shoal.types.units import Elapsed, Wall
from shoal.types.workload import Intent, WorkloadKey

_CHANGES_BY_ITSELF: Final = "now"
"""The variable of a selector whose value is another one in every step."""


class WantedReplicas:
    """Follows the fleet: a node that did not change costs nothing. Nodes count that `where` admits and that are not
    lost. So a new one gets a replica by itself, and a lost one is not replaced elsewhere."""

    def __init__(self) -> None:
        self._intents: tuple[Intent, ...] = ()
        self._per: tuple[Intent, ...] = ()
        self._counted: tuple[Intent, ...] = ()
        self._matches = dict[WorkloadKey, _Matches]()
        self._nodes: Mapping[str, NodeState] = {}
        self._deferred = frozenset[str]()
        self._region: Mapping[str, object] = {}

    def for_others(self) -> "WantedReplicas":
        """For intents of which most are the same. Where none has `per`, only the others are looked at."""
        found = WantedReplicas()
        if not self._per:
            found._intents = self._intents
        return found

    def count(
        self,
        intents: tuple[Intent, ...],
        fleet: Fleet,
        region: RegionFacts,
        profiles: Mapping[str, ModelProfile],
        now: Elapsed,
        wall: Wall,
        changed: Iterable[str] | None = None,
    ) -> tuple[Intent, ...]:
        """The intents, those with `per` with the number of replicas that they want now. They are the same objects as
        before where nothing else came out. changed: nodes whose state may be another than at the last call; None: all
        may be."""
        is_same = intents is self._intents
        if not is_same:
            new, gone = difference(self._intents, intents)
            self._intents = intents
            if any(each.per for each in (*new, *gone)):
                self._per = tuple(each for each in intents if each.per)
        if not self._per:
            self._matches, self._counted = {}, intents
            return intents
        deferred = deferred_nodes(fleet, now)
        names = {*fleet.nodes, *self._nodes} if changed is None else {*changed, *(deferred ^ self._deferred)}
        facts = region.fields
        is_same_region = repr(facts) == repr(self._region)
        self._nodes, self._deferred, self._region = fleet.nodes, deferred, facts
        before, self._matches = self._matches, {}
        for intent in self._per:
            models = tuple(profiles[each.digest] for each in intent.models if each.digest in profiles)
            known = before.get(intent.key)
            counted = known.counted if known is not None else intent
            if known is None or not (is_same_region and known.is_of(intent, models)):
                known = _Matches(intent, models, counted)
                known.update(fleet.nodes, fleet, deferred, facts, wall)
            else:
                known.update(names, fleet, deferred, facts, wall)
            self._matches[intent.key] = known
            is_same = is_same and known.counted is counted
        if not is_same:
            self._counted = tuple(self._matches[each.key].counted if each.per else each for each in intents)
        return self._counted


class _Matches:
    """Where one workload wants a replica."""

    def __init__(self, intent: Intent, models: tuple[ModelProfile, ...], counted: Intent) -> None:
        """counted: the intent with a number of replicas, as it was counted before."""
        number = counted.require.replicas
        self.counted = counted if counted in (intent, _with_replicas(intent, number)) else intent
        self._intent = intent
        self._models = models
        self._where = Expression.compile(intent.require.where) if intent.require.where else None
        self._admitted = dict[str, tuple[Node, bool]]()
        self._domain_of = dict[str, Domain]()
        self._domains = Counter[Domain]()

    def is_of(self, intent: Intent, models: tuple[ModelProfile, ...]) -> bool:
        """Whether what was found out still holds for nodes that did not change."""
        timely = self._where is not None and _CHANGES_BY_ITSELF in self._where.variables
        is_same = len(models) == len(self._models) and all(a is b for a, b in zip(models, self._models, strict=True))
        return intent is self._intent and is_same and not timely

    def update(
        self, names: Iterable[str], fleet: Fleet, deferred: frozenset[str], region: Mapping[str, object], wall: Wall
    ) -> None:
        for name in names:
            state = fleet.nodes.get(name)
            old = self._domain_of.pop(name, None)
            if old is not None:
                self._domains[old] -= 1
                if not self._domains[old]:
                    del self._domains[old]
            if state is None:
                self._admitted.pop(name, None)
            elif self._counts(state, deferred, region, wall):
                new = self._domain_of[name] = domain_of(self._intent.per, state, "")
                self._domains[new] += 1
        # At least one: where no node matches, placement then says why.
        replicas = max(1, len(self._domains))
        if self.counted.require.replicas != replicas:
            self.counted = _with_replicas(self._intent, replicas)

    def _counts(self, state: NodeState, deferred: frozenset[str], region: Mapping[str, object], wall: Wall) -> bool:
        is_lost = state.liveness is Liveness.LOST and state.name not in deferred
        has_label = not is_label(self._intent.per) or self._intent.per in state.node.labels
        return not is_lost and has_label and self._admits(state.node, region, wall)

    def _admits(self, node: Node, region: Mapping[str, object], wall: Wall) -> bool:
        """Whether `where` admits one of the workload's models on one of the node's devices."""
        if self._where is None:
            return bool(node.devices)
        known = self._admitted.get(node.name)
        if known is None or known[0] is not node:
            moment, labels = datetime.fromtimestamp(wall, UTC), node_fields(node)
            found = any(
                _holds(self._where, node=labels, device=device_fields(device), model=model, region=region, now=moment)
                for device in node.devices
                for model in map(model_fields, self._models)
            )
            known = self._admitted[node.name] = node, found
        return known[1]


def _holds(expression: Expression, **values: object) -> bool:
    try:
        return expression.evaluate(**values)
    except ShoalError:
        return False


def _with_replicas(intent: Intent, replicas: int) -> Intent:
    relax = tuple(replace(each, require=replace(each.require, replicas=replicas)) for each in intent.relax)
    return replace(intent, require=replace(intent.require, replicas=replicas), relax=relax)
