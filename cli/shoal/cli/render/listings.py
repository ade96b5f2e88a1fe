"""Listings: the columns of each kind. Emulated devices are marked in every row."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import Message

from shoal.cli.options import SINGULAR
from shoal.cli.render.columns import Cell, Column
from shoal.cli.render.output import line, note, table
from shoal.cli.render.resources import (
    age,
    before_and_after,
    device_cell,
    device_stand_in,
    device_state,
    devices_cell,
    estimate,
    event_line,
    fetch_text,
    gain,
    gflop_text,
    identity_cell,
    limit_text,
    link_text,
    liveness,
    matmul_rate,
    memory_text,
    migration_target,
    place_cell,
    placement_joules,
    placement_latency,
    placement_reason,
    power_source,
    provider_memory,
    reason_cell,
    receipt_text,
    region_name,
    scale_state,
    sensor_text,
    service_text,
    serving_text,
    share_text,
    show_budget,
    signal_of,
    signer,
    temperature_text,
    time_cell,
    use_text,
    watts_text,
    when,
)
from shoal.cli.render.styles import state
from shoal.types.units import show_bytes, show_joules, show_seconds, show_usd_per_hour, show_watts

if TYPE_CHECKING:
    from shoal.client import RegionClient

CellOf = Callable[[Any], str | Cell]


@dataclass(frozen=True, slots=True)
class Listed:
    """A column of a listing."""

    # Of the column.
    name: str
    # What it shows of a message.
    cell: CellOf
    # When it leaves a narrow terminal, as `Column.rank`.
    rank: int = 0
    # How far its cells are cut, as `Column.least`.
    least: int = 0
    # Whether it stands on the right, as numbers do.
    right: bool = False
    # Only with `-o wide`.
    wide: bool = False


def rows_of(api: "RegionClient", kind: str, name: str, tenant: str) -> Sequence[Message]:
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


def name_of(kind: str, row: Any) -> str:
    """The name by which `get KIND NAME` finds the row."""
    return str(_NAMES[kind](row)) if kind in _NAMES else str(row.name)


_NAMES: Final[Mapping[str, Callable[[Any], str]]] = {
    "nodes": lambda row: row.node.name,
    "devices": lambda row: f"{row.node}/{row.device.name}",
    "workloads": lambda row: row.workload.name,
    "placements": lambda row: row.assignment.id,
    "tokens": lambda row: row.id,
    "events": lambda row: row.sequence,
    "agreements": lambda row: row.agreement,
    "migrations": lambda row: row.id,
}
"""Kind -> the name of a row; the others are called `name`."""


def show(kind: str, messages: Sequence[Any], *, wide: bool) -> None:
    if kind == "events":
        for message in messages:
            line(event_line(message))
        return
    hint = _WHY.get(kind, f"one: shoal describe {SINGULAR[kind]} NAME")
    table(columns_of(kind, wide=wide), [cells_of(kind, each, wide=wide) for each in messages], wide=wide, hint=hint)


def columns_of(kind: str, *, wide: bool) -> list[Column]:
    return [Column(each.name, each.rank, each.least, each.right) for each in COLUMNS[kind] if wide or not each.wide]


def cells_of(kind: str, message: Any, *, wide: bool) -> list[str | Cell]:
    """What the row says in each of `columns_of`."""
    return [each.cell(message) for each in COLUMNS[kind] if wide or not each.wide]


def text_of(cell: str | Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


_WHY: Final[Mapping[str, str]] = dict.fromkeys(("workloads", "placements"), "why: shoal explain WORKLOAD")
"""Kind -> the command that says why, where that is more than `describe`."""


def _wide(name: str, cell: CellOf) -> Listed:
    return Listed(name, cell, wide=True)


def _of_document(cell: CellOf) -> CellOf:
    return lambda row: cell(row.document) if row.HasField("document") else "-"


def _workload(row: Any) -> str:
    return f"{row.workload.tenant}/{row.workload.name}"


_DOCUMENT: Final = (
    Listed("NAME", lambda row: row.name),
    Listed("REVISION", lambda row: str(row.revision), rank=1, right=True),
    Listed("BY", lambda row: identity_cell(row.applied_by), rank=3, least=12),
    Listed("AGE", lambda row: age(row.applied_at), rank=2, right=True),
    _wide("APPLIED", lambda row: when(row.applied_at)),
)

COLUMNS: Final[dict[str, tuple[Listed, ...]]] = {
    "nodes": (
        Listed("NODE", lambda row: row.node.name),
        Listed("ROLE", lambda row: row.node.role, rank=3),
        Listed("LIVENESS", lambda row: state(liveness(row))),
        Listed("DEVICES", lambda row: devices_cell(row.node.devices), rank=2),
        Listed("SEEN", lambda row: age(row.last_seen), rank=4, right=True),
        Listed("AGE", lambda row: age(row.joined_at), rank=5, right=True),
        Listed("REASON", lambda row: reason_cell(row.reason), rank=1),
        _wide("LAST SEEN", lambda row: when(row.last_seen)),
        _wide("JOINED", lambda row: when(row.joined_at)),
        _wide("VERSION", lambda row: row.node.agent_version),
        _wide("EPOCH", lambda row: str(row.epoch)),
        _wide("DESIRED", lambda row: str(row.desired.generation)),
        _wide("OBSERVED", lambda row: str(row.observed.generation)),
        _wide("DATA PORT", lambda row: row.node.data_address),
        _wide("CERTIFICATE UNTIL", lambda row: when(row.certificate_expires_at)),
        _wide("LABELS", lambda row: " ".join(f"{k}={v}" for k, v in sorted(row.node.labels.items())) or "-"),
    ),
    "devices": (
        Listed("DEVICE", lambda row: f"{row.node}/{row.device.name}", least=24),
        Listed("IS", lambda row: device_stand_in(row.device) or "real"),
        Listed("KIND", lambda row: row.device.kind, rank=2),
        Listed("FREE", lambda row: show_bytes(row.reading.free_bytes) if row.reading.device else "-", 3, right=True),
        Listed("MATMUL", lambda row: matmul_rate(row.receipt), rank=4),
        Listed("STATE", lambda row: state(device_state(row))),
        _wide("REASON", lambda row: reason_cell(row.reason)),
        _wide("MODEL", lambda row: row.device.model),
        _wide("MEMORY", lambda row: memory_text(row.device)),
        _wide("NUMA", lambda row: str(row.device.numa) if row.device.HasField("numa") else "-"),
        _wide("LINKS", lambda row: "; ".join(map(link_text, row.device.links)) or "-"),
        _wide("COMMITTED", lambda row: show_bytes(row.committed_bytes)),
        _wide("PRICE", lambda row: show_usd_per_hour(row.cost_usd_per_h)),
        _wide("PROVIDER", lambda row: row.device.provider),
        _wide("PROVIDER MEMORY", lambda row: provider_memory(row.receipt)),
        _wide("RECEIPT", lambda row: receipt_text(row.receipt) if row.receipt.node else "-"),
        _wide(
            "ACTIVE",
            lambda row: (
                f"{show_watts(row.receipt.rates.active_w)} ({power_source(row.receipt)})" if row.receipt.node else "-"
            ),
        ),
        _wide("NOW", watts_text),
        _wide("USED", lambda row: sensor_text(row.reading.energy_j, show_joules)),
        _wide("HEAT", lambda row: temperature_text(row.reading)),
        _wide("SLEPT", lambda row: show_seconds(row.reading.slept_s) if row.reading.power else "-"),
        _wide("SAVED", lambda row: show_joules(row.reading.saved_j) if row.reading.power else "-"),
        _wide("TIME SCALE", lambda row: f"{row.device.time_scale:g}" if row.device.emulated else "-"),
        _wide("ASSIGNMENTS", lambda row: " ".join(row.assignments) or "-"),
    ),
    "models": (
        Listed("NAME", lambda row: row.name, least=16),
        Listed("DIGEST", lambda row: row.digest[:19], rank=2),
        Listed("SIZE", lambda row: show_bytes(row.size_bytes), rank=1, right=True),
        Listed("PRECISION", lambda row: row.profile.precision, rank=4),
        Listed("GFLOP", lambda row: gflop_text(row.profile), rank=5, right=True),
        Listed("SIGNED BY", lambda row: " ".join(filter(None, map(signer, row.signatures))) or "-", rank=7, least=9),
        Listed(
            "USED BY", lambda row: " ".join(f"{key.tenant}/{key.name}" for key in row.used_by) or "-", rank=3, least=12
        ),
        Listed("AGE", lambda row: age(row.pushed_at), rank=6, right=True),
        _wide("PUSHED", lambda row: when(row.pushed_at)),
        _wide("BY", lambda row: row.pushed_by),
    ),
    "workloads": (
        Listed("WORKLOAD", _workload, least=16),
        Listed("STATE", lambda row: state(scale_state(row.reason.code) or row.state)),
        Listed("READY", lambda row: f"{row.ready}/{row.wanted}", rank=1, right=True),
        Listed("POLICY", lambda row: row.policy or "-", rank=5, least=10),
        Listed("REASON", lambda row: reason_cell(row.reason), rank=2),
        Listed("REQUESTS", lambda row: str(sum(one.requests for one in row.ingress)), rank=4, right=True),
        # An older coordinator does not tell when it was applied.
        Listed("AGE", lambda row: age(row.applied_at or row.since), rank=3, right=True),
        _wide("ANSWERED", lambda row: str(sum(one.answered for one in row.ingress))),
        _wide("RETRIED", lambda row: str(sum(one.retried for one in row.ingress))),
        _wide("REFUSED", lambda row: str(sum(one.refused for one in row.ingress))),
        _wide("LOST", lambda row: str(sum(one.lost for one in row.ingress))),
        _wide("SINCE", lambda row: when(row.since)),
        _wide("RETRY AT", lambda row: when(row.retry_at)),
        _wide("GIVES UP AT", lambda row: when(row.gives_up_at)),
        _wide("REVISION", lambda row: str(row.revision)),
        _wide("RELAXED", lambda row: "; ".join(row.relaxed) or "-"),
    ),
    "placements": (
        Listed("WORKLOAD", lambda row: _workload(row.assignment), least=16),
        Listed("DEVICE", lambda row: device_cell(row.node, row.assignment.device, row.stand_in), least=14),
        Listed("PHASE", lambda row: state(scale_state(row.observed.code) or row.observed.phase or "unseen")),
        Listed("SERVING", lambda row: state(serving_text(row)), rank=1),
        Listed("P95", placement_latency, rank=2),
        Listed("MEMORY", lambda row: show_bytes(row.observed.measured.memory_bytes or row.assignment.memory_bytes),
               rank=6, right=True),
        Listed("SERVED", lambda row: str(sum(one.requests for one in row.observed.served)), rank=4, right=True),
        Listed("ENERGY", placement_joules, rank=7),
        Listed("AGE", lambda row: age(row.observed.since), rank=5, right=True),
        Listed("REASON", placement_reason, rank=3, least=12),
        _wide("ASSIGNMENT", lambda row: row.assignment.id),
        _wide("MODEL", lambda row: row.assignment.model[:19]),
        _wide("PRECISION", lambda row: row.assignment.precision),
        _wide("PREDICTED P95", lambda row: estimate(row.prediction.latency_p95_s, show_seconds)),
        _wide("RESTARTS", lambda row: str(row.observed.restarts)),
    ),
    "tokens": (
        Listed("ID", lambda row: row.id),
        Listed("ROLE", lambda row: row.role, rank=1),
        Listed("NAME", lambda row: row.name or "any", rank=2, least=12),
        Listed("EXPIRES", lambda row: time_cell(row.expires_at), rank=1),
        Listed("USED", lambda row: time_cell(row.used_at), rank=2),
        Listed("USED BY", lambda row: identity_cell(row.used_by), rank=4, least=12),
        Listed("MADE BY", lambda row: identity_cell(row.created_by), rank=5, least=12),
        Listed("AGE", lambda row: age(row.created_at), rank=3, right=True),
        _wide("MADE", lambda row: when(row.created_at)),
    ),
    "agreements": (
        Listed("AGREEMENT", lambda row: row.agreement, least=10),
        Listed("SIDE", lambda row: row.side, rank=4),
        Listed("REGION", lambda row: region_name(row.counterpart, row.offer.stand_in), rank=1, least=12),
        Listed("WORKLOAD", _workload, least=12),
        Listed("STATE", lambda row: state(row.state)),
        Listed("SERVICE", lambda row: state(row.service or "-"), rank=2),
        Listed("PROMISED P95", lambda row: show_seconds(row.offer.latency_p95_s) if row.offer.id else "-",
               rank=6),
        Listed("DELIVERED", lambda row: service_text(row.delivered), rank=5),
        Listed(
            "PRICE",
            lambda row: show_usd_per_hour(row.offer.cost) if row.offer.id and math.isfinite(row.offer.cost) else "-",
            rank=7,
        ),
        Listed("AGE", lambda row: age(row.agreed_at), rank=5, right=True),
        Listed("REASON", lambda row: reason_cell(row.reason), rank=3),
        _wide("AGREED", lambda row: when(row.agreed_at)),
        _wide("LEASE", lambda row: show_seconds(row.lease_s) if row.lease_s else "-"),
        _wide("MODEL", lambda row: row.offer.model[:19]),
        _wide("REPLICAS", lambda row: str(row.offer.replicas)),
    ),
    "migrations": (
        Listed("MIGRATION", lambda row: row.id),
        Listed("WORKLOAD", _workload, least=12),
        Listed("FROM", lambda row: place_cell(row.source), rank=2, least=9),
        Listed("TO", migration_target, rank=1, least=9),
        Listed("STAGE", lambda row: state(row.stage.replace("_", " "))),
        Listed("SHARE", lambda row: f"{row.share:.0%}", rank=6, right=True),
        Listed("VERIFIED", lambda row: state(("yes" if row.verdict.passed else "no") if row.verdict.migration else "-"),
               rank=7),
        Listed("CAUSE", lambda row: row.cause, rank=4),
        Listed("GAIN", gain, rank=8, least=10),
        Listed("AGE", lambda row: age(row.stages[0].at if row.stages else 0.0), rank=5, right=True),
        Listed("REASON", lambda row: reason_cell(row.reason), rank=3),
        _wide("P95", lambda row: before_and_after(row, "latency_p95_s", show_seconds)),
        _wide("ENERGY", lambda row: before_and_after(row, "joules", show_joules)),
        _wide("FETCHED", fetch_text),
        _wide("TOOK", lambda row: show_seconds(row.came.seconds) if row.HasField("came") else "-"),
        _wide("WHY", lambda row: row.why or "-"),
        _wide("BEGAN", lambda row: when(row.stages[0].at if row.stages else 0.0)),
        _wide("GIVES UP AT", lambda row: when(row.gives_up_at)),
        _wide("BY", lambda row: row.actor or "-"),
        _wide("MODEL", lambda row: row.target.model[:19] or row.source.model[:19]),
        _wide("PRECISION", lambda row: row.target.precision or row.source.precision),
    ),
    "policies": _DOCUMENT,
    "tenants": (
        Listed("NAME", lambda row: row.name),
        Listed(
            "COST",
            lambda row: show_budget(row.tenant_quota.budget) if row.tenant_quota.HasField("budget") else "-",
            rank=1, least=16,
        ),
        Listed("RATE", lambda row: limit_text(row.tenant_quota, "rate", "/s"), rank=2, right=True),
        Listed("CONCURRENCY", lambda row: limit_text(row.tenant_quota, "concurrency"), rank=4, right=True),
        Listed("WEIGHT", lambda row: f"{row.tenant_quota.weight:g}", rank=7, right=True),
        Listed("INSIDE", lambda row: use_text(row.tenant_quota, "inside"), rank=3, right=True),
        Listed("ADMITTED", lambda row: use_text(row.tenant_quota, "admitted"), rank=6, right=True),
        Listed("OVER RATE", lambda row: use_text(row.tenant_quota, "over_rate"), rank=5, right=True),
        Listed("OVER CONCURRENCY", lambda row: use_text(row.tenant_quota, "over_concurrency"), rank=8, right=True),
        Listed("AGE", lambda row: age(row.applied_at), rank=9, right=True),
        _wide("SHARES", lambda row: " ".join(map(share_text, row.tenant_quota.entries)) or "-"),
        *(_wide(each.name, each.cell) for each in _DOCUMENT[1:] if each.name != "AGE"),
    ),
    "regions": (
        Listed("NAME", lambda row: row.name),
        Listed("PRICE", lambda row: signal_of(row, "price"), rank=1, least=12),
        Listed("CARBON", lambda row: signal_of(row, "carbon"), rank=2, least=12),
        Listed("LEADER", lambda row: row.leader or "-", rank=3),
        # Of its document, which it need not have.
        Listed("AGE", _of_document(lambda row: age(row.applied_at)), rank=4, right=True),
        _wide("COORDINATORS", lambda row: ", ".join(row.coordinators) or "-"),
        *(_wide(each.name, _of_document(each.cell)) for each in _DOCUMENT[1:] if each.name != "AGE"),
    ),
}  # fmt: skip
"""Kind -> its columns; those that are there only with `-o wide` stand last."""
