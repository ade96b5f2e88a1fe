"""Where every workload runs: pure, deterministic, and able to say why. Guide: docs/guides/placement.md."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shoal.coordinator.core.fleet.commitments import (
    NOTHING,
    Committed,
    admissible_bytes,
    commitments,
)
from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.placement.feasible import (
    HARD,
    Fault,
    Option,
    Order,
    Scope,
    memory_fault,
    observed_of,
    utilisation_fault,
)
from shoal.coordinator.core.placement.model import (
    Candidate,
    Inputs,
    PlacementChange,
    Plan,
    Slot,
    Target,
    Triple,
    WorkloadPlan,
    terms_of,
)
from shoal.coordinator.core.placement.rank import gain, pareto, score, tie, values
from shoal.coordinator.core.placement.relax import Give, distance, merged, physical, relaxation, typed
from shoal.types.assignment import Assignment, Phase
from shoal.types.codes import Code, Refusal
from shoal.types.units import Bytes, show_bytes
from shoal.types.workload import Intent, Limits, Relaxation, Requirements, Spread

UTILISATION_MOST = 0.7
"""Declared traffic may fill this share of a device: at 0.7 an M/D/1 queue adds about one service time."""
GAIN_LEAST = 0.10
"""When documents changed, a running replica yields only to one whose objective is better by this share."""
BROKEN_MOST = 3
"""Replicas of one workload that may lie broken before it is tried nowhere else: one bad model does not tour a fleet."""
TRIALS_MOST = 16
"""Relaxations that are tried out for one workload that does not fit."""


def place(inputs: Inputs, *, explain: bool = True) -> Plan:
    """Where every workload shall run, why, and what would have to give where it cannot.

    Without `explain` a workload whose replicas all stand gets its targets but no candidates: the decisions (and the
    hash) are the same, at a cost that does not grow with the fleet.
    """
    scope = Scope(inputs)
    intents = sorted(inputs.intents, key=lambda intent: (-intent.priority, intent.key))
    books = _Books.opened(scope, intents)
    plans = list[WorkloadPlan]()
    for intent in intents:
        solver = _Solver(scope, intent, books)
        plan, books = solver.plan(explain=explain)
        plans.append(plan)
    return Plan(tuple(plans), _hash(inputs, plans))


@dataclass(frozen=True, slots=True)
class _Standing:
    """A current replica of a workload: its option now, and why it does not count, if it does not."""

    node: str
    assignment: Assignment
    option: Option | None
    ready: bool
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class _Books:
    """What is taken: memory and utilisation by device, replicas and memory by tenant. Replaced, never changed."""

    memory: Mapping[Slot, Committed]
    busy: Mapping[Slot, float]
    replicas: Mapping[str, int]
    bytes: Mapping[str, int]

    @staticmethod
    def opened(scope: Scope, intents: Iterable[Intent]) -> "_Books":
        """As the desired sets stand: a workload with lower priority keeps what it has (nothing is preempted)."""
        inputs = scope.inputs
        books = _Books(
            {Slot(*slot): committed for slot, committed in commitments(inputs.fleet, inputs.desired).items()},
            {},
            {},
            {},
        )
        for intent in intents:
            for standing in standings(scope, intent):
                books = books.counted(scope, intent, standing, +1)
        return books

    def counted(self, scope: Scope, intent: Intent, standing: _Standing, sign: int) -> "_Books":
        """With (or without) a current replica in utilisation and quota; its memory stays until it is gone."""
        tenant, assignment = intent.key.tenant, standing.assignment
        slot = Slot(standing.node, assignment.device)
        busy = busy_share(scope, intent, standing.option, intent.require.replicas)
        return replace(
            self,
            busy={**self.busy, slot: self.busy.get(slot, 0.0) + sign * busy},
            replicas={**self.replicas, tenant: self.replicas.get(tenant, 0) + sign},
            bytes={**self.bytes, tenant: self.bytes.get(tenant, 0) + sign * assignment.memory_bytes},
        )

    def with_new(self, tenant: str, slot: Slot, memory: Bytes, busy: float) -> "_Books":
        return replace(
            self,
            memory={**self.memory, slot: self.memory.get(slot, NOTHING).plus(memory, loaded=False)},
            busy={**self.busy, slot: self.busy.get(slot, 0.0) + busy},
            replicas={**self.replicas, tenant: self.replicas.get(tenant, 0) + 1},
            bytes={**self.bytes, tenant: self.bytes.get(tenant, 0) + memory},
        )


def busy_share(scope: Scope, intent: Intent, option: Option | None, replicas: int) -> float:
    """Share of a device's time that one replica's declared traffic takes; 0 where none is declared."""
    if option is None or option.prediction is None:
        return 0.0
    rate = scope.replica_rate(intent, replicas)
    return rate * option.prediction.latency_p50_s.mid / max(1, option.device.parallelism)


def standings(scope: Scope, intent: Intent) -> tuple[_Standing, ...]:
    """Current replicas of a workload: assigned, not draining. refusal: why one is no replica to count on any more."""
    inputs = scope.inputs
    models = {model.digest: model for model in intent.models}
    found = list[_Standing]()
    for node, assignment in scope.current.get(intent.key, ()):
        state = inputs.fleet.nodes.get(node)
        device = None if state is None else state.device(assignment.device)
        model = models.get(assignment.model)
        observed = observed_of(inputs, node, assignment)
        ready = observed is not None and observed.phase is Phase.READY
        option = None
        if state is not None and device is not None and model is not None and model.digest in inputs.profiles:
            measured = observed.measured if observed is not None else None
            served = observed.served if observed is not None else ()
            option = scope.option(intent, model, state, device, served, measured)
        refusal = inputs.broken.get(assignment.id)
        if refusal is not None:
            pass
        elif state is None:
            refusal = Refusal(Code.NODE_UNKNOWN, node, "an enrolled node")
        elif state.liveness in (Liveness.SUSPECT, Liveness.LOST) and node not in scope.held:
            code = Code.NODE_SUSPECT if state.liveness is Liveness.SUSPECT else Code.NODE_LOST
            refusal = Refusal(code, f"{node} is silent", "a node that reports")
        elif device is None:
            refusal = Refusal(Code.DEVICE_LOST, f"{node} has no {assignment.device} any more", assignment.device)
        elif model is None:
            refusal = Refusal(Code.CONFLICT, "another model is asked for now", ", ".join(models))
        elif assignment.shared_worker != intent.shared_worker:
            refusal = Refusal(Code.CONFLICT, "its isolation changed", "a worker as the document says")
        elif not ready and Triple(assignment.model, device.provider, device.runtime_version) in inputs.poisoned:
            refusal = Refusal(Code.POISONED, "it crashed its runtime again and again", "a model that survives")
        elif option is None:
            refusal = Refusal(Code.MODEL_UNKNOWN, assignment.model, "a pushed model")
        found.append(_Standing(node, assignment, option, ready, refusal))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Pick:
    """A chosen replica: a current one that stays, or a new one."""

    option: Option
    keeps: _Standing | None


@dataclass(frozen=True, slots=True)
class _Level:
    """One setting of what may give, worked through."""

    require: Requirements
    limits: Limits
    picks: tuple[_Pick, ...]
    faults: tuple[tuple[Fault, ...], ...]
    """By option; after picking, so that memory, utilisation, quota and spread are judged beside the picks."""
    books: _Books

    @property
    def full(self) -> bool:
        return len(self.picks) >= self.require.replicas


class _Solver:
    """One workload against the books."""

    def __init__(self, scope: Scope, intent: Intent, books: _Books) -> None:
        self.scope = scope
        self.intent = intent
        self.terms = terms_of(intent)
        self.standings = standings(scope, intent)
        self.standing = tuple(each for each in self.standings if each.refusal is None)
        for each in self.standings:
            books = books.counted(scope, intent, each, -1)
        self.books = books
        self._options: tuple[Option, ...] | None = None

    # -- one workload ------------------------------------------------------------------------------------------------

    def plan(self, *, explain: bool) -> tuple[WorkloadPlan, _Books]:
        intent = self.intent
        if not explain and (level := self._unmoved()) is not None:
            return self._plan(level, (), ()), level.books
        base = self._solve(intent.require, intent.limits)
        levels = [base]
        for step in intent.relax:
            if levels[-1].full:
                break
            levels.append(self._solve(step.require, step.limits))
        best = max(range(len(levels)), key=lambda index: (len(levels[index].picks), -index))
        level = levels[best] if not levels[-1].full else levels[-1]
        relaxed = tuple(step.change for step in intent.relax[: levels.index(level)])
        if not relaxed:
            relaxed = self._already_relaxed(level)
        proposal, nearest = (None, "")
        if not level.full and explain:
            proposal, nearest = self._nearest(level)
        refusal = None if level.full else self._refusal(level, nearest)
        plan = self._plan(level, self._candidates(level) if explain else (), relaxed)
        return replace(plan, refusal=refusal, nearest=nearest, proposal=proposal), level.books

    def _unmoved(self) -> _Level | None:
        """The level at which nothing needs deciding: every wanted replica stands by unchanged documents."""
        intent = self.intent
        kept = [each for each in self.standing if self._confirmed(each)]
        if len(kept) != intent.require.replicas or len(kept) != len(self.standing):
            return None
        if not all(self._still_meets(each, intent.require) for each in kept):
            return None
        picks = tuple(_Pick(_option(each), each) for each in kept)
        return _Level(intent.require, intent.limits, picks, (), self._booked(picks, intent.require.replicas))

    def _plan(self, level: _Level, candidates: tuple[Candidate, ...], relaxed: tuple[str, ...]) -> WorkloadPlan:
        targets = tuple(self._target(pick, level) for pick in level.picks)
        return WorkloadPlan(
            workload=self.intent.key,
            policy=self.intent.policy,
            wanted=level.require.replicas,
            placed=len(targets),
            candidates=candidates,
            changes=self._changes(level),
            refusal=None,
            relaxed=relaxed,
            nearest="",
            proposal=None,
            targets=targets,
        )

    # -- choosing ----------------------------------------------------------------------------------------------------

    @property
    def options(self) -> tuple[Option, ...]:
        """Every (device, model) of the region for this workload; one that a current replica holds as it measures."""
        if self._options is None:
            scope, intent = self.scope, self.intent
            current = {
                (each.node, each.assignment.device, each.assignment.model): each.option
                for each in self.standings
                if each.option is not None
            }
            broken = {
                (each.node, each.assignment.device, each.assignment.model): scope.inputs.broken[each.assignment.id]
                for each in self.standings
                if each.assignment.id in scope.inputs.broken
            }
            options = list[Option]()
            for model in intent.models:
                if model.digest not in scope.inputs.profiles:
                    continue
                for state, device in scope.devices:
                    key = (state.name, device.name, model.digest)
                    option = current.get(key) or scope.option(intent, model, state, device)
                    options.append(replace(option, broken=broken[key]) if key in broken else option)
            self._options = tuple(options)
        return self._options

    def _solve(self, require: Requirements, limits: Limits) -> _Level:
        """Pick replicas one by one, best first; a current one stays unless its documents changed and another gains."""
        scope, intent, options = self.scope, self.intent, self.options
        faults = [scope.faults(each, intent, require, limits) for each in options]
        figures = [values(scope, each, intent, require.replicas) for each in options]
        current = {
            (each.node, each.assignment.device, each.assignment.model): index
            for index, each in enumerate(self.standing)
        }
        kept = [self._keeps(each, require, limits) for each in self.standing]
        eligible = [
            index
            for index, each in enumerate(options)
            if not faults[index]
            or ((slot := (*each.slot, each.model.digest)) in current and kept[current[slot]] is not None)
        ]
        _, scores = score([figures[index] for index in eligible], intent.weights)
        rank = {
            index: (value, tie(scope.inputs.seed, str(intent.key), *options[index].slot, options[index].model.digest))
            for index, value in zip(eligible, scores, strict=True)
        }
        order = sorted(rank, key=rank.__getitem__)
        by_key = {(*each.slot, each.model.digest): index for index, each in enumerate(options)}

        def standing_rank(each: _Standing) -> tuple[bool, tuple[float, bytes], str]:
            key = (each.node, each.assignment.device, each.assignment.model)
            return not each.ready, rank.get(by_key.get(key, -1), (math.inf, b"")), each.assignment.id

        unmoved = sorted((each for each, keeps in zip(self.standing, kept, strict=True) if keeps), key=standing_rank)
        yielding = sorted(
            (each for each, keeps in zip(self.standing, kept, strict=True) if keeps is False), key=standing_rank
        )
        picks = list[_Pick]()
        books = self.books
        while len(picks) < require.replicas:
            standing = next((each for each in unmoved if self._spread_ok(_option(each), picks, require)), None)
            if standing is not None:
                unmoved.remove(standing)
                picks.append(_Pick(_option(standing), standing))
                books = books.counted(scope, intent, standing, +1)
                continue
            best = None if self._too_many_broken() else self._best(order, faults, picks, require, books)
            standing = next((each for each in yielding if self._spread_ok(_option(each), picks, require)), None)
            if standing is not None and not self._betters(best, standing, require):
                yielding.remove(standing)
                picks.append(_Pick(_option(standing), standing))
                books = books.counted(scope, intent, standing, +1)
            elif best is not None:
                option = options[best]
                picks.append(_Pick(option, None))
                books = books.with_new(intent.key.tenant, option.slot, _memory(option), self._busy(option, require))
            else:
                break
        full = len(picks) >= require.replicas
        judged = tuple(
            () if any(pick.option is option for pick in picks) else found or self._judged(option, picks, require, full)
            for option, found in zip(options, faults, strict=True)
        )
        return _Level(require, limits, tuple(picks), judged, books)

    def _keeps(self, standing: _Standing, require: Requirements, limits: Limits) -> bool | None:
        """True: stays whatever else there is. False: may stay, but yields to a gain. None: may not stay."""
        if self._confirmed(standing):
            return True if self._still_meets(standing, require) else None
        option = _option(standing)
        found = self.scope.faults(option, self.intent, require, limits)
        return None if any(fault.order is not Order.NODE for fault in found) else False

    def _confirmed(self, standing: _Standing) -> bool:
        """Was this replica chosen, or confirmed, under the very terms that hold now?"""
        return self.scope.inputs.terms.get(standing.assignment.id) == self.terms

    def _still_meets(self, standing: _Standing, require: Requirements) -> bool:
        option = _option(standing)
        found = self.scope.document_faults(option, require)
        return not any(fault.order in HARD for fault in found)

    def _betters(self, best: int | None, standing: _Standing, require: Requirements) -> bool:
        """Is the best new option so much better that a running replica should yield to it?"""
        if best is None:
            return False
        replicas = require.replicas
        new = values(self.scope, self.options[best], self.intent, replicas)
        old = values(self.scope, _option(standing), self.intent, replicas)
        return gain(new, old, self.intent.weights) >= GAIN_LEAST

    def _best(
        self,
        order: list[int],
        faults: list[tuple[Fault, ...]],
        picks: list[_Pick],
        require: Requirements,
        books: _Books,
    ) -> int | None:
        for index in order:
            option = self.options[index]
            if faults[index] or self._holds_already(option, picks):
                continue
            if not self._crowded(option, picks, require, books):
                return index
        return None

    def _holds_already(self, option: Option, picks: list[_Pick]) -> bool:
        """A current replica of this very option is no new one: it was weighed as itself."""
        return any(
            each.node == option.slot.node
            and each.assignment.device == option.slot.device
            and each.assignment.model == option.model.digest
            for each in self.standing
            if not any(pick.keeps is each for pick in picks)
        )

    def _judged(self, option: Option, picks: list[_Pick], require: Requirements, full: bool) -> tuple[Fault, ...]:
        """What kept a candidate out that was not picked; when all replicas are placed, it was only not the best."""
        found = self._crowded(option, picks, require, self.books)
        return tuple(fault for fault in found if not full or fault.order is not Order.SPREAD)

    def _crowded(self, option: Option, picks: list[_Pick], require: Requirements, books: _Books) -> tuple[Fault, ...]:
        """Constraints that depend on what else is placed."""
        slot, tenant = option.slot, self.intent.key.tenant
        admissible = admissible_bytes(option.device, option.state, books.memory.get(slot, NOTHING))
        needed = _memory(option)
        busy = self._busy(option, require)
        found = [
            memory_fault(option, needed, admissible),
            utilisation_fault(option, busy, books.busy.get(slot, 0.0), UTILISATION_MOST, require.replicas),
            self._quota(tenant, needed, books),
            None if self._spread_ok(option, picks, require) else _spread_fault(option, require),
        ]
        return tuple(fault for fault in found if fault is not None)

    def _quota(self, tenant: str, needed: int, books: _Books) -> Fault | None:
        quota = self.scope.inputs.quotas.get(tenant)
        if quota is None:
            return None
        replicas, taken = books.replicas.get(tenant, 0), books.bytes.get(tenant, 0)
        if quota.replicas is not None and replicas + 1 > quota.replicas:
            refusal = Refusal(Code.QUOTA, f"{tenant} has {replicas} replicas", f"at most {quota.replicas}")
            return Fault(Order.QUOTA, refusal, physical(f"quota: {{replicas: {replicas + 1}}} of tenant {tenant}"))
        if quota.memory is not None and taken + needed > quota.memory:
            refusal = Refusal(Code.QUOTA, f"{tenant} has {show_bytes(taken)}", f"at most {show_bytes(quota.memory)}")
            more = show_bytes(taken + needed)
            return Fault(Order.QUOTA, refusal, physical(f"quota: {{memory: {more}}} of tenant {tenant}"))
        return None

    def _spread_ok(self, option: Option, picks: list[_Pick], require: Requirements) -> bool:
        match require.spread:
            case Spread.NONE:
                return True
            case Spread.DEVICE:
                return all(pick.option.slot != option.slot for pick in picks)
            case Spread.NODE:
                return all(pick.option.slot.node != option.slot.node for pick in picks)

    def _busy(self, option: Option, require: Requirements) -> float:
        return busy_share(self.scope, self.intent, option, require.replicas)

    def _booked(self, picks: tuple[_Pick, ...], replicas: int) -> _Books:
        books = self.books
        for pick in picks:
            if pick.keeps is not None:
                books = books.counted(self.scope, self.intent, pick.keeps, +1)
        return books

    def _broken(self) -> list[tuple[_Standing, Refusal]]:
        broken = self.scope.inputs.broken
        return [(each, broken[each.assignment.id]) for each in self.standings if each.assignment.id in broken]

    def _too_many_broken(self) -> bool:
        return len(self._broken()) >= BROKEN_MOST

    # -- explaining --------------------------------------------------------------------------------------------------

    def _target(self, pick: _Pick, level: _Level) -> Target:
        intent, option = self.intent, pick.option
        kept = pick.keeps.assignment if pick.keeps is not None else None
        return Target(
            workload=intent.key,
            revision=intent.revision,
            node=option.slot.node,
            device=option.slot.device,
            provider=option.device.provider,
            model=option.model.digest,
            model_bytes=option.profile.size_bytes,
            precision=option.precision,
            memory_bytes=kept.memory_bytes if kept is not None else _memory(option),
            max_batch=intent.max_batch,
            shared_worker=intent.shared_worker,
            partition=intent.partition,
            keeps=kept.id if kept is not None else "",
            terms=self.terms,
        )

    def _changes(self, level: _Level) -> tuple[PlacementChange, ...]:
        changes = list[PlacementChange]()
        kept = {pick.keeps.assignment.id for pick in level.picks if pick.keeps is not None}
        decided = len(kept) == len(level.picks) > 0 and all(
            pick.keeps is not None and self._confirmed(pick.keeps) for pick in level.picks
        )
        for pick in level.picks:
            option = pick.option
            sign, name, why = (
                ("+", "", "the best that fits") if pick.keeps is None else ("=", pick.keeps.assignment.id, "stays")
            )
            changes.append(PlacementChange(sign, *option.slot, option.model.digest, option.precision, name, why))
        for each in self.standings:
            if each.assignment.id in kept:
                continue
            if not level.picks or len(level.picks) < level.require.replicas:
                sign, why = "=", "serves until it can be replaced"
            elif decided and not self._confirmed(each):
                sign, why = "=", "serves until its replacement is ready"
            else:
                sign, why = "-", str(each.refusal) if each.refusal is not None else "another is better or ready"
            asked = each.assignment
            changes.append(PlacementChange(sign, each.node, asked.device, asked.model, asked.precision, asked.id, why))
        return tuple(changes)

    def _candidates(self, level: _Level) -> tuple[Candidate, ...]:
        scope, intent, options = self.scope, self.intent, self.options
        replicas = level.require.replicas
        chosen = {(*pick.option.slot, pick.option.model.digest) for pick in level.picks}
        current = {(each.node, each.assignment.device, each.assignment.model) for each in self.standings}
        keys = [(*option.slot, option.model.digest) for option in options]
        fits = [index for index, key in enumerate(keys) if key in chosen or not level.faults[index]]
        figures = [values(scope, options[index], intent, replicas) for index in fits]
        terms, scores = score(figures, intent.weights)
        best = dict(zip(fits, zip(terms, scores, pareto(figures), strict=True), strict=True))
        rows = list[tuple[tuple[bool, bool, float, float, bytes], Candidate]]()
        for index, (option, key) in enumerate(zip(options, keys, strict=True)):
            fit = best.get(index)
            faults = () if fit is not None else tuple(sorted(level.faults[index], key=lambda fault: fault.order))
            gives = tuple(fault.give for fault in faults)
            candidate = Candidate(
                node=option.slot.node,
                device=option.slot.device,
                model=option.model.digest,
                precision=option.precision,
                emulated=option.device.emulated,
                chosen=key in chosen,
                current=key in current,
                score=fit[1] if fit is not None else math.nan,
                terms=fit[0] if fit is not None else (),
                prediction=option.prediction,
                cost_usd_per_h=option.cost,
                carbon_g_per_h=scope.carbon_g_per_h(option, intent, replicas),
                refusal=None if not faults else _with_remedy(faults[0].refusal, faults[0].give, level),
                nearest=typed(gives, level.require, level.limits) if faults else "",
                pareto=fit is not None and fit[2],
            )
            order = (
                fit is None,
                key not in chosen,
                fit[1] if fit else 0.0,
                distance(gives),
                tie(scope.inputs.seed, *key),
            )
            rows.append((order, candidate))
        return tuple(candidate for _, candidate in sorted(rows, key=lambda row: row[0]))

    def _already_relaxed(self, level: _Level) -> tuple[str, ...]:
        """The steps that standing replicas live by: placed under them, and not moved back by figures alone."""
        intent = self.intent
        kept = [pick.option for pick in level.picks if pick.keeps is not None]
        settings = [(intent.require, intent.limits), *((step.require, step.limits) for step in intent.relax)]
        for count, (require, limits) in enumerate(settings):
            found = [
                fault
                for option in kept
                for fault in self.scope.faults(option, intent, require, limits)
                if Order.LATENCY <= fault.order <= Order.CARBON
            ]
            if not found:
                return tuple(step.change for step in intent.relax[:count])
        return ()

    def _nearest(self, level: _Level) -> tuple[Relaxation | None, str]:
        """The smallest change that really places every replica, found by trying; else what has to be done by hand."""
        require, limits = level.require, level.limits
        ways = sorted(
            {merged(tuple(fault.give for fault in faults)) for faults in level.faults if faults},
            key=lambda gives: (distance(gives), str(gives)),
        )
        open_ways = [gives for gives in ways if all(give.in_document for give in gives)]
        trials = set[tuple[Give, ...]]()
        together: tuple[Give, ...] = ()
        for gives in open_ways[:TRIALS_MOST]:
            together = merged((*together, *gives))
            trials.add(together)
            trials.add(gives)
        placed = len(level.picks)
        fewer = Give(replicas=max(1, placed), distance=1 - placed / require.replicas)
        if require.replicas > 1:
            trials |= {(*gives, fewer) for gives in ((), *open_ways[:4])}
        if require.spread is not Spread.NONE and require.replicas > 1:
            closer = [
                Give(spread=spread, distance=1.0)
                for spread in (Spread.DEVICE, Spread.NONE)
                if spread is not require.spread
            ]
            trials |= {(*gives, give) for give in closer for gives in ((), *open_ways[:2])}
        for gives in sorted(trials, key=lambda gives: (distance(gives), str(gives)))[: 2 * TRIALS_MOST]:
            proposal = relaxation(gives, require, limits)
            if self._solve(proposal.require, proposal.limits).full:
                return proposal, proposal.change
        return None, typed(ways[0], require, limits) if ways else "add a device to the region"

    def _refusal(self, level: _Level, nearest: str) -> Refusal:
        """Why replicas are missing: the first constraint of the candidate that comes nearest."""
        wanted, placed = level.require.replicas, len(level.picks)
        broken = self._broken()
        if len(broken) >= BROKEN_MOST:
            places = ", ".join(f"{each.node}/{each.assignment.device}" for each, _ in broken)
            return Refusal(broken[0][1].code, f"failed on {places}", f"{wanted} replicas", nearest)
        missing = [model.source for model in self.intent.models if model.digest not in self.scope.inputs.profiles]
        if len(missing) == len(self.intent.models):
            return Refusal(Code.MODEL_UNKNOWN, ", ".join(missing), "a pushed model", "shoal model push FILE")
        refused = [faults for faults in level.faults if faults]
        if not refused:
            found = f"{len(self.options)} devices" if self.options else "no devices"
            code = Code.REPLICAS_SHORT if self.options else Code.NO_CANDIDATE
            return Refusal(code, f"{found}, {placed} of {wanted} placed", f"{wanted} replicas", nearest)
        closest = min(refused, key=lambda faults: (distance(tuple(fault.give for fault in faults)), str(faults)))
        first = min(closest, key=lambda fault: fault.order).refusal
        counts = dict[Code, int]()
        for faults in refused:
            code = min(faults, key=lambda fault: fault.order).refusal.code
            counts[code] = counts.get(code, 0) + 1
        census = ", ".join(f"{code} x {count}" for code, count in sorted(counts.items()))
        if placed:
            return Refusal(Code.REPLICAS_SHORT, f"{placed} of {wanted} placed; {census}", f"{wanted} replicas", nearest)
        return Refusal(first.code, f"{first.found}; of all candidates: {census}", first.asked, nearest)


def _option(standing: _Standing) -> Option:
    assert standing.option is not None, "a replica that counts has its option"
    return standing.option


def _memory(option: Option) -> Bytes:
    """What is committed for a new replica: the upper end of the prediction."""
    return Bytes(0 if option.prediction is None else math.ceil(option.prediction.memory_bytes.high))


def _spread_fault(option: Option, require: Requirements) -> Fault:
    taken = option.slot.node if require.spread is Spread.NODE else f"{option.slot.node}/{option.slot.device}"
    refusal = Refusal(Code.SPREAD_CONFLICT, f"{taken} has a replica already", f"spread: {require.spread}")
    other = Spread.DEVICE if require.spread is Spread.NODE else Spread.NONE
    return Fault(Order.SPREAD, refusal, Give(spread=other, distance=1.0))


def _with_remedy(refusal: Refusal, give: Give, level: _Level) -> Refusal:
    return refusal if refusal.remedy else replace(refusal, remedy=typed((give,), level.require, level.limits))


def _hash(inputs: Inputs, plans: Iterable[WorkloadPlan]) -> str:
    """SHA-256 over the documents and the chosen (workload, node, device, model, precision), first 16 hex digits."""
    decided = {
        "documents": sorted((each.kind, each.name, each.digest) for each in inputs.documents),
        "targets": sorted(
            (str(plan.workload), target.node, target.device, target.model, target.precision)
            for plan in plans
            for target in plan.targets
        ),
        "unplaced": sorted(str(plan.workload) for plan in plans if plan.placed < plan.wanted),
    }
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]
