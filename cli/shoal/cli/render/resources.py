"""What single fields of the region's messages say to people."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from shoal.cli.render.columns import Cell, Column
from shoal.cli.render.output import line, table
from shoal.cli.render.times import utc_time
from shoal.types.codes import Code
from shoal.types.device import ESTIMATED_RANGE, EnergySource
from shoal.types.units import (
    show_bytes,
    show_bytes_per_second,
    show_flops_per_second,
    show_gain,
    show_joules,
    show_number,
    show_seconds,
    show_usd_per_hour,
    show_watts,
)
from shoal.v1 import artifacts_pb2, nouns_pb2, operator_pb2


def service_text(report: Any) -> str:
    """Service as this region's gateways measured it; of guests, without the time between regions."""
    if not report.requests:
        return "-"
    errors = f", {report.errors} failed" if report.errors else ""
    return f"{show_seconds(report.latency_p95_s)} in {report.requests} requests{errors}"


def sensor_text(value: float, show: Callable[[float], str]) -> str:
    """A sensor's value; 0 and NaN mean that there is none."""
    return show(value) if value > 0 else "-"


def temperature_text(reading: nouns_pb2.Reading) -> str:
    told = sensor_text(reading.temperature_c, lambda value: f"{value:.0f} C")
    return f"{told}, slows itself down" if reading.throttled else told


def event_line(event: operator_pb2.Event) -> str:
    where = "/".join(part for part in (event.workload.tenant, event.workload.name) if part) or event.subject
    mark = f" ({event.stand_in})" if event.stand_in else ""
    node = f" [{event.node}{mark}]" if event.node and event.node != where else mark
    # Most events are the coordinator's own doing, which goes without saying.
    actor = f"by {event.actor}" if event.actor not in ("", "coordinator") else ""
    said = " ".join(filter(None, (event.message, actor)))
    return "  ".join(filter(None, (when(event.at), event.code, f"{where}{node}", said)))


def age(stamp: float) -> str:
    """Time since then, such as `5m`; 0s also where this machine's clock is behind. `-`: never."""
    is_known = utc_time(stamp) is not None
    return show_age(max(0.0, time.time() - stamp)) if is_known else "-"  # noqa: TID251 - a command's own clock


def show_age(seconds: float) -> str:
    """In one unit, of which there are at least two: 119s, 2m, 47h."""
    for factor, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * factor:
            return f"{seconds // factor:.0f}{unit}"
    return f"{seconds:.0f}s"


def time_cell(stamp: float) -> Cell:
    """`when`, or the time from now to it where there is no room: `in 5m`, `5m ago`."""
    if utc_time(stamp) is None:
        return Cell("-")
    seconds = stamp - time.time()  # noqa: TID251 - a command's own clock
    return Cell(when(stamp), f"in {show_age(seconds)}" if seconds > 0 else f"{show_age(-seconds)} ago", is_whole=True)


def identity_cell(uri: str) -> Cell:
    """Who did something; where there is no room without the region: shoal://home/operator/ann is operator/ann."""
    return Cell(uri or "-", uri.removeprefix("shoal://").partition("/")[2], is_whole=True)


def liveness(row: operator_pb2.NodeView) -> str:
    """Its liveness, and whatever else keeps work away from it."""
    words = (
        (row.liveness, True),
        ("front down", row.liveness == "ready" and row.observed.generation and not row.front_ready),
        ("cordoned", row.cordoned),
        ("quarantined", row.quarantined),
        ("revoked", row.revoked),
        ("duplicate", bool(row.duplicate)),
    )
    return ", ".join(word for word, holds in words if holds)


def devices_cell(devices: Sequence[nouns_pb2.Device]) -> Cell:
    """Their names; where there is no room, how many there are and whether they are real."""
    names = " ".join(device_name("", each.name, device_stand_in(each)).lstrip("/") for each in devices)
    marks = ", ".join(dict.fromkeys(filter(None, map(device_stand_in, devices))))
    return Cell(names or "-", f"{len(devices)}{f' {marks}' if marks else ''}" if devices else "")


def when(stamp: float) -> str:
    at = utc_time(stamp)
    return at.strftime("%Y-%m-%d %H:%M:%SZ") if at is not None else "-"


def reason(refusal: Any) -> str:
    """The code, what was found and what was wanted; `-` if there is no refusal."""
    # Of what another region runs, `asked` is the agreement.
    label = "agreement" if refusal.code == Code.DELEGATED else "wanted"
    wanted = f"{label} {refusal.asked}" if refusal.asked else ""
    words = ", ".join(part for part in (refusal.found, wanted) if part)
    return " ".join(part for part in (refusal.code, words) if part) or "-"


def reason_cell(refusal: Any) -> Cell:
    """`reason`, or its code where there is no room."""
    return Cell(reason(refusal), refusal.code, style="yellow" if refusal.code else "")


def full_reason(refusal: Any) -> str:
    """`reason` with the remedy."""
    return reason(refusal) + (f"; try: {refusal.remedy}" if refusal.remedy else "")


def _placement_status_text(observed: Any) -> str:
    """An older agent puts the code in front of its text."""
    words = observed.reason.removeprefix(observed.code).strip() if observed.code else observed.reason
    return " ".join(part for part in (observed.code, words) if part) or "-"


def device_cell(node: str, device: str, stand_in: str) -> Cell:
    """A device's name, whose mark stays when it is cut."""
    name = device_name(node, device, stand_in)
    return Cell(name, tail=f" ({stand_in})" if stand_in else "")


def device_name(node: str, device: str, stand_in: str) -> str:
    return f"{node}/{device}" + (f" ({stand_in})" if stand_in else "")


def device_stand_in(device: nouns_pb2.Device) -> str:
    """As `shoal.types.device.Device.stand_in`."""
    return "simulated" if device.simulated else "emulated" if device.emulated else ""


def gflop_text(profile: nouns_pb2.ModelProfile) -> str:
    return show_number(sum(cost.flops for cost in profile.costs) / 1e9)


def show_profile(model: artifacts_pb2.Model) -> None:
    """A model for people."""
    profile = model.profile
    line(f"{model.name or '(not stored)'}  {profile.digest or model.digest}", "bold")
    line(
        f"opset {profile.opset}  IR {profile.ir_version}  {profile.precision}  file {show_bytes(profile.size_bytes)}"
        f"  weights {show_bytes(profile.weight_bytes)}  activations {show_bytes(profile.activation_bytes)}"
        f"  {gflop_text(profile)} GFLOP" + ("" if profile.confident else " at least (a shape could not be inferred)")
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
        ["", Column("NAME", least=16), "TYPE", Column("SHAPE", least=16)],
        [
            [side, tensor.name, tensor.dtype, _shape(tensor.shape)]
            for side, tensors in (("in", profile.inputs), ("out", profile.outputs))
            for tensor in tensors
        ],
    )
    table(
        ["OPERATOR", "NODES", "GFLOP", "MOVED"],
        [
            [cost.operator, str(cost.nodes), show_number(cost.flops / 1e9, 4), show_bytes(cost.bytes)]
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
    return region_name(one.region, one.stand_in) if one.region else place_here(one)


def place_here(one: operator_pb2.MigrationPlace) -> str:
    """A device of this region; empty if it is not known."""
    return device_name(one.node, one.device, one.stand_in) if one.node else ""


def place_cell(one: operator_pb2.MigrationPlace) -> Cell:
    """`place`, whose mark stays when it is cut."""
    return Cell(place(one) or "-", tail=f" ({one.stand_in})" if one.stand_in else "")


def migration_target(one: operator_pb2.MigrationView) -> Cell:
    """Where it goes, as far as that is known."""
    if place(one.target):
        return place_cell(one.target)
    return Cell(requested_target(one) or "anywhere", tail=f" ({one.to_stand_in})" if one.to and one.to_stand_in else "")


def region_name(region: str, stand_in: str) -> str:
    return f"{region} ({stand_in})" if stand_in else region


def requested_target(one: operator_pb2.MigrationView | operator_pb2.MoveHoldView) -> str:
    """The requested target; empty: any."""
    return f"{one.to} ({one.to_stand_in})" if one.to and one.to_stand_in else one.to


def gain(row: operator_pb2.MigrationView) -> str:
    """Expected gain, and the actual one if known."""
    if not row.HasField("expected"):
        return "-"
    return show_gain(row.expected.gain) + (f", came {show_gain(row.came.gain)}" if row.came.requests else "")


def before_and_after(row: operator_pb2.MigrationView, figure: str, show_one: Callable[[float], str]) -> str:
    """Before, expected and actual."""
    if not row.HasField("expected"):
        return "-"
    known = [row.expected.before, row.expected.after, *([row.came.after] if row.HasField("came") else [])]
    return " -> ".join(show_one(value) if math.isfinite(value := getattr(one, figure)) else "?" for one in known)


def fetch_text(row: operator_pb2.MigrationView) -> str:
    """Expected bytes, and fetched ones if they were counted."""
    known = [row.expected.fetch_bytes] if row.HasField("expected") else []
    known += [row.came.fetch_bytes] if row.came.HasField("fetch_bytes") else []
    return " -> ".join(map(show_bytes, known)) or "-"


def _shape(dims: Sequence[int]) -> str:
    return "x".join("?" if dim < 0 else str(dim) for dim in dims) or "scalar"


def placement_reason(row: operator_pb2.PlacementView) -> Cell:
    """The reason that the node reports; for a serving replica, why it stays although another place is better."""
    said = _placement_status_text(row.observed)
    if row.stays and said == "-":
        return Cell(row.stays, "stays", style="yellow")
    return Cell(said, row.observed.code, style="red" if row.observed.phase == "failed" else "")


_SCALE_STATES: Final[Mapping[str, str]] = {Code.SCALED_TO_ZERO: "idle", Code.WAITING_FOR_WAKE: "waking"}


def scale_state(code: str) -> str:
    """What people call a replica, or a workload, that is ready although nothing is loaded; empty for any other."""
    return _SCALE_STATES.get(code, "")


def serving_text(row: operator_pb2.PlacementView) -> str:
    if row.assignment.staged:
        return "staged"
    if not row.routed:
        return "no"
    return "standby" if row.assignment.standby else "yes"


def placement_latency(row: operator_pb2.PlacementView) -> Cell:
    measured = row.observed.measured
    if not measured.samples:
        return Cell("-")
    answered = [one for one in row.observed.served if one.requests and math.isfinite(one.latency_p95_s)]
    p95 = max((one.latency_p95_s for one in answered), default=measured.latency_p95_s)
    text = show_seconds(p95)
    if row.stand_in == "emulated":
        return Cell(f"{text} (x{row.time_scale:g} in real time)", f"{text} (x{row.time_scale:g})", is_whole=True)
    return Cell(text)


def placement_joules(row: operator_pb2.PlacementView) -> str:
    requests = sum(one.requests for one in row.observed.served)
    joules = sum(one.joules for one in row.observed.served)
    sources = {one.energy_source for one in row.observed.served if one.requests}
    if not requests:
        return "-"
    source = sources.pop() if len(sources) == 1 else "estimated"
    return energy_text(joules, source)


def energy_text(joules: float, source: str) -> str:
    """With where it comes from. An estimate has its range, since no two processors draw the same."""
    if source != EnergySource.ESTIMATED:
        return f"{show_joules(joules)} ({source})"
    low, high = (show_joules(joules * part) for part in ESTIMATED_RANGE)
    return f"{show_joules(joules)} [{low}..{high}] ({source})"


def matmul_rate(receipt: Any) -> str:
    flops = max(receipt.rates.matmul_flops.values(), default=0.0)
    return show_flops_per_second(flops) if flops else "-"


def receipt_text(receipt: Any) -> str:
    """Its source, of an emulated device by the profile's name, and its time. `-o json` has all of both."""
    return f"{receipt.source.partition(': ')[0]} {when(receipt.measured_at)}"


def link_text(link: Any) -> str:
    """What it is, what it carries and who says so."""
    carries = f"{show_bytes_per_second(link.bytes_per_s)}, " if link.HasField("bytes_per_s") else ""
    to = f"{link.to}: " if link.to else ""
    return f"{to}{link.name} ({carries}{link.source})"


def watts_text(row: Any) -> str:
    """Its power; that of two devices which one meter counts is not the device's own."""
    text = sensor_text(row.reading.power_w, show_watts)
    return f"{text} with {row.device.power_in}" if row.device.power_in and text != "-" else text


def memory_text(device: Any) -> str:
    return show_bytes(device.memory_bytes) + (f" of {device.memory_in}" if device.memory_in else "")


def provider_memory(receipt: Any) -> str:
    """What the provider takes in a worker before any model, and what of the host where that is another memory."""
    if not receipt.provider_bytes:
        return "-"
    found, of_host = show_bytes(receipt.provider_bytes), show_bytes(receipt.provider_host_bytes)
    return found if found == of_host else f"{found}, {of_host} of the host"


def power_source(receipt: Any) -> str:
    """Source of the power figures; a whole system's power is not the device's own."""
    return f"{receipt.rates.energy_source}" + (f", of the whole {receipt.system}" if receipt.system else "")


def show_signals(signals: Iterable[operator_pb2.SignalView]) -> None:
    """One line each, for signals that have a value or should have one."""
    for signal in signals:
        if not math.isnan(signal.value) or signal.refusal.code:
            line(f"{signal.name} {signal_text(signal)}", "yellow" if signal.stale else "dim")


def signal_text(signal: operator_pb2.SignalView) -> str:
    """Value, source and age, and why the source could not be read."""
    value = "unknown" if math.isnan(signal.value) else f"{show_number(signal.value, 4)} {signal.unit}"
    refused = f"; {reason(signal.refusal)}" if signal.refusal.code else ""
    return f"{value} ({signal.why}{refused})"


def signal_of(row: operator_pb2.RegionView, name: str) -> str:
    return next((signal_text(signal) for signal in row.signals if signal.name == name), "-")


def device_state(row: operator_pb2.DeviceView) -> str:
    """Its node's liveness where that is not ready; else since when it does not answer, or whether it sleeps."""
    if row.liveness != "ready":
        return row.liveness
    if row.reason.code:
        since = utc_time(row.since)
        return f"silent {since:%H:%MZ}" if since is not None else "silent"
    return row.reading.power or "ready"


def show_budget(budget: operator_pb2.TenantBudgetView) -> str:
    """What of a tenant's budget is used, such as `3.5 of 5 USD/h`."""
    used = show_number(budget.used, 4) + (f" and {budget.unpriced} unpriced" if budget.unpriced else "")
    return f"{used} of {show_usd_per_hour(budget.limit)}" + (", exceeded" if budget.exceeded else "")


def limit_text(quota: Any, name: str, unit: str = "") -> str:
    return f"{getattr(quota, name):g}{unit}" if quota.HasField(name) else "-"


def use_text(quota: operator_pb2.TenantView, name: str) -> str:
    """A counter of all entries together. Only tenants with a limit are counted, and only the leader hears of them."""
    is_counted = quota.entries and (quota.HasField("rate") or quota.HasField("concurrency"))
    return str(sum(getattr(each.use, name) for each in quota.entries)) if is_counted else "-"


def share_text(entry: operator_pb2.TenantEntryView) -> str:
    limit = entry.limit
    parts = [f"{show_number(limit.rate, 4)}/s"] if limit.HasField("rate") else []
    parts += [str(limit.concurrency)] if limit.HasField("concurrency") else []
    return f"{entry.node}:{','.join(parts) or '-'}"


def estimate_cell(value: operator_pb2.Estimate, show_one: Callable[[float], str]) -> Cell:
    """`estimate`, or the middle alone where there is no room."""
    return Cell(estimate(value, show_one), "-" if math.isnan(value.mid) else show_one(value.mid))


def estimate(value: operator_pb2.Estimate, show_one: Callable[[float], str]) -> str:
    """`mid [low..high]`; `-` if unknown."""
    if math.isnan(value.mid):
        return "-"
    return f"{show_one(value.mid)} [{show_one(value.low)}..{show_one(value.high)}]"
