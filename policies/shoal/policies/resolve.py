"""Resolves documents into what placement reads: policy applied, relaxations accumulated, quantities in SI."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from shoal.policies import kinds
from shoal.policies.calendar import parse_days, parse_minutes
from shoal.policies.documents import workload_key
from shoal.policies.kinds import Capture, Optimize, Policy, PolicySpec, Region, Relax, Require, Tenant, Workload
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.identity import NAME_PATTERN
from shoal.types.migration import Against, InputsFrom, Metric, MigrationRule, MigrationWindow, PackRef, Tolerance
from shoal.types.units import COST, DURATION, Seconds, UsdPerHour, parse_quantity
from shoal.types.workload import (
    PREPARABLE,
    DelegationMode,
    DelegationRule,
    Intent,
    Limits,
    ModelRef,
    PartitionRule,
    Preempt,
    Quota,
    Relaxation,
    Requirements,
    ScheduledWeights,
    Spread,
    Standby,
    TradeRule,
    Traffic,
    Weights,
)

PRICE_LABEL: Final = "price"
RTT_LABEL: Final = "rtt"
DEFAULT_CAPTURE_MAX: Final = 64
"""Where a workload consents to capture without a number."""

DEFAULT_OPTIMIZE: Final = Optimize(latency=1.0)
"""Without a policy, or where the policy has no `optimize`: lowest latency."""


def resolve(
    workload: Workload,
    policy: Policy | None,
    *,
    revision: int,
    digests: Mapping[str, ModelRef],
    pack: PackRef | None = None,
) -> Intent:
    """The intent of a workload under its policy. Without a policy: one replica, any device, lowest latency, priority
    100.

    digests: pinned model of each source of the workload. A variant's own `precision` takes precedence over the pinned
    model's. pack: the workload's samples. Raises ShoalError(MODEL_UNKNOWN) for a source that is not in `digests`.
    """
    spec = policy.spec if policy is not None else PolicySpec()
    require, limits = _requirements(spec.require), _limits(spec.limits)
    model = workload.spec.model
    pushed = (
        _model_ref(model.source, None, digests),
        *(_model_ref(variant.source, variant.precision, digests) for variant in model.variants),
    )
    return Intent(
        key=workload_key(workload),
        revision=revision,
        labels=dict(workload.metadata.labels),
        policy=policy.metadata.name if policy is not None else "",
        models=(*pushed, *_prepared(pushed, spec)),
        require=require,
        limits=limits,
        weights=_weights(spec.optimize or DEFAULT_OPTIMIZE),
        relax=_relaxations(spec.relax, require, limits),
        traffic=tuple(
            Traffic(one.origin, one.rate, one.rate if one.peak is None else one.peak, one.when or "")
            for one in workload.spec.traffic
        ),
        partition=PartitionRule(
            heartbeat_s=spec.partition.heartbeat,
            lost_after_s=spec.partition.lost_after,
            serve_s=None if spec.partition.serve == "forever" else spec.partition.serve,
            cold_boot_serve=spec.partition.cold_boot == "serve",
        ),
        priority=spec.priority,
        shared_worker=workload.spec.isolation == "shared",
        max_batch=workload.spec.batching.max,
        batch_delay_s=Seconds(workload.spec.batching.delay or 0.0),
        batch_padding=workload.spec.batching.padding,
        delegation=_delegation(spec.federation),
        migration=replace(_migration(spec), pack=pack),
        capture=_capture(workload.spec.capture),
        warm_up_optional=model.warm_up == "optional",
        shapes={name: tuple(shape) for name, shape in model.shapes.items()},
        session=dict(workload.spec.session.state) if isinstance(workload.spec.session, kinds.StateTensors) else {},
        schedule=tuple(ScheduledWeights(one.when, _weights(one.optimize)) for one in spec.schedule),
        preempt=Preempt(spec.preempt),
        prefer=spec.prefer,
        per=_per(spec.require.availability),
        to_zero_after_s=None if spec.scale is None else spec.scale.to_zero_after,
    )


def _capture(capture: Capture) -> int:
    return (capture.max or DEFAULT_CAPTURE_MAX) if capture.consent else 0


def quota(tenant: Tenant) -> Quota:
    quota = tenant.spec.quota
    return Quota(
        tenant.metadata.name,
        replicas=quota.replicas,
        memory=quota.memory,
        cost=quota.cost,
        rate=quota.rate,
        concurrency=quota.concurrency,
        weight=tenant.spec.weight,
    )


def trades(region: Region) -> tuple[TradeRule, ...]:
    """Rules for the regions that this region runs workloads for, in the document's order. The first that matches
    applies."""
    return tuple(TradeRule(one.partner, one.tenants, one.hold_share) for one in region.spec.trade)


def node_price(labels: Mapping[str, str], region_price: UsdPerHour | None) -> UsdPerHour | None:
    """Price of a node: its label `price` (`0.40 USD/h`), otherwise the region's current price. None where neither is
    set or the label cannot be parsed, because an unknown price must never count as a low one."""
    if PRICE_LABEL in labels:
        try:
            return UsdPerHour(parse_quantity(labels[PRICE_LABEL], COST))
        except ShoalError:
            return None
    return region_price


def node_rtt_s(labels: Mapping[str, str]) -> float:
    """RTT of a node in seconds: its label `rtt` (`20ms`); NaN where the label cannot be parsed."""
    try:
        return parse_quantity(labels[RTT_LABEL], DURATION)
    except ShoalError:
        return math.nan


def push_command(source: str) -> str:
    """What a user types to push a model that a document knows as `source`: by its name, a digest, or a file's path."""
    name = f" --name {source}" if NAME_PATTERN.fullmatch(source) else ""
    return f"shoal model push FILE{name}"


def _model_ref(source: str, precision: str | None, digests: Mapping[str, ModelRef]) -> ModelRef:
    pinned = digests.get(source)
    if pinned is None:
        raise ShoalError(
            Refusal(Code.MODEL_UNKNOWN, f"no model {source!r:.120}", "a pushed model", push_command(source))
        )
    return ModelRef(source, pinned.digest, precision or pinned.precision)


def _prepared(pushed: Sequence[ModelRef], spec: PolicySpec) -> Iterator[ModelRef]:
    """What nodes may make of the source model, in precisions in which nothing was pushed."""
    source, asked = pushed[0], spec.require.precision
    if asked is None or not asked.prepare or source.precision != "fp32":
        return
    allowed = {*asked.allow, *(name for step in spec.relax if step.precision for name in step.precision.allow)}
    for precision in PREPARABLE:
        if precision in allowed and all(each.precision != precision for each in pushed):
            yield ModelRef(source.source, source.digest, precision, prepared=True)


def _requirements(require: Require) -> Requirements:
    available, trust = require.availability, require.trust
    return Requirements(
        latency_p95_s=require.latency.p95 if require.latency else None,
        latency_from_origin=require.latency is None or require.latency.measured_from == "origin",
        where=require.where or "",
        residency=require.residency or (),
        precisions=require.precision.allow if require.precision else (),
        replicas=available.replicas if available else 1,
        spread=Spread.of(_per(available) or kinds.spread_text(available.spread)) if available else Spread.NONE,
        standby=Standby(available.standby) if available else Standby.NONE,
        recovery_s=available.recovery if available else None,
        measured_only=trust is not None and not {"capability", "within"}.isdisjoint(trust.model_fields_set),
        measured_within_s=trust.within if trust else None,
        signed_by=trust.signed_model.keys if trust and trust.signed_model else (),
        partial=require.partial,
    )


def _per(available: kinds.Availability | None) -> str:
    """As in Intent."""
    per = available.per if available is not None else None
    return per.label if isinstance(per, kinds.PerLabel) else per or ""


def _limits(limits: kinds.LimitsSpec) -> Limits:
    return Limits(limits.cost, limits.energy, limits.carbon, limits.node_power)


def _delegation(federation: kinds.DelegationSpec | None) -> DelegationRule:
    if federation is None:
        return DelegationRule()
    return DelegationRule(
        DelegationMode(federation.delegate), federation.margin or 0.0, federation.to or ("*",), federation.term
    )


def _migration(spec: PolicySpec) -> MigrationRule:
    """The policy's migration rule. Fields that the policy leaves out have `MigrationRule`'s defaults."""
    migration = spec.migration or kinds.MigrationSpec()
    when, verify = migration.when or kinds.MigrationWhen(), migration.verify or kinds.VerifySpec()
    shift = migration.shift or kinds.Shift(steps=())
    guard = shift.guard or kinds.GuardSpec()
    given: dict[str, Any] = {
        "against": Against(verify.against),
        "inputs": InputsFrom(verify.inputs),
        "samples": verify.samples,
        "advisory": verify.on_fail == "continue",
        "tolerances": _tolerances(spec.require.precision),
        "steps": shift.steps or None,
        "hold_s": shift.hold,
        "guard_errors": guard.errors,
        "guard_p95": guard.p95,
        "drain_s": migration.drain,
        "max_concurrent": when.max_concurrent,
        "gain": when.gain,
        "cooldown_s": when.cooldown,
        "allow_gap_s": migration.allow_gap,
        "windows": tuple(
            MigrationWindow(parse_days(one.days), parse_minutes(one.opens), parse_minutes(one.closes), one.zone)
            for one in migration.windows
        ),
        "automatic": migration.when is not None,
    }
    return MigrationRule(**{name: value for name, value in given.items() if value is not None})


def _tolerances(precision: kinds.Precision | None) -> tuple[Tolerance, ...]:
    tolerance = precision.tolerance if precision is not None else None
    if tolerance is None:
        return ()
    bounds = tolerance.outputs if isinstance(tolerance, kinds.OutputBounds) else {"": tolerance}
    return tuple(Tolerance(output, Metric(bound.metric), bound.value) for output, bound in bounds.items())


def _weights(optimize: Optimize) -> Weights:
    given = optimize.by_term()
    total = sum(given.values())
    return {name: weight / total for name, weight in given.items() if weight > 0}


def _relaxations(steps: tuple[Relax, ...], require: Requirements, limits: Limits) -> tuple[Relaxation, ...]:
    relaxed = []
    for step in steps:
        changes: dict[str, Any] = {}
        if step.latency is not None:
            changes["latency_p95_s"] = Seconds(step.latency.p95)
        if step.precision is not None:
            changes["precisions"] = step.precision.allow
        if step.availability is not None and step.availability.replicas is not None:
            changes["replicas"] = step.availability.replicas
        if step.availability is not None and step.availability.spread is not None:
            changes["spread"] = Spread.of(kinds.spread_text(step.availability.spread))
        require = replace(require, **changes)
        if step.limits is not None:
            limits = replace(limits, cost=step.limits.cost or limits.cost, energy=step.limits.energy or limits.energy)
        relaxed.append(Relaxation(_step_text(step), require, limits))
    return tuple(relaxed)


def _step_text(step: Relax) -> str:
    """The step as a document writes it: `latency: {p95: 90ms}, limits: {cost: 2.5 USD/h}`."""
    return json.dumps(step.model_dump(mode="json", by_alias=True, exclude_unset=True)).replace('"', "")[1:-1]
