"""Checks documents beyond their types: every field has a consumer, every combination can be met, and no field is
without effect.

`CONSUMERS` lists for each field the module that acts on it and the reason codes that it can cause.
docs/reference/policy.md is generated from it, and a test compares it with the models. A field without a consumer is
refused when it is used.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from shoal.policies.cel import Expression
from shoal.policies.kinds import (
    Availability,
    Bound,
    Kind,
    MigrationSpec,
    Optimize,
    Policy,
    Precision,
    Region,
    StateTensors,
    Tenant,
    Workload,
    spread_text,
)
from shoal.policies.parse import MappingNode, Position, ScalarNode, SequenceNode, YamlNode, key_position, position_of
from shoal.policies.quantities import format_field
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.migration import DRAIN_S
from shoal.types.workload import PREPARABLE

Finding = tuple[Position, Refusal]
Path = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class ActiveField:
    """A field that this release acts on."""

    # Module or package that acts on it.
    consumer: str
    # Codes that it can cause, apart from those of the document language.
    codes: tuple[Code, ...] = ()
    # Name by which the consumer reads it, which a test looks for there; empty: not checked.
    read_as: str = ""


@dataclass(frozen=True, slots=True)
class PlannedField:
    """A field that is refused with NOT_SUPPORTED_YET when it is used."""

    # Part of Shoal that will act on it.
    comes_with: str


_PLACEMENT = "shoal.coordinator.core.placement"
_WORKLOADS = "shoal.coordinator.core.workloads"
_CONTROLLERS = "shoal.coordinator.controllers"
_FLEET = "shoal.coordinator.core.fleet"
_SIGNALS = "shoal.coordinator.core.signals"
_NEGOTIATION = "shoal.coordinator.core.negotiation"
_MOVES = "shoal.coordinator.core.migration"
_LANGUAGE = "shoal.policies.documents"
_RESOLVE = "shoal.policies.resolve"

_HEAD: Final[Mapping[str, ActiveField | PlannedField]] = {
    "apiVersion": ActiveField(_LANGUAGE, (Code.API_VERSION_UNKNOWN,)),
    "kind": ActiveField(_LANGUAGE, (Code.KIND_UNKNOWN,)),
    "metadata.name": ActiveField(_LANGUAGE, (Code.NAME_INVALID, Code.NAME_DUPLICATE)),
}
_FEDERATION = PlannedField("federation")
_SOURCE: Final = (Code.SOURCE_DENIED, Code.SOURCE_UNREACHABLE, Code.SIGNAL_INVALID)
_WINDOW = ActiveField(_MOVES, read_as="windows")
_TOLERANCE = ActiveField(
    _MOVES,
    (Code.VERIFY_FAILED, Code.DRIFT_OVER),
    read_as="tolerances",
)

CONSUMERS: Final[Mapping[str, Mapping[str, ActiveField | PlannedField]]] = {
    "Workload": {
        **_HEAD,
        "metadata.tenant": ActiveField(_PLACEMENT, (Code.TENANT_UNKNOWN, Code.QUOTA), read_as="tenant"),
        "metadata.labels": ActiveField(_RESOLVE, read_as="labels"),
        "spec.model.source": ActiveField(_CONTROLLERS, (Code.MODEL_UNKNOWN,), read_as="source"),
        "spec.model.variants.source": ActiveField(_CONTROLLERS, (Code.MODEL_UNKNOWN,), read_as="source"),
        "spec.model.variants.precision": ActiveField(_PLACEMENT, (Code.PRECISION_DENIED,), read_as="precision"),
        "spec.model.samples": ActiveField(
            _MOVES,
            (Code.MODEL_UNKNOWN, Code.MODEL_INVALID, Code.VERIFY_FAILED),
            read_as="pack",
        ),
        "spec.model.warm_up": ActiveField(
            _PLACEMENT,
            (Code.WARMUP_FAILED,),
            read_as="warm_up_optional",
        ),
        "spec.model.shapes": ActiveField(
            _PLACEMENT,
            (Code.SHAPES_OPEN, Code.MODEL_INVALID),
            read_as="shapes",
        ),
        "spec.traffic.from": ActiveField(_PLACEMENT, (Code.SLO_UNREACHABLE,), read_as="origin"),
        "spec.traffic.rate": ActiveField(_PLACEMENT, (Code.UTILISATION_SHORT,), read_as="rate"),
        "spec.traffic.peak": ActiveField(_WORKLOADS, (Code.UTILISATION_SHORT,), read_as="peak"),
        "spec.traffic.when": ActiveField(_WORKLOADS, (Code.EXPRESSION_INVALID,), read_as="when"),
        "spec.batching.max": ActiveField(
            "shoal.agent.worker.batch_trial",
            read_as="max",
        ),
        "spec.batching.delay": ActiveField(
            "shoal.agent.worker.job_queue",
            read_as="delay_s",
        ),
        "spec.batching.padding": ActiveField(
            "shoal.agent.worker.model_runner",
            read_as="padding",
        ),
        "spec.capture.consent": ActiveField(
            _WORKLOADS,
            (Code.CONSENT_MISSING,),
            read_as="capture",
        ),
        "spec.capture.max": ActiveField("shoal.agent.dataplane.verification_source", read_as="capture"),
        "spec.session": ActiveField(_RESOLVE),
        "spec.session.state": ActiveField(
            "shoal.agent.dataplane.sessions",
            (Code.SESSION_INVALID, Code.SESSION_LOST, Code.LEASE_ENDED, Code.HANDOVER_FAILED),
            read_as="session",
        ),
        "spec.isolation": ActiveField(_PLACEMENT, read_as="shared_worker"),
        "spec.policy": ActiveField(_CONTROLLERS, (Code.POLICY_UNKNOWN,), read_as="policy"),
    },
    "Policy": {
        **_HEAD,
        "spec.require.latency.p95": ActiveField(_PLACEMENT, (Code.SLO_UNREACHABLE,), read_as="latency_p95_s"),
        "spec.require.latency.from": ActiveField(_PLACEMENT, (Code.SLO_UNREACHABLE,), read_as="latency_from_origin"),
        "spec.require.where": ActiveField(
            _PLACEMENT, (Code.SELECTOR_MISMATCH, Code.EXPRESSION_INVALID, Code.POLICY_COST), read_as="where"
        ),
        "spec.require.residency": ActiveField(_PLACEMENT, (Code.RESIDENCY,), read_as="residency"),
        "spec.require.precision.allow": ActiveField(_PLACEMENT, (Code.PRECISION_DENIED,), read_as="precisions"),
        "spec.require.precision.prepare": ActiveField(
            _PLACEMENT,
            (Code.PREPARE_UNAVAILABLE, Code.PREPARE_FAILED),
            read_as="models",
        ),
        "spec.require.precision.tolerance.metric": _TOLERANCE,
        "spec.require.precision.tolerance.at_least": _TOLERANCE,
        "spec.require.precision.tolerance.at_most": _TOLERANCE,
        "spec.require.precision.tolerance.outputs.metric": _TOLERANCE,
        "spec.require.precision.tolerance.outputs.at_least": _TOLERANCE,
        "spec.require.precision.tolerance.outputs.at_most": _TOLERANCE,
        "spec.require.availability.replicas": ActiveField(_PLACEMENT, (Code.REPLICAS_SHORT,), read_as="replicas"),
        "spec.require.availability.spread": ActiveField(_PLACEMENT, (Code.SPREAD_CONFLICT,), read_as="spread"),
        "spec.require.availability.spread.over": ActiveField(
            _PLACEMENT, (Code.LABEL_MISSING, Code.SPREAD_CONFLICT), read_as="spread"
        ),
        "spec.require.availability.per": ActiveField(_WORKLOADS, (Code.REPLICAS_SHORT,), read_as="per"),
        "spec.require.availability.per.label": ActiveField(
            _WORKLOADS, (Code.LABEL_MISSING, Code.REPLICAS_SHORT), read_as="per"
        ),
        "spec.require.availability.standby": ActiveField(_PLACEMENT, (Code.STANDBY_SHORT,), read_as="standby"),
        "spec.require.availability.recovery": ActiveField(_WORKLOADS, read_as="recovery_s"),
        "spec.require.partial": ActiveField(
            _PLACEMENT,
            (Code.OP_UNSUPPORTED,),
            read_as="partial",
        ),
        "spec.require.trust.capability": ActiveField(
            _PLACEMENT, (Code.CAPABILITY_UNMEASURED,), read_as="measured_only"
        ),
        "spec.require.trust.within": ActiveField(_PLACEMENT, (Code.CAPABILITY_STALE,), read_as="measured_within_s"),
        "spec.require.trust.signed_model.keys": ActiveField(
            _PLACEMENT,
            (Code.SIGNATURE_REQUIRED, Code.SIGNATURE_INVALID, Code.SIGNATURE_EXPIRED, Code.PUBLISHER_UNKNOWN),
            read_as="signed_by",
        ),
        "spec.limits.cost": ActiveField(_PLACEMENT, (Code.COST_OVER,), read_as="cost"),
        "spec.limits.energy": ActiveField(_PLACEMENT, (Code.ENERGY_OVER,), read_as="energy"),
        "spec.limits.carbon": ActiveField(
            _PLACEMENT,
            (Code.CARBON_OVER,),
            read_as="carbon",
        ),
        "spec.limits.node_power": ActiveField(_PLACEMENT, (Code.POWER_OVER,), read_as="node_power"),
        **{f"spec.optimize.{name}": ActiveField(_PLACEMENT, read_as="weights") for name in Optimize.model_fields},
        "spec.prefer": ActiveField(_PLACEMENT, (Code.EXPRESSION_INVALID, Code.POLICY_COST), read_as="prefer"),
        "spec.relax.latency.p95": ActiveField(_PLACEMENT, read_as="relax"),
        "spec.relax.precision.allow": ActiveField(_PLACEMENT, read_as="relax"),
        "spec.relax.availability.replicas": ActiveField(_PLACEMENT, read_as="relax"),
        "spec.relax.availability.spread": ActiveField(_PLACEMENT, read_as="relax"),
        "spec.relax.availability.spread.over": ActiveField(_PLACEMENT, read_as="relax"),
        "spec.relax.limits.cost": ActiveField(_PLACEMENT, read_as="relax"),
        "spec.relax.limits.energy": ActiveField(_PLACEMENT, read_as="relax"),
        "spec.federation.delegate": ActiveField(_NEGOTIATION, (Code.NO_BID,), read_as="mode"),
        "spec.federation.margin": ActiveField(_NEGOTIATION, (Code.NO_BID,), read_as="margin"),
        "spec.federation.to": ActiveField(_NEGOTIATION, (Code.TRADE_DENIED,), read_as="to"),
        "spec.federation.term": ActiveField(_NEGOTIATION, read_as="term_s"),
        "spec.migration.when.gain": ActiveField(_MOVES, (Code.MOVE_HELD,), read_as="gain"),
        "spec.migration.when.cooldown": ActiveField(_MOVES, (Code.MOVE_BLOCKED, Code.MOVE_HELD), read_as="cooldown_s"),
        "spec.migration.when.max_concurrent": ActiveField(_PLACEMENT, read_as="max_concurrent"),
        "spec.migration.verify.against": ActiveField(
            _MOVES,
            (Code.VERIFY_FAILED, Code.VERIFY_IMPOSSIBLE),
            read_as="against",
        ),
        "spec.migration.verify.inputs": ActiveField(_MOVES, (Code.VERIFY_IMPOSSIBLE,), read_as="inputs"),
        "spec.migration.verify.samples": ActiveField(_MOVES, read_as="samples"),
        "spec.migration.verify.on_fail": ActiveField(
            _MOVES,
            (Code.VERIFY_FAILED,),
            read_as="advisory",
        ),
        "spec.migration.allow_gap": ActiveField(
            _MOVES, (Code.NO_ROOM_FOR_BOTH, Code.MOVE_TIMEOUT), read_as="allow_gap_s"
        ),
        "spec.migration.shift.steps": ActiveField(_MOVES, (Code.GUARD_TRIPPED,), read_as="steps"),
        "spec.migration.shift.hold": ActiveField(_MOVES, (Code.MOVE_TIMEOUT,), read_as="hold_s"),
        "spec.migration.shift.guard.errors": ActiveField(_MOVES, (Code.GUARD_TRIPPED,), read_as="guard_errors"),
        "spec.migration.shift.guard.p95": ActiveField(_MOVES, (Code.GUARD_TRIPPED,), read_as="guard_p95"),
        "spec.migration.drain": ActiveField(_MOVES, read_as="drain_s"),
        "spec.migration.windows.days": _WINDOW,
        "spec.migration.windows.from": _WINDOW,
        "spec.migration.windows.to": _WINDOW,
        "spec.migration.windows.zone": _WINDOW,
        "spec.partition.heartbeat": ActiveField(_WORKLOADS, read_as="heartbeat_s"),
        "spec.partition.lost_after": ActiveField(_FLEET, (Code.NODE_SUSPECT, Code.NODE_LOST), read_as="lost_after_s"),
        "spec.partition.serve": ActiveField("shoal.agent.core.partition", read_as="serve_s"),
        "spec.partition.cold_boot": ActiveField("shoal.agent.core.partition", read_as="cold_boot_serve"),
        "spec.partition.on_reconnect": ActiveField("shoal.agent.core.reconcile"),
        "spec.scale.to_zero_after": ActiveField(
            "shoal.agent.core.assignment.unloading", (Code.SCALED_TO_ZERO,), read_as="to_zero_after_s"
        ),
        "spec.priority": ActiveField(_PLACEMENT, read_as="priority"),
        "spec.preempt": ActiveField(_PLACEMENT, (Code.PREEMPTED,), read_as="preempt"),
        "spec.schedule.when": ActiveField(_WORKLOADS, (Code.EXPRESSION_INVALID,), read_as="schedule"),
        **{
            f"spec.schedule.optimize.{name}": ActiveField(_WORKLOADS, read_as="weights")
            for name in Optimize.model_fields
        },
    },
    "Tenant": {
        **_HEAD,
        "spec.quota.replicas": ActiveField(_PLACEMENT, (Code.QUOTA,), read_as="quotas"),
        "spec.quota.memory": ActiveField(_PLACEMENT, (Code.QUOTA,), read_as="quotas"),
        "spec.quota.cost": ActiveField(
            _PLACEMENT,
            (Code.QUOTA,),
            read_as="quotas",
        ),
        "spec.quota.rate": ActiveField(
            "shoal.agent.core.tenant_limits",
            (Code.TENANT_RATE,),
            read_as="rate",
        ),
        "spec.quota.concurrency": ActiveField(
            "shoal.agent.core.tenant_limits",
            (Code.TENANT_CONCURRENCY,),
            read_as="concurrency",
        ),
        "spec.weight": ActiveField(
            "shoal.agent.core.fair_queue",
            read_as="weights",
        ),
        "spec.regions": _FEDERATION,
        "spec.clients": PlannedField("named clients; a certificate's tenant name is what counts now"),
    },
    "Region": {
        **_HEAD,
        "spec.location.lat": _FEDERATION,
        "spec.location.lon": _FEDERATION,
        "spec.location.residency": ActiveField(_CONTROLLERS, (Code.RESIDENCY,), read_as="residency"),
        "spec.sleep.after": ActiveField(_WORKLOADS, read_as="sleep_after_s"),
        "spec.price": ActiveField(_PLACEMENT, (Code.COST_OVER,), read_as="node_price"),
        "spec.price.source": ActiveField(_SIGNALS, _SOURCE, read_as="source"),
        "spec.price.stale_after": ActiveField(_SIGNALS, (Code.SIGNAL_STALE,), read_as="stale_after_s"),
        "spec.carbon": ActiveField(_PLACEMENT, (Code.CARBON_OVER,), read_as="carbon_g_per_kwh"),
        "spec.carbon.source": ActiveField(_SIGNALS, _SOURCE, read_as="source"),
        "spec.carbon.stale_after": ActiveField(_SIGNALS, (Code.SIGNAL_STALE,), read_as="stale_after_s"),
        "spec.carbon.fallback": ActiveField(_SIGNALS, (Code.SIGNAL_STALE,), read_as="fallback"),
        "spec.trade.with": ActiveField(_NEGOTIATION, (Code.TRADE_DENIED,), read_as="partner"),
        "spec.trade.tenants": ActiveField(_NEGOTIATION, (Code.TENANT_DENIED,), read_as="tenants"),
        "spec.trade.hold_share": ActiveField(
            _NEGOTIATION,
            (Code.HOLD_SHARE,),
            read_as="hold_share",
        ),
        "spec.keys.name": ActiveField(_CONTROLLERS, (Code.NAME_DUPLICATE,), read_as="keys"),
        "spec.keys.key": ActiveField(_CONTROLLERS, (Code.SIGNATURE_INVALID, Code.MODEL_ROLLBACK), read_as="keys"),
        "spec.keys.until": ActiveField(_CONTROLLERS, (Code.SIGNATURE_EXPIRED,), read_as="until"),
    },
}


def check_fields(kind: str, root: YamlNode) -> Iterator[Finding]:
    """Fields that nothing acts on yet, and fields left empty. Reads the text as typed, so it works where a type is
    wrong too."""
    yield from _fields(_PLANNED[kind], root, root, ())


def _planned_fields(table: Mapping[str, ActiveField | PlannedField]) -> Mapping[str, PlannedField]:
    """Fields and blocks of which nothing is active, with the first planned field of each."""
    planned, active = dict[str, PlannedField](), set[str]()
    for field, entry in table.items():
        steps = field.split(".")
        for name in (".".join(steps[:count]) for count in range(1, len(steps) + 1)):
            if isinstance(entry, ActiveField):
                active.add(name)
            else:
                planned.setdefault(name, entry)
    return {name: entry for name, entry in planned.items() if name not in active}


_PLANNED: Final = {kind: _planned_fields(table) for kind, table in CONSUMERS.items()}
"""By kind: looked up for each field of each document."""


def _fields(planned: Mapping[str, PlannedField], root: YamlNode, node: YamlNode, path: Path) -> Iterator[Finding]:
    name = ".".join(step for step in path if isinstance(step, str))
    value = node.value if isinstance(node, ScalarNode) else None
    if path and isinstance(node, ScalarNode) and value is None:
        asked = "a value, or the field left out"
        yield (
            key_position(root, path),
            Refusal(Code.FIELD_INVALID, f"{_last_field(path)} without a value", asked, _REMOVE),
        )
    elif path and isinstance(node, MappingNode | SequenceNode) and node.node_count == 1:
        asked = "at least one entry, or the field left out"
        yield (
            key_position(root, path),
            Refusal(Code.FIELD_WITHOUT_EFFECT, f"{_last_field(path)} is empty", asked, _REMOVE),
        )
    elif name in planned:
        yield key_position(root, path), _planned_refusal(name, planned[name])
    elif isinstance(node, MappingNode):
        for key, inner in node.entries.items():
            yield from _fields(planned, root, inner, (*path, key))
    elif isinstance(node, SequenceNode):
        for index, inner in enumerate(node.items):
            yield from _fields(planned, root, inner, (*path, index))


_REMOVE = "give it a value or remove it"


def _last_field(path: Path) -> str:
    return next((repr(step) for step in reversed(path) if isinstance(step, str)), "the document")


def _planned_refusal(name: str, later: PlannedField) -> Refusal:
    return Refusal(
        Code.NOT_SUPPORTED_YET,
        f"nothing acts on {name} in this release",
        f"comes with {later.comes_with}",
        "remove it",
    )


def check_semantics(value: Kind, root: YamlNode) -> Iterator[Finding]:
    """Combinations that can never be met, and fields without effect, in one well-typed document."""
    match value:
        case Policy():
            rules = _policy(value)
        case Workload():
            rules = _workload(value)
        case Tenant():
            rules = _tenant(value)
        case Region():
            rules = _region(value)
    for path, refusal in rules:
        yield position_of(root, path), refusal


Rule = Iterator[tuple[Path, Refusal]]
_REQUIRE: Final = ("spec", "require")


def _policy(policy: Policy) -> Rule:
    spec = policy.spec
    require = spec.require
    yield from _zero_values(policy, _ZERO_IS_UNREACHABLE)
    if require.where is not None:
        yield from _where(require.where)
    if require.precision is not None:
        yield from _duplicates(require.precision.allow, (*_REQUIRE, "precision", "allow"))
        yield from _prepare(policy, require.precision)
        yield from _tolerance(require.precision)
    if require.residency is not None:
        yield from _duplicates(require.residency, (*_REQUIRE, "residency"))
    if require.trust is not None and require.trust.signed_model is not None:
        yield from _duplicates(require.trust.signed_model.keys, (*_REQUIRE, "trust", "signed_model", "keys"))
    yield from _availability(policy)
    if spec.optimize is not None and not any(spec.optimize.by_term().values()):
        yield (
            ("spec", "optimize"),
            _no_effect("every weight is 0", "at least one above 0", "give one a weight, or remove optimize"),
        )
    for index, entry in enumerate(spec.schedule):
        if not any(entry.optimize.by_term().values()):
            yield (
                ("spec", "schedule", index, "optimize"),
                _no_effect("every weight is 0", "at least one above 0", "give one a weight, or remove the entry"),
            )
        yield from _context_condition(entry.when, ("spec", "schedule", index, "when"))
    yield from _prefer(spec.prefer)
    yield from _relax(policy)
    yield from _delegation(policy)
    if spec.migration is not None:
        yield from _migration(spec.migration)
    if spec.partition.lost_after < 2 * spec.partition.heartbeat:
        yield (
            ("spec", "partition", "lost_after" if "lost_after" in spec.partition.model_fields_set else "heartbeat"),
            _unreachable(
                f"lost_after {format_field(spec.partition, 'lost_after')} "
                f"with heartbeat {format_field(spec.partition, 'heartbeat')}",
                "lost_after at least twice heartbeat",
                "raise lost_after: a node would be lost at its first late heartbeat",
            ),
        )


_SAMPLE_TIME: Final = datetime(2020, 1, 1, tzinfo=UTC)


def _context_condition(text: str, path: Path) -> Rule:
    """Checks a condition on the time or on a signal, which must be able to change."""
    expression = Expression.compile(text)
    try:
        expression.evaluate(now=_SAMPLE_TIME, region={"name": "", "residency": "", "carbon": 0.0})
    except ShoalError as error:
        yield path, error.refusal
        return
    constant = expression.constant
    if constant is not None:
        found = "always true" if constant else "never true"
        yield path, _no_effect(found, "a condition on now or region", 'write for example hour(now, "UTC") >= 22')


_ZERO_IS_UNREACHABLE: Final = (
    ("spec", "require", "latency", "p95"),
    ("spec", "require", "availability", "recovery"),
    ("spec", "require", "trust", "within"),
    ("spec", "limits", "cost"),
    ("spec", "limits", "energy"),
    ("spec", "limits", "carbon"),
    ("spec", "federation", "term"),
    ("spec", "migration", "drain"),
    ("spec", "scale", "to_zero_after"),
)


def _zero_values(value: Any, paths: Sequence[tuple[str, ...]]) -> Rule:
    for path in paths:
        found = value
        for step in path:
            found = getattr(found, step, None)
        if found == 0:
            yield (
                path,
                _unreachable(f"{path[-1]} of zero", "more than zero", "nothing can meet it: raise it, or remove it"),
            )


def _where(text: str) -> Rule:
    constant = Expression.compile(text).constant
    if constant is True:
        yield (*_REQUIRE, "where"), _no_effect("always true", "a condition on node, device or model", "remove where")
    elif constant is False:
        yield (
            (*_REQUIRE, "where"),
            _unreachable("never true", "a condition that some device can meet", "name node, device or model in it"),
        )


def _prefer(alternatives: Sequence[str]) -> Rule:
    path: Path = ("spec", "prefer")
    yield from _duplicates(alternatives, path)
    for index, text in enumerate(alternatives):
        constant = Expression.compile(text).constant
        if constant is True:
            found = _no_effect(
                "always true", "a condition on node, device or model", "remove it: what is left comes last"
            )
            yield (*path, index), found
        elif constant is False:
            found = _unreachable("never true", "a condition that some device can meet", "correct it, or remove it")
            yield (*path, index), found


def _duplicates(values: Sequence[str], path: Path) -> Rule:
    for index, value in enumerate(values):
        if value in values[:index]:
            yield (*path, index), _no_effect(f"{value!r} again", "each once", "remove it")


_SIMILARITY_METRICS: Final = frozenset({"cosine", "top_k"})
"""Metrics that grow with similarity, up to 1; the others are distances."""


def _prepare(policy: Policy, precision: Precision) -> Rule:
    later = (name for step in policy.spec.relax if step.precision for name in step.precision.allow)
    if precision.prepare and {*precision.allow, *later}.isdisjoint(PREPARABLE):
        found = f"nothing in {', '.join(precision.allow)} can be prepared"
        yield (*_REQUIRE, "precision", "prepare"), _no_effect(found, ", ".join(PREPARABLE), "allow it, or remove this")


def _tolerance(precision: Precision) -> Rule:
    tolerance, path = precision.tolerance, (*_REQUIRE, "precision", "tolerance")
    if isinstance(tolerance, Bound):
        yield from _metric_bound(tolerance, path)
    elif tolerance is not None:
        for output, bound in tolerance.outputs.items():
            yield from _metric_bound(bound, (*path, "outputs", output))


def _metric_bound(bound: Bound, path: Path) -> Rule:
    right, wrong = ("at_least", "at_most") if bound.metric in _SIMILARITY_METRICS else ("at_most", "at_least")
    value = getattr(bound, right)
    if getattr(bound, wrong) is not None:
        yield (*path, wrong), _no_effect(f"{wrong} of {bound.metric}", right, f"write {right}")
    elif value is None:
        yield (*path, "metric"), Refusal(Code.FIELD_MISSING, f"{bound.metric} without a bound", right, f"add {right}")
    elif value < 0 or (bound.metric in _SIMILARITY_METRICS and value > 1):
        most = "from 0 to 1" if bound.metric in _SIMILARITY_METRICS else "0 or more"
        yield (*path, right), _unreachable(f"{bound.metric} {value:g}", most, "nothing can meet it, or everything")


def _migration(migration: MigrationSpec) -> Rule:
    path: Path = ("spec", "migration")
    verify = migration.verify
    if verify is not None and verify.against == "none" and "on_fail" in verify.model_fields_set:
        found = f"on_fail: {verify.on_fail} where nothing is compared"
        yield (*path, "verify", "on_fail"), _no_effect(found, "something to compare with", "remove it")
    if migration.shift is not None:
        steps, place = migration.shift.steps, (*path, "shift", "steps")
        if any(not low < high for low, high in zip((0.0, *steps), steps, strict=False)):
            yield place, _unreachable("steps that do not grow", "each above the one before it", "put them in order")
        elif steps[-1] != 1:
            yield place, _unreachable("a last step below 100%", "100% at the end", "add 100%: the old one has to go")
        guard = migration.shift.guard
        if guard is not None and guard.errors is not None and guard.errors >= 1:
            found = f"errors {format_field(guard, 'errors')}"
            yield (*path, "shift", "guard", "errors"), _no_effect(found, "less than 100%", "lower it, or remove it")
        if guard is not None and guard.p95 == 0:
            yield (*path, "shift", "guard", "p95"), _unreachable("p95 of 0x", "more than zero", "raise it")
    for index, window in enumerate(migration.windows):
        if window.opens == window.closes:
            found = f"from {window.opens} to {window.closes}"
            yield (
                (*path, "windows", index, "to"),
                _unreachable(found, "a window of some length", "for a whole day write from 00:00 to 24:00"),
            )
        if window in migration.windows[:index]:
            yield (*path, "windows", index), _no_effect("the same window again", "each once", "remove it")
    verify = migration.verify
    if verify is not None and verify.against == "reference" and verify.inputs == "captured":
        yield (
            (*path, "verify", "inputs"),
            _no_effect("captured inputs against a reference", "samples", "captured inputs never become a reference"),
        )
    if migration.allow_gap and (verify is None or verify.against == "source"):
        yield (
            (*path, "allow_gap"),
            _unreachable(
                "allow_gap, and answers compared with those of a replica that has gone",
                "verify: {against: reference}",
                "verify against a reference, pushed or recorded, or remove allow_gap",
            ),
        )
    if migration.drain is not None and migration.drain > DRAIN_S:
        found = f"drain {format_field(migration, 'drain')}"
        yield (*path, "drain"), _unreachable(found, f"at most {DRAIN_S:.0f}s", "a node waits no longer: lower it")


_ONE_NODE = re.compile(r"""\bnode\.name\s*==\s*["'][^"']*["']|["'][^"']*["']\s*==\s*node\.name\b""")
_NODE_LIST = re.compile(r"\bnode\.name\s+in\s+\[([^\]]*)\]")


def _availability(policy: Policy) -> Rule:
    require, partition = policy.spec.require, policy.spec.partition
    wanted = require.availability
    if wanted is None:
        return
    path = (*_REQUIRE, "availability")
    if wanted.per is not None:
        yield from _per(policy, wanted)
        return
    if wanted.replicas == 1 and wanted.spread != "none":
        yield (
            (*path, "spread"),
            _no_effect("spread of one replica", "2 replicas or more", "raise replicas, or remove spread"),
        )
    nodes = _selected_node_count(require.where or "")
    apart = spread_text(wanted.spread) not in ("none", "device")
    if apart and nodes is not None and 1 < wanted.replicas > nodes:
        yield (
            (*path, "replicas"),
            _unreachable(
                f"{wanted.replicas} replicas on nodes of their own, where the selector names {nodes}",
                "as many nodes as replicas",
                "widen where, lower replicas, or set spread: none",
            ),
        )
    alone = wanted.replicas == 1 and wanted.standby == "none"
    if alone and wanted.recovery is not None and 0 < wanted.recovery < partition.lost_after:
        yield (
            (*path, "recovery"),
            _unreachable(
                f"recovery {format_field(wanted, 'recovery')} of one replica, whose node counts as lost only after "
                f"{format_field(partition, 'lost_after')}",
                "recovery of at least partition.lost_after",
                "run 2 replicas, keep standby: warm, lower partition.lost_after, or raise recovery",
            ),
        )


def _per(policy: Policy, wanted: Availability) -> Rule:
    """What contradicts one replica for each node or label."""
    path = (*_REQUIRE, "availability")
    asked = "one replica for each node or label, and no other number of them"
    for field in ("replicas", "spread"):
        if field in wanted.model_fields_set:
            yield (*path, field), _unreachable(f"{field} beside per", asked, f"remove {field}, or per")
    if wanted.standby != "none":
        yield (*path, "standby"), _unreachable("standby beside per", asked, "remove standby, or per")
    for index, step in enumerate(policy.spec.relax):
        if step.availability is not None:
            found = _unreachable("another number or spread beside per", asked, "remove it, or write replicas, not per")
            yield ("spec", "relax", index, "availability"), found
    federation = policy.spec.federation
    if federation is not None and federation.delegate != "never":
        found = _unreachable("another region beside per", "nodes of this region", "write delegate: never, or replicas")
        yield ("spec", "federation", "delegate"), found


def _selected_node_count(where: str) -> int | None:
    """How many nodes a plain conjunction names at most; None where that is not evident."""
    if "||" in where or "?" in where or "!" in where.replace("!=", ""):
        return None
    if _ONE_NODE.search(where):
        return 1
    match = _NODE_LIST.search(where)
    return len({name for name in match[1].split(",") if name.strip()}) if match else None


def _delegation(policy: Policy) -> Rule:
    federation, path = policy.spec.federation, ("spec", "federation")
    if federation is None:
        return
    given = sorted(federation.model_fields_set - {"delegate"})
    if federation.delegate == "never" and given:
        yield (
            (*path, given[0]),
            _no_effect(f"{given[0]} where nothing is delegated", "a delegate of when-infeasible or when-better",
                       "say when to delegate, or remove it"),
        )  # fmt: skip
    elif federation.delegate == "when-infeasible" and federation.margin is not None:
        yield (
            (*path, "margin"),
            _no_effect("a margin where nothing at home could be better", "a margin with delegate: when-better",
                       "write delegate: when-better, or remove margin"),
        )  # fmt: skip
    if federation.margin is not None and federation.margin >= 1:
        yield (
            (*path, "margin"),
            _unreachable(
                f"margin {format_field(federation, 'margin')}",
                "less than 100%",
                "nothing can be that much better: lower it",
            ),
        )
    yield from _duplicates(federation.to, (*path, "to"))


_SPREADS: Final = ("none", "device", "node")
"""From the weakest on; every label is stronger."""


def _relax(policy: Policy) -> Rule:
    """Each step must loosen something, compared with the policy and the steps before it."""
    require, limits = policy.spec.require, policy.spec.limits
    available = require.availability
    current: dict[str, Any] = {
        "latency.p95": require.latency.p95 if require.latency else None,
        "limits.cost": limits.cost,
        "limits.energy": limits.energy,
        "precision.allow": _comparable("allow", require.precision.allow) if require.precision else None,
        "availability.replicas": available.replicas if available else 1,
        "availability.spread": _comparable("spread", available.spread if available else "none"),
    }
    if available is not None and available.per is not None:  # `_per` refuses any other number
        current = {name: value for name, value in current.items() if not name.startswith("availability.")}
    for index, step in enumerate(policy.spec.relax):
        for part, field in (name.split(".") for name in tuple(current)):
            inner = getattr(step, part)
            asked = getattr(inner, field) if inner is not None else None
            if asked is None:
                continue
            name = f"{part}.{field}"
            after = _comparable(field, asked)
            before = current[name]
            path = ("spec", "relax", index, part, field)
            if before is None:
                yield (
                    path,
                    _unreachable(
                        f"{name} is not bounded by the policy, so this tightens it", "a step that loosens", "remove it"
                    ),
                )
            elif after == before:
                yield path, _no_effect(f"{name} as it is already", "a step that loosens", "change or remove it")
            elif not _is_looser(field, after, before):
                yield path, _unreachable(f"{name} tighter than before this step", "a step that loosens", _LOOSER[field])
            current[name] = after


def _is_looser(field: str, after: Any, before: Any) -> bool:
    """Whether a value is looser than another one, both as `_comparable` gives them. Which of two labels divides a
    region into more parts is for the operator to know."""
    match field:
        case "spread":
            return bool(after[0] < before[0] or len(_SPREADS) == after[0] == before[0])
        case "replicas":
            return bool(after < before)
        case _:
            return bool(after > before)


def _comparable(field: str, value: Any) -> Any:
    """A value whose order tells which is looser."""
    match field:
        case "allow":
            return frozenset(value)
        case "spread":
            word = spread_text(value)
            return (_SPREADS.index(word), "") if word in _SPREADS else (len(_SPREADS), word)
        case _:
            return value


_LOOSER: Final = {
    "p95": "write a longer time",
    "cost": "write a higher limit",
    "energy": "write a higher limit",
    "allow": "name every precision allowed before, and more",
    "replicas": "write fewer replicas",
    "spread": "write a weaker spread: none < device < node < over a label",
}


def _workload(workload: Workload) -> Rule:
    spec = workload.spec
    sources = [spec.model.source, *(variant.source for variant in spec.model.variants)]
    for index, source in enumerate(sources):
        if "://" in source:
            path: Path = ("variants", index - 1) if index else ()
            yield (
                ("spec", "model", *path, "source"),
                Refusal(
                    Code.NOT_SUPPORTED_YET,
                    f"nothing fetches {source!r:.80} in this release",
                    "a file, or the name or digest of a pushed model",
                    "fetch it, and name the file here",
                ),
            )
    for index, source in enumerate(sources[1:]):
        if source in sources[: index + 1]:
            yield (
                ("spec", "model", "variants", index, "source"),
                _no_effect(f"{source!r:.80} again", "each model once", "remove the variant"),
            )
    if spec.batching.max == 1 and spec.batching.delay is not None:
        yield (
            ("spec", "batching", "delay"),
            _no_effect("delay without max: each request runs alone", "max above 1", "give max, or remove it"),
        )
    if spec.batching.max == 1 and spec.batching.padding:
        yield (
            ("spec", "batching", "padding"),
            _no_effect("padding without max: each request runs alone", "max above 1", "give max, or remove it"),
        )
    if spec.batching.max > 1 and isinstance(spec.session, StateTensors):
        yield (
            ("spec", "batching", "max"),
            _no_effect("the steps of sessions run alone", "a workload without a session", "remove batching"),
        )
    if spec.capture.max is not None and not spec.capture.consent:
        yield (
            ("spec", "capture", "max"),
            _no_effect(
                "max without consent: nothing is captured", "consent: true", "remove it, or write consent: true"
            ),
        )
    if spec.model.samples is not None and "://" in spec.model.samples:
        yield (
            ("spec", "model", "samples"),
            Refusal(
                Code.NOT_SUPPORTED_YET,
                f"nothing fetches {spec.model.samples!r:.80} in this release",
                "a file, or the digest of pushed samples",
                "fetch it, and name the file here",
            ),
        )
    if isinstance(spec.session, StateTensors):
        outputs = list(spec.session.state.values())
        again = next((name for index, name in enumerate(outputs) if name in outputs[:index]), "")
        if again:
            yield (
                ("spec", "session", "state"),
                Refusal(Code.SESSION_INVALID, f"output {again!r:.80} for two inputs",
                        "an output of its own for each input that takes state", "name the pairs that the model has"),
            )  # fmt: skip
    for index, traffic in enumerate(spec.traffic):
        path = ("spec", "traffic", index)
        if not traffic.rate:
            yield (*path, "rate"), _no_effect("a rate of zero", "more than zero", "remove this traffic")
        if traffic.peak is not None and traffic.when is None:
            yield (
                (*path, "peak"),
                _no_effect("a peak that never comes", "when it comes", 'add when: hour(now, "Europe/Paris") >= 8'),
            )
        if traffic.when is not None and (traffic.peak is None or traffic.peak == traffic.rate):
            yield (*path, "when"), _no_effect("when without a peak of its own", "peak", "say how much comes then")
        if traffic.when is not None:
            yield from _context_condition(traffic.when, (*path, "when"))
        if traffic.origin in [other.origin for other in spec.traffic[:index]]:
            yield (*path, "from"), _no_effect(f"{traffic.origin!r} again", "each origin once", "add the rates up")


def _tenant(tenant: Tenant) -> Rule:
    names = ("replicas", "memory", "cost", "rate", "concurrency")
    yield from _zero_values(tenant, tuple(("spec", "quota", name) for name in names))


def _region(region: Region) -> Rule:
    yield from _zero_values(region, (("spec", "price", "stale_after"), ("spec", "carbon", "stale_after")))
    names = [key.name for key in region.spec.keys]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield (
                ("spec", "keys", index, "name"),
                Refusal(Code.NAME_DUPLICATE, f"key {name} again", "each name once", "rename or remove one"),
            )
    for index, trade in enumerate(region.spec.trade):
        path: Path = ("spec", "trade", index)
        yield from _duplicates(trade.tenants, (*path, "tenants"))
        if not 0 < trade.hold_share <= 1:
            yield (
                (*path, "hold_share"),
                _unreachable(f"hold_share {format_field(trade, 'hold_share')}", "more than 0%, at most 100%",
                             "a bid holds what it offers: write a share, or remove the trade"),
            )  # fmt: skip


def check_with_policy(workload: Workload, policy: Policy) -> Rule:
    """Problems that appear only when a workload is combined with its policy; paths are the workload's."""
    migration = policy.spec.migration
    captured = migration is not None and migration.verify is not None and migration.verify.inputs == "captured"
    if captured and not workload.spec.capture.consent:
        yield (
            ("spec", "capture"),
            Refusal(
                Code.CONSENT_MISSING,
                f"policy {policy.metadata.name} verifies with captured inputs, capture.consent is false",
                "capture.consent: true",
                "ask the owner of the data, or verify with inputs: samples",
            ),
        )
    verify = migration.verify if migration is not None else None
    if verify is not None and verify.inputs == "samples" and workload.spec.model.samples is None:
        yield (
            ("spec", "model"),
            Refusal(
                Code.FIELD_MISSING,
                f"policy {policy.metadata.name} verifies with samples, and there are none",
                "spec.model.samples",
                "name an .npz file there, or verify with inputs: generated",
            ),
        )
    federation = policy.spec.federation
    if isinstance(workload.spec.session, StateTensors) and federation is not None and federation.delegate != "never":
        yield (
            ("spec", "session"),
            Refusal(
                Code.NOT_SUPPORTED_YET,
                f"state, and policy {policy.metadata.name} may have another region run it",
                "sessions that stay in one region",
                "write federation: {delegate: never}, or use a policy of its own",
            ),
        )
    allowed = policy.spec.require.precision.allow if policy.spec.require.precision else None
    later = {name for step in policy.spec.relax if step.precision for name in step.precision.allow}
    for index, variant in enumerate(workload.spec.model.variants):
        if allowed is not None and variant.precision is not None and variant.precision not in {*allowed, *later}:
            yield (
                ("spec", "model", "variants", index, "precision"),
                _no_effect(
                    f"a variant in {variant.precision}, which policy {policy.metadata.name} never allows",
                    f"one of {', '.join(allowed)}",
                    "remove the variant, or add its precision to require.precision.allow",
                ),
            )


def _unreachable(found: str, asked: str, remedy: str) -> Refusal:
    return Refusal(Code.POLICY_UNREACHABLE, found, asked, remedy)


def _no_effect(found: str, asked: str, remedy: str) -> Refusal:
    return Refusal(Code.FIELD_WITHOUT_EFFECT, found, asked, remedy)
