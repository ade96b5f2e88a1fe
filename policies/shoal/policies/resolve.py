"""Documents to what the engine reads: policy applied, relaxations added up, quantities in SI."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from shoal.policies import kinds
from shoal.policies.calendar import days_of, minutes_of
from shoal.policies.documents import key_of_workload
from shoal.policies.kinds import Capture, Optimize, Policy, PolicySpec, Region, Relax, Require, Tenant, Workload
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.migration import Against, InputsFrom, Metric, MigrationRule, PackRef, Tolerance, Window
from shoal.types.units import COST, Seconds, UsdPerHour, parse_quantity
from shoal.types.workload import (
    Delegation,
    DelegationMode,
    Intent,
    Limits,
    ModelRef,
    PartitionRule,
    Quota,
    Relaxation,
    Requirements,
    Scheduled,
    Spread,
    Standby,
    Trade,
    Traffic,
    Weights,
)

PRICE_LABEL: Final = "price"
CAPTURED_AT_MOST: Final = 64
"""Where a workload consents and does not say how many."""

DEFAULT_OPTIMIZE: Final = Optimize(latency=1.0)
"""Where a policy does not say, and where there is no policy: lowest latency."""


def resolve(
    workload: Workload,
    policy: Policy | None,
    *,
    revision: int,
    digests: Mapping[str, ModelRef],
    pack: PackRef | None = None,
) -> Intent:
    """What the engine is to achieve. Without a policy: one replica, any device, lowest latency, priority 100.

    digests: each source of the workload, pinned; a variant's own `precision` wins over the pinned one. pack: its
    samples. Raises ShoalError(MODEL_UNKNOWN) where a source is not among them.
    """
    spec = policy.spec if policy is not None else PolicySpec()
    require, limits = _requirements(spec.require), _limits(spec.limits)
    model = workload.spec.model
    return Intent(
        key=key_of_workload(workload),
        revision=revision,
        labels=dict(workload.metadata.labels),
        policy=policy.metadata.name if policy is not None else "",
        models=(
            _pinned(model.source, None, digests),
            *(_pinned(variant.source, variant.precision, digests) for variant in model.variants),
        ),
        require=require,
        limits=limits,
        weights=_weights(spec.optimize or DEFAULT_OPTIMIZE),
        relax=_relaxations(spec.relax, require, limits),
        traffic=tuple(
            Traffic(one.origin, one.rate, one.peak or one.rate, one.when or "") for one in workload.spec.traffic
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
        delegation=_delegation(spec.federation),
        migration=replace(_migration(spec), pack=pack),
        capture=_capture(workload.spec.capture),
        session=dict(workload.spec.session.state) if isinstance(workload.spec.session, kinds.StateTensors) else {},
        schedule=tuple(Scheduled(one.when, _weights(one.optimize)) for one in spec.schedule),
    )


def _capture(capture: Capture) -> int:
    return (capture.max or CAPTURED_AT_MOST) if capture.consent else 0


def quota(tenant: Tenant) -> Quota:
    return Quota(tenant.metadata.name, tenant.spec.quota.replicas, tenant.spec.quota.memory)


def trades(region: Region) -> tuple[Trade, ...]:
    """Whom the region works for, in the document's order: the first that fits counts."""
    return tuple(Trade(one.partner, one.tenants, one.hold_share) for one in region.spec.trade)


def node_price(labels: Mapping[str, str], region_price: UsdPerHour | None) -> UsdPerHour | None:
    """What an hour of a node costs: its label `price` (`0.40 USD/h`), else the region's price as it is now; None where
    neither says, or the label cannot be read: an unknown price is never taken for a low one."""
    if PRICE_LABEL in labels:
        try:
            return UsdPerHour(parse_quantity(labels[PRICE_LABEL], COST))
        except ShoalError:
            return None
    return region_price


def _pinned(source: str, precision: str | None, digests: Mapping[str, ModelRef]) -> ModelRef:
    pinned = digests.get(source)
    if pinned is None:
        raise ShoalError(
            Refusal(
                Code.MODEL_UNKNOWN, f"{source!r:.120} has no digest", "a pushed model", f"shoal model push {source}"
            )
        )
    return ModelRef(source, pinned.digest, precision or pinned.precision)


def _requirements(require: Require) -> Requirements:
    available, trust = require.availability, require.trust
    return Requirements(
        latency_p95_s=require.latency.p95 if require.latency else None,
        latency_from_origin=require.latency is None or require.latency.measured_from == "origin",
        where=require.where or "",
        residency=require.residency or (),
        precisions=require.precision.allow if require.precision else (),
        replicas=available.replicas if available else 1,
        spread=Spread(available.spread) if available else Spread.NONE,
        standby=Standby(available.standby) if available else Standby.NONE,
        recovery_s=available.recovery if available else None,
        measured_only=trust is not None and not {"capability", "within"}.isdisjoint(trust.model_fields_set),
        measured_within_s=trust.within if trust else None,
        signed_by=trust.signed_model.keys if trust and trust.signed_model else (),
    )


def _limits(limits: kinds.Limits) -> Limits:
    return Limits(limits.cost, limits.energy, limits.carbon, limits.node_power)


def _delegation(federation: kinds.Delegation | None) -> Delegation:
    if federation is None:
        return Delegation()
    return Delegation(
        DelegationMode(federation.delegate), federation.margin or 0.0, federation.to or ("*",), federation.term
    )


def _migration(spec: PolicySpec) -> MigrationRule:
    """What the policy does not say is as `MigrationRule` has it."""
    migration = spec.migration or kinds.Migration()
    when, verify = migration.when or kinds.MigrationWhen(), migration.verify or kinds.Verify()
    shift = migration.shift or kinds.Shift(steps=())
    guard = shift.guard or kinds.Guard()
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
            Window(days_of(one.days), minutes_of(one.opens), minutes_of(one.closes), one.zone)
            for one in migration.windows
        ),
        "unasked": migration.when is not None,
    }
    return MigrationRule(**{name: value for name, value in given.items() if value is not None})


def _tolerances(precision: kinds.Precision | None) -> tuple[Tolerance, ...]:
    tolerance = precision.tolerance if precision is not None else None
    if tolerance is None:
        return ()
    bounds = tolerance.outputs if isinstance(tolerance, kinds.OutputBounds) else {"": tolerance}
    return tuple(Tolerance(output, Metric(bound.metric), bound.value) for output, bound in bounds.items())


def _weights(optimize: Optimize) -> Weights:
    total = optimize.latency + optimize.cost + optimize.energy
    return Weights(optimize.latency / total, optimize.cost / total, optimize.energy / total)


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
            changes["spread"] = Spread(step.availability.spread)
        require = replace(require, **changes)
        if step.limits is not None:
            limits = replace(limits, cost=step.limits.cost or limits.cost, energy=step.limits.energy or limits.energy)
        relaxed.append(Relaxation(_typed(step), require, limits))
    return tuple(relaxed)


def _typed(step: Relax) -> str:
    """The step as a document writes it: `latency: {p95: 90ms}, limits: {cost: 2.5 USD/h}`."""
    return json.dumps(step.model_dump(mode="json", by_alias=True, exclude_unset=True)).replace('"', "")[1:-1]
