"""Rows of the dashboard's tables, from the messages that the command line shows. Pure.

A row is an object for JSON that leaves out what is empty, false, zero or unknown, and what no page shows. Figures that
change with each report are rounded to what a person can see, so that a row changes only when its picture does. Some
tables are a few fields of another one, for pages that show many rows and little of each.
"""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from google.protobuf.message import Message

from shoal.coordinator.core import timeline
from shoal.coordinator.core.fleet.checks import is_plausible_time
from shoal.coordinator.core.timeline import Figure
from shoal.types.units import Bytes, Wall
from shoal.v1 import nouns_pb2, operator_pb2

Row = dict[str, Any]

MEMORY_STEP: Final = Bytes(16 * 2**20)
"""Free memory is shown in steps of this size."""
SPARK_DIGITS: Final = 2
"""Of a value in a line as high as a word."""
TEXT_MOST: Final = 400
"""Characters of a reason or a message; the whole of it is on the page of its subject."""
NODE_STATE: Final = ("name", "live", "cordoned", "quarantined", "revoked", "reason", "seen")
PLACE: Final = ("tenant", "name", "node", "device", "phase", "stand_in")
_REQUESTS_AT: Final = timeline.FIGURES.index(Figure.REQUESTS)


def row_text(row: Row) -> str:
    """The row as JSON."""
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def node_row(view: operator_pb2.NodeView) -> Row:
    node, ready = view.node, view.liveness == "ready"
    return _filled(
        name=node.name,
        role=node.role,
        live=view.liveness,
        cordoned=view.cordoned,
        quarantined=view.quarantined,
        revoked=view.revoked,
        labels=dict(sorted(node.labels.items())),
        version=node.agent_version,
        os=node.os,
        arch=node.arch,
        memory=node.memory_limit_bytes,
        reason=_reason(view),
        # Of a node that reports, the time of its last report is now.
        seen=0 if ready else _time(view.last_seen),
        joined=_time(view.joined_at),
    )


def node_state_row(row: Row) -> Row:
    """What the overview needs of a node's row."""
    return {name: row[name] for name in NODE_STATE if name in row}


def device_row(view: operator_pb2.DeviceView) -> Row:
    device, reading = view.device, view.reading
    told = view.HasField("reading")
    return _filled(
        node=view.node,
        name=device.name,
        kind=device.kind,
        product=device.model,
        vendor=device.vendor,
        stand_in="simulated" if device.simulated else "emulated" if device.emulated else "",
        memory=device.memory_bytes,
        free=_stepped(reading.free_bytes) if told else None,
        busy=_rounded(reading.utilisation, 2) if told else None,
        heat=_rounded(reading.temperature_c, 0) if told else None,
        watts=_rounded(reading.power_w, 1) if told else None,
        throttled=told and reading.throttled,
        power=reading.power if told else "",
        cost=_rounded(view.cost_usd_per_h, 5),
        live=view.liveness,
        runs=len(view.assignments),
        reason=_reason(view),
        since=_time(view.since),
        shares=device.hardware or device.memory_in,
    )


def workload_row(view: operator_pb2.WorkloadView) -> Row:
    counts = view.ingress
    return _filled(
        tenant=view.workload.tenant,
        name=view.workload.name,
        policy=view.policy,
        state=view.state,
        wanted=view.wanted,
        ready=view.ready,
        revision=view.revision,
        reason=_reason(view),
        since=_time(view.since),
        retry_at=_time(view.retry_at),
        answered=sum(each.answered for each in counts),
        retried=sum(each.retried for each in counts),
        refused=sum(each.refused for each in counts),
        lost=sum(each.lost for each in counts),
    )


def placement_row(view: operator_pb2.PlacementView) -> Row:
    one, seen, told = view.assignment, view.observed, view.HasField("observed")
    answered = [each for each in seen.served if each.requests and math.isfinite(each.latency_p95_s)]
    busiest = max(answered, key=lambda each: each.requests, default=None)
    energy = [each for each in seen.served if math.isfinite(each.joules) and each.requests]
    requests = sum(each.requests for each in energy)
    return _filled(
        id=one.id,
        tenant=one.workload.tenant,
        name=one.workload.name,
        node=view.node,
        device=one.device,
        precision=one.precision,
        draining=one.draining,
        standby=one.standby,
        stand_in=view.stand_in,
        live=view.liveness,
        stays=view.stays[:TEXT_MOST],
        phase=seen.phase if told else "",
        since=_time(seen.since) if told else 0,
        code=seen.code if told else "",
        why=seen.reason[:TEXT_MOST] if told else "",
        requests=sum(each.requests for each in seen.served),
        errors=sum(each.errors for each in seen.served),
        p95=_digits(busiest.latency_p95_s) if busiest is not None else None,
        joules=_digits(sum(each.joules for each in energy) / requests) if requests else None,
        energy=energy[0].energy_source if energy else "",
    )


def place_row(row: Row) -> Row:
    """What lists of workloads need of a placement's row: where each runs."""
    return {name: row[name] for name in PLACE if name in row}


def figures_row(steps: Sequence[timeline.Values]) -> Row:
    """The newest value of each figure, and requests of the last minutes as a list with null where unknown."""
    newest = dict(zip(timeline.FIGURES, steps[-1] if steps else timeline.UNKNOWN, strict=True))
    row: Row = {figure: _digits(value) for figure, value in newest.items()}
    past = [_digits(each[_REQUESTS_AT], SPARK_DIGITS) for each in steps]
    if any(value is not None for value in past):
        row[f"past_{Figure.REQUESTS}"] = [_shortest(value) for value in past]
    return _filled(**row)


def event_row(view: operator_pb2.Event) -> Row:
    return _filled(
        sequence=view.sequence,
        at=_rounded(view.at, 3),
        code=view.code,
        subject=view.subject,
        message=view.message[:TEXT_MOST],
        actor=view.actor,
        node=view.node,
        tenant=view.workload.tenant,
        workload=view.workload.name,
        stand_in=view.stand_in,
    )


def plain(message: Message) -> Row:
    """A message as an object for JSON: each field that is set, by its name in the proto, numbers and times as numbers;
    unknown figures (NaN) are left out."""
    return {
        field.name: found for field, value in message.ListFields() if (found := _plain_field(field, value)) is not None
    }


def _plain_field(field: Any, value: Any) -> Any:
    if field.is_repeated:
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            inner = entry.fields_by_name["value"].message_type is not None
            return {str(key): plain(value[key]) if inner else _scalar(value[key]) for key in sorted(value)}
        return [plain(each) if isinstance(each, Message) else _scalar(each) for each in value]
    return plain(value) if isinstance(value, Message) else _scalar(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _reason(view: operator_pb2.NodeView | operator_pb2.DeviceView | operator_pb2.WorkloadView) -> Row:
    return refusal_row(view.reason) if view.HasField("reason") else {}


def refusal_row(refusal: nouns_pb2.Refusal) -> Row:
    return _filled(
        code=refusal.code,
        found=refusal.found[:TEXT_MOST],
        asked=refusal.asked[:TEXT_MOST],
        remedy=refusal.remedy[:TEXT_MOST],
    )


def _filled(**fields: Any) -> Row:
    """A figure is a float, and a measured 0.0 stays: it is not unknown. A count, an int, is left out at 0."""
    return {name: _shortest(value) for name, value in fields.items() if value or isinstance(value, float)}


def _shortest(value: Any) -> Any:
    """Without the `.0` of a whole number, which JSON would carry."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _rounded(value: float, digits: int) -> float | None:
    """None where unknown, which a row leaves out."""
    return round(value, digits) if math.isfinite(value) else None


def _time(wall: float) -> int:
    """0, which a row leaves out, where no clock can show it: some of these a node has told."""
    return round(wall) if is_plausible_time(Wall(wall)) else 0


def _digits(value: float, digits: int = 3) -> float | None:
    """None where unknown, which a row leaves out."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def _stepped(value: float) -> float:
    return float(value // MEMORY_STEP * MEMORY_STEP)


def rows_text(rows: Iterable[tuple[str, str | None]]) -> str:
    """`[[key,row],...]` of rows that are JSON already; null for one that is gone."""
    return "[" + ",".join(f"[{json.dumps(key)},{row or 'null'}]" for key, row in rows) + "]"
