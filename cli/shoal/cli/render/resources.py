"""Listings: columns of each kind. Emulated devices are marked in every row."""

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from google.protobuf.message import Message

from shoal.cli.render.output import line, note, table
from shoal.client import RegionClient
from shoal.types.units import (
    show_bytes,
    show_bytes_per_second,
    show_gain,
    show_joules,
    show_seconds,
    show_usd_per_hour,
    show_watts,
)
from shoal.v1 import artifacts_pb2, nouns_pb2, operator_pb2


def _service_text(report: Any) -> str:
    """Service as this region's gateways measured it; of guests, without the time between regions."""
    if not report.requests:
        return "-"
    errors = f", {report.errors} failed" if report.errors else ""
    return f"{show_seconds(report.latency_p95_s)} of {report.requests}{errors}"


def _sensor_text(value: float, show: Callable[[float], str]) -> str:
    """A sensor's value; 0 and NaN mean that there is none."""
    return show(value) if value > 0 else "-"


def _temperature_text(reading: nouns_pb2.Reading) -> str:
    told = _sensor_text(reading.temperature_c, lambda value: f"{value:.0f} C")
    return f"{told}, slows itself down" if reading.throttled else told


def rows_of(api: RegionClient, kind: str, name: str, tenant: str) -> Sequence[Message]:
    """The listing's messages."""
    if kind == "models":
        return api.models(name)
    reply = api.get(kind, name, tenant)
    if reply.served_by:
        note(f"as the follower at {reply.served_by} had read it up to revision {reply.as_of}")
    return {  # type: ignore[return-value]
        "nodes": reply.nodes,
        "devices": reply.devices,
        "workloads": reply.workloads,
        "placements": reply.placements,
        "policies": reply.documents,
        "tenants": reply.documents,
        "regions": reply.regions,
        "tokens": reply.tokens,
        "events": reply.events,
        "agreements": reply.agreements,
        "migrations": reply.migrations,
    }[kind]


def show(kind: str, messages: Sequence[Any], *, wide: bool) -> None:
    if kind == "events":
        for message in messages:
            line(event_line(message))
        return
    columns = [column for column in _COLUMNS[kind] if wide or not column[0].startswith("+")]
    table(
        [name.removeprefix("+") for name, _ in columns],
        [[cell(message) for _, cell in columns] for message in messages],
    )


def event_line(event: operator_pb2.Event) -> str:
    where = "/".join(part for part in (event.workload.tenant, event.workload.name) if part) or event.subject
    mark = f" ({event.stand_in})" if event.stand_in else ""
    node = f" [{event.node}{mark}]" if event.node and event.node != where else mark
    actor = f" by {event.actor}" if event.actor else ""
    return f"{when(event.at)}  {event.code}  {where}{node}  {event.message}{actor}"


def when(stamp: float) -> str:
    return datetime.fromtimestamp(stamp, UTC).strftime("%Y-%m-%d %H:%M:%SZ") if stamp else "-"


MAX_REASON_CHARS: Final = 120
"""In a table; `describe` shows the rest."""


def reason(refusal: Any) -> str:
    """The code, what was found and what was wanted; `-` if there is no refusal."""
    wanted = f"wanted {refusal.asked}" if refusal.asked else ""
    words = ", ".join(part for part in (refusal.found, wanted) if part)
    return clip(" ".join(part for part in (refusal.code, words) if part)) or "-"


def full_reason(refusal: Any) -> str:
    """`reason` with the remedy."""
    return reason(refusal) + (f"; try: {refusal.remedy}" if refusal.remedy else "")


def clip(text: str) -> str:
    """At most `MAX_REASON_CHARS` characters."""
    return text if len(text) <= MAX_REASON_CHARS else text[: MAX_REASON_CHARS - 1].rstrip() + "\N{HORIZONTAL ELLIPSIS}"


def _placement_status_text(observed: Any) -> str:
    """An older agent puts the code in front of its text."""
    words = observed.reason.removeprefix(observed.code).strip() if observed.code else observed.reason
    return clip(" ".join(part for part in (observed.code, words) if part)) or "-"


def device_name(node: str, device: str, stand_in: str) -> str:
    return f"{node}/{device}" + (f" ({stand_in})" if stand_in else "")


def device_stand_in(device: nouns_pb2.Device) -> str:
    """As `shoal.types.device.Device.stand_in`."""
    return "simulated" if device.simulated else "emulated" if device.emulated else ""


def show_profile(model: artifacts_pb2.Model) -> None:
    """A model for people."""
    profile = model.profile
    line(f"{model.name or '(not stored)'}  {profile.digest or model.digest}", "bold")
    flops = sum(cost.flops for cost in profile.costs)
    line(
        f"opset {profile.opset}  IR {profile.ir_version}  {profile.precision}  file {show_bytes(profile.size_bytes)}"
        f"  weights {show_bytes(profile.weight_bytes)}  activations {show_bytes(profile.activation_bytes)}"
        f"  {flops / 1e9:.3g} GFLOP" + ("" if profile.confident else " at least (a shape could not be inferred)")
    )
    if profile.reference_shapes:
        shapes = ", ".join(f"{name} {_shape(shape.dims)}" for name, shape in sorted(profile.reference_shapes.items()))
        line(f"counted at {shapes}", "dim")
    for signature in model.signatures:
        line(
            f"signed by {signer(signature)}"
            if signature.key
            else f"signature does not count: {reason(signature.refusal)}"
        )
    table(
        ["", "NAME", "TYPE", "SHAPE"],
        [
            [side, tensor.name, tensor.dtype, _shape(tensor.shape)]
            for side, tensors in (("in", profile.inputs), ("out", profile.outputs))
            for tensor in tensors
        ],
    )
    table(
        ["OPERATOR", "NODES", "GFLOP", "MOVED"],
        [
            [cost.operator, str(cost.nodes), f"{cost.flops / 1e9:.4g}", show_bytes(cost.bytes)]
            for cost in sorted(profile.costs, key=lambda cost: -cost.flops)
        ],
    )


def signer(signature: artifacts_pb2.ModelSignature) -> str:
    """Key, model and version of a valid signature; empty if it is not valid."""
    version = f" v{signature.version}" if signature.version else ""
    ends = f" until {when(signature.expires_at)}" if signature.expires_at else ""
    return f"{signature.key} ({signature.model}{version}{ends})" if signature.key else ""


def place(one: operator_pb2.MigrationPlace) -> str:
    """Empty if the place is not known."""
    return device_name(one.node, one.device, one.stand_in) if one.node else region_name(one.region, one.stand_in)


def region_name(region: str, stand_in: str) -> str:
    return f"{region} ({stand_in})" if stand_in else region


def requested_target(one: operator_pb2.MigrationView | operator_pb2.MoveHoldView) -> str:
    """The requested target; empty: any."""
    return f"{one.to} ({one.to_stand_in})" if one.to and one.to_stand_in else one.to


def _gain(row: operator_pb2.MigrationView) -> str:
    """Expected gain, and the actual one if known."""
    if not row.HasField("expected"):
        return "-"
    return show_gain(row.expected.gain) + (f", came {show_gain(row.came.gain)}" if row.came.requests else "")


def _before_and_after(row: operator_pb2.MigrationView, figure: str, show_one: Callable[[float], str]) -> str:
    """Before, expected and actual."""
    if not row.HasField("expected"):
        return "-"
    known = [row.expected.before, row.expected.after, *([row.came.after] if row.HasField("came") else [])]
    return " -> ".join(show_one(value) if math.isfinite(value := getattr(one, figure)) else "?" for one in known)


def _fetch_text(row: operator_pb2.MigrationView) -> str:
    """Expected bytes, and fetched ones if they were counted."""
    known = [row.expected.fetch_bytes] if row.HasField("expected") else []
    known += [row.came.fetch_bytes] if row.came.HasField("fetch_bytes") else []
    return " -> ".join(map(show_bytes, known)) or "-"


def _shape(dims: Sequence[int]) -> str:
    return "x".join("?" if dim < 0 else str(dim) for dim in dims) or "scalar"


def _placement_reason(row: operator_pb2.PlacementView) -> str:
    """The reason that the node reports; for a serving replica, why it stays although another place is better."""
    said = _placement_status_text(row.observed)
    return row.stays if row.stays and said == "-" else said


def _serving_text(row: operator_pb2.PlacementView) -> str:
    if row.assignment.staged:
        return "staged"
    if not row.routed:
        return "no"
    return "standby" if row.assignment.standby else "yes"


def _placement_latency(row: operator_pb2.PlacementView) -> str:
    measured = row.observed.measured
    if not measured.samples:
        return "-"
    answered = [one for one in row.observed.served if one.requests and math.isfinite(one.latency_p95_s)]
    p95 = max((one.latency_p95_s for one in answered), default=measured.latency_p95_s)
    return show_seconds(p95) + (f" (x{row.time_scale:g} in real time)" if row.stand_in == "emulated" else "")


def _placement_joules(row: operator_pb2.PlacementView) -> str:
    requests = sum(one.requests for one in row.observed.served)
    joules = sum(one.joules for one in row.observed.served)
    sources = {one.energy_source for one in row.observed.served if one.requests}
    if not requests:
        return "-"
    source = sources.pop() if len(sources) == 1 else "estimated"
    return f"{show_joules(joules)} ({source})"


def _rate(receipt: Any) -> str:
    flops = max(receipt.rates.matmul_flops.values(), default=0.0)
    return f"{flops / 1e9:.3g} GFLOP/s" if flops else "-"


def _receipt_text(receipt: Any) -> str:
    """Its source, of an emulated device by the profile's name, and its time. `-o json` has all of both."""
    return f"{receipt.source.partition(': ')[0]} {when(receipt.measured_at)}"


def link_text(link: Any) -> str:
    """What it is, what it carries and who says so."""
    carries = f"{show_bytes_per_second(link.bytes_per_s)}, " if link.HasField("bytes_per_s") else ""
    to = f"{link.to}: " if link.to else ""
    return f"{to}{link.name} ({carries}{link.source})"


def _watts_text(row: Any) -> str:
    """Its power; that of two devices which one meter counts is not the device's own."""
    text = _sensor_text(row.reading.power_w, show_watts)
    return f"{text} with {row.device.power_in}" if row.device.power_in and text != "-" else text


def _memory_text(device: Any) -> str:
    return show_bytes(device.memory_bytes) + (f" of {device.memory_in}" if device.memory_in else "")


def _power_source(receipt: Any) -> str:
    """Source of the power figures; a whole system's power is not the device's own."""
    return f"{receipt.rates.energy_source}" + (f", of the whole {receipt.system}" if receipt.system else "")


def show_signals(signals: Iterable[operator_pb2.SignalView]) -> None:
    """One line each, for signals that have a value or should have one."""
    for signal in signals:
        if not math.isnan(signal.value) or signal.refusal.code:
            line(f"{signal.name} {signal_text(signal)}", "yellow" if signal.stale else "dim")


def signal_text(signal: operator_pb2.SignalView) -> str:
    """Value, source and age, and why the source could not be read."""
    value = "unknown" if math.isnan(signal.value) else f"{signal.value:.4g} {signal.unit}"
    refused = f"; {reason(signal.refusal)}" if signal.refusal.code else ""
    return f"{value} ({signal.why}{refused})"


def _signal_of(row: operator_pb2.RegionView, name: str) -> str:
    return next((signal_text(signal) for signal in row.signals if signal.name == name), "-")


def _of_document(cell: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda row: cell(row.document) if row.HasField("document") else "-"


def _device_state(row: operator_pb2.DeviceView) -> str:
    """Its node's liveness where that is not ready; else since when it does not answer, or whether it sleeps."""
    if row.liveness != "ready":
        return row.liveness
    if row.reason.code:
        return f"silent {datetime.fromtimestamp(row.since, UTC):%H:%MZ}"
    return row.reading.power or "ready"


Column = tuple[str, Callable[[Any], str]]
_COLUMNS: Final[dict[str, tuple[Column, ...]]] = {
    "nodes": (
        ("NODE", lambda row: row.node.name),
        ("ROLE", lambda row: row.node.role),
        (
            "LIVENESS",
            lambda row: ", ".join(
                word
                for word, holds in (
                    (row.liveness, True),
                    ("front down", row.liveness == "ready" and row.observed.generation and not row.front_ready),
                    ("cordoned", row.cordoned),
                    ("quarantined", row.quarantined),
                    ("revoked", row.revoked),
                    ("duplicate", bool(row.duplicate)),
                )
                if holds
            ),
        ),
        (
            "DEVICES",
            lambda row: (
                " ".join(device_name("", d.name, device_stand_in(d)).lstrip("/") for d in row.node.devices) or "-"
            ),
        ),
        ("REASON", lambda row: reason(row.reason)),
        ("SEEN", lambda row: when(row.last_seen)),
        ("+VERSION", lambda row: row.node.agent_version),
        ("+EPOCH", lambda row: str(row.epoch)),
        ("+DESIRED", lambda row: str(row.desired.generation)),
        ("+OBSERVED", lambda row: str(row.observed.generation)),
        ("+DATA PORT", lambda row: row.node.data_address),
        ("+CERTIFICATE UNTIL", lambda row: when(row.certificate_expires_at)),
        ("+LABELS", lambda row: " ".join(f"{k}={v}" for k, v in sorted(row.node.labels.items())) or "-"),
    ),
    "devices": (
        ("DEVICE", lambda row: f"{row.node}/{row.device.name}"),
        ("IS", lambda row: device_stand_in(row.device) or "real"),
        ("KIND", lambda row: row.device.kind),
        ("FREE", lambda row: show_bytes(row.reading.free_bytes) if row.reading.device else "-"),
        ("MATMUL", lambda row: _rate(row.receipt)),
        ("STATE", lambda row: _device_state(row)),
        ("+REASON", lambda row: reason(row.reason)),
        ("+MODEL", lambda row: row.device.model),
        ("+MEMORY", lambda row: _memory_text(row.device)),
        ("+NUMA", lambda row: str(row.device.numa) if row.device.HasField("numa") else "-"),
        ("+LINKS", lambda row: "; ".join(map(link_text, row.device.links)) or "-"),
        ("+COMMITTED", lambda row: show_bytes(row.committed_bytes)),
        ("+PRICE", lambda row: show_usd_per_hour(row.cost_usd_per_h)),
        ("+PROVIDER", lambda row: row.device.provider),
        ("+RECEIPT", lambda row: _receipt_text(row.receipt) if row.receipt.node else "-"),
        (
            "+ACTIVE",
            lambda row: (
                f"{show_watts(row.receipt.rates.active_w)} ({_power_source(row.receipt)})" if row.receipt.node else "-"
            ),
        ),
        ("+NOW", lambda row: _watts_text(row)),
        ("+USED", lambda row: _sensor_text(row.reading.energy_j, show_joules)),
        ("+HEAT", lambda row: _temperature_text(row.reading)),
        ("+SLEPT", lambda row: show_seconds(row.reading.slept_s) if row.reading.power else "-"),
        ("+SAVED", lambda row: show_joules(row.reading.saved_j) if row.reading.power else "-"),
        ("+TIME SCALE", lambda row: f"{row.device.time_scale:g}" if row.device.emulated else "-"),
        ("+ASSIGNMENTS", lambda row: " ".join(row.assignments) or "-"),
    ),
    "models": (
        ("NAME", lambda row: row.name),
        ("DIGEST", lambda row: row.digest[:19]),
        ("SIZE", lambda row: show_bytes(row.size_bytes)),
        ("PRECISION", lambda row: row.profile.precision),
        ("GFLOP", lambda row: f"{sum(cost.flops for cost in row.profile.costs) / 1e9:.3g}"),
        ("SIGNED BY", lambda row: " ".join(filter(None, map(signer, row.signatures))) or "-"),
        ("USED BY", lambda row: " ".join(f"{key.tenant}/{key.name}" for key in row.used_by) or "-"),
        ("+PUSHED", lambda row: when(row.pushed_at)),
        ("+BY", lambda row: row.pushed_by),
    ),
    "workloads": (
        ("WORKLOAD", lambda row: f"{row.workload.tenant}/{row.workload.name}"),
        ("STATE", lambda row: row.state),
        ("READY", lambda row: f"{row.ready}/{row.wanted}"),
        ("POLICY", lambda row: row.policy or "-"),
        ("REASON", lambda row: reason(row.reason)),
        ("REQUESTS", lambda row: str(sum(one.requests for one in row.ingress))),
        ("+ANSWERED", lambda row: str(sum(one.answered for one in row.ingress))),
        ("+RETRIED", lambda row: str(sum(one.retried for one in row.ingress))),
        ("+REFUSED", lambda row: str(sum(one.refused for one in row.ingress))),
        ("+LOST", lambda row: str(sum(one.lost for one in row.ingress))),
        ("+SINCE", lambda row: when(row.since)),
        ("+RETRY AT", lambda row: when(row.retry_at)),
        ("+GIVES UP AT", lambda row: when(row.gives_up_at)),
        ("+REVISION", lambda row: str(row.revision)),
        ("+RELAXED", lambda row: "; ".join(row.relaxed) or "-"),
    ),
    "placements": (
        ("WORKLOAD", lambda row: f"{row.assignment.workload.tenant}/{row.assignment.workload.name}"),
        ("DEVICE", lambda row: device_name(row.node, row.assignment.device, row.stand_in)),
        ("PHASE", lambda row: row.observed.phase or "unseen"),
        ("SERVING", _serving_text),
        ("P95", _placement_latency),
        ("MEMORY", lambda row: show_bytes(row.observed.measured.memory_bytes or row.assignment.memory_bytes)),
        ("SERVED", lambda row: str(sum(one.requests for one in row.observed.served))),
        ("ENERGY", _placement_joules),
        ("REASON", lambda row: _placement_reason(row)),
        ("+ASSIGNMENT", lambda row: row.assignment.id),
        ("+MODEL", lambda row: row.assignment.model[:19]),
        ("+PRECISION", lambda row: row.assignment.precision),
        ("+PREDICTED P95", lambda row: estimate(row.prediction.latency_p95_s, show_seconds)),
        ("+RESTARTS", lambda row: str(row.observed.restarts)),
    ),
    "tokens": (
        ("ID", lambda row: row.id),
        ("ROLE", lambda row: row.role),
        ("NAME", lambda row: row.name or "any"),
        ("EXPIRES", lambda row: when(row.expires_at)),
        ("USED", lambda row: f"{when(row.used_at)} by {row.used_by}" if row.used_at else "-"),
        ("MADE BY", lambda row: row.created_by or "-"),
    ),
}
_COLUMNS["agreements"] = (
    ("AGREEMENT", lambda row: row.agreement),
    ("SIDE", lambda row: row.side),
    ("REGION", lambda row: region_name(row.counterpart, row.offer.stand_in)),
    ("WORKLOAD", lambda row: f"{row.workload.tenant}/{row.workload.name}"),
    ("STATE", lambda row: row.state),
    ("SERVICE", lambda row: row.service or "-"),
    ("PROMISED P95", lambda row: show_seconds(row.offer.latency_p95_s) if row.offer.id else "-"),
    ("DELIVERED", lambda row: _service_text(row.delivered)),
    ("PRICE", lambda row: show_usd_per_hour(row.offer.cost) if row.offer.id and math.isfinite(row.offer.cost) else "-"),
    ("REASON", lambda row: reason(row.reason)),
    ("+LEASE", lambda row: show_seconds(row.lease_s) if row.lease_s else "-"),
    ("+MODEL", lambda row: row.offer.model[:19]),
    ("+REPLICAS", lambda row: str(row.offer.replicas)),
)
_COLUMNS["migrations"] = (
    ("MIGRATION", lambda row: row.id),
    ("WORKLOAD", lambda row: f"{row.workload.tenant}/{row.workload.name}"),
    ("FROM", lambda row: place(row.source)),
    ("TO", lambda row: place(row.target) or requested_target(row) or "anywhere"),
    ("STAGE", lambda row: row.stage.replace("_", " ")),
    ("SHARE", lambda row: f"{row.share:.0%}"),
    ("VERIFIED", lambda row: ("yes" if row.verdict.passed else "no") if row.verdict.migration else "-"),
    ("CAUSE", lambda row: row.cause),
    ("GAIN", lambda row: _gain(row)),
    ("REASON", lambda row: reason(row.reason)),
    ("+P95", lambda row: _before_and_after(row, "latency_p95_s", show_seconds)),
    ("+ENERGY", lambda row: _before_and_after(row, "joules", show_joules)),
    ("+FETCHED", lambda row: _fetch_text(row)),
    ("+TOOK", lambda row: show_seconds(row.came.seconds) if row.HasField("came") else "-"),
    ("+WHY", lambda row: row.why or "-"),
    ("+BEGAN", lambda row: when(row.stages[0].at)),
    ("+GIVES UP AT", lambda row: when(row.gives_up_at)),
    ("+BY", lambda row: row.actor or "-"),
    ("+MODEL", lambda row: row.target.model[:19] or row.source.model[:19]),
    ("+PRECISION", lambda row: row.target.precision or row.source.precision),
)
_DOCUMENT: Final[tuple[Column, ...]] = (
    ("NAME", lambda row: row.name),
    ("REVISION", lambda row: str(row.revision)),
    ("APPLIED", lambda row: when(row.applied_at)),
    ("BY", lambda row: row.applied_by),
)
_COLUMNS["policies"] = _DOCUMENT
_COLUMNS["tenants"] = (
    ("NAME", lambda row: row.name),
    ("COST", lambda row: show_budget(row.tenant_quota.budget) if row.tenant_quota.HasField("budget") else "-"),
    ("RATE", lambda row: _limit_text(row.tenant_quota, "rate", "/s")),
    ("CONCURRENCY", lambda row: _limit_text(row.tenant_quota, "concurrency")),
    ("WEIGHT", lambda row: f"{row.tenant_quota.weight:g}"),
    ("INSIDE", lambda row: _use_text(row.tenant_quota, "inside")),
    ("ADMITTED", lambda row: _use_text(row.tenant_quota, "admitted")),
    ("OVER RATE", lambda row: _use_text(row.tenant_quota, "over_rate")),
    ("OVER CONCURRENCY", lambda row: _use_text(row.tenant_quota, "over_concurrency")),
    ("+SHARES", lambda row: " ".join(map(_share_text, row.tenant_quota.entries)) or "-"),
    *((f"+{name}", cell) for name, cell in _DOCUMENT[1:]),
)
_COLUMNS["regions"] = (
    ("NAME", lambda row: row.name),
    ("PRICE", lambda row: _signal_of(row, "price")),
    ("CARBON", lambda row: _signal_of(row, "carbon")),
    ("LEADER", lambda row: row.leader or "-"),
    ("+COORDINATORS", lambda row: ", ".join(row.coordinators) or "-"),
    *((f"+{name}", _of_document(cell)) for name, cell in _DOCUMENT[1:]),
)


def show_budget(budget: operator_pb2.TenantBudgetView) -> str:
    """What of a tenant's budget is used, such as `3.5 of 5 USD/h`."""
    used = f"{budget.used:.4g}" + (f" and {budget.unpriced} unpriced" if budget.unpriced else "")
    return f"{used} of {show_usd_per_hour(budget.limit)}" + (", exceeded" if budget.exceeded else "")


def _limit_text(quota: Any, name: str, unit: str = "") -> str:
    return f"{getattr(quota, name):g}{unit}" if quota.HasField(name) else "-"


def _use_text(quota: operator_pb2.TenantView, name: str) -> str:
    """A counter of all entries together. Only tenants with a limit are counted, and only the leader hears of them."""
    is_counted = quota.entries and (quota.HasField("rate") or quota.HasField("concurrency"))
    return str(sum(getattr(each.use, name) for each in quota.entries)) if is_counted else "-"


def _share_text(entry: operator_pb2.TenantEntryView) -> str:
    limit = entry.limit
    parts = [f"{limit.rate:.4g}/s"] if limit.HasField("rate") else []
    parts += [str(limit.concurrency)] if limit.HasField("concurrency") else []
    return f"{entry.node}:{','.join(parts) or '-'}"


def estimate(value: operator_pb2.Estimate, show_one: Callable[[float], str]) -> str:
    """`mid [low..high]`; `-` if unknown."""
    if math.isnan(value.mid):
        return "-"
    return f"{show_one(value.mid)} [{show_one(value.low)}..{show_one(value.high)}]"
