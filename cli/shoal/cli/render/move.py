"""The answer of can-move, for people."""

import math
from collections.abc import Callable

from shoal.cli.render.columns import Cell, Column
from shoal.cli.render.output import line, table
from shoal.cli.render.plan import show_bids
from shoal.cli.render.resources import device_name, estimate, estimate_cell, full_reason, link_text, reason
from shoal.types.units import show_bytes, show_joules, show_seconds, show_usd_per_hour
from shoal.v1 import operator_pb2


def show_prospect(reply: operator_pb2.CanMoveReply, to: str, *, wide: bool) -> None:
    """The answer first, then each device and variant, the best on top."""
    name = f"{reply.workload.tenant}/{reply.workload.name}"
    source = device_name(reply.source_node, reply.source_device, reply.source_stand_in)
    runs = source if reply.source_node else reply.source_region
    now = f", from {runs}" if runs else ", which runs nowhere yet"
    line(f"{reply.answer}: {name} to {to}{now if reply.estimates else ''}", "red" if reply.answer == "no" else "green")
    if reply.refusal.code and not (reply.bids or reply.estimates):
        line(f"  because {full_reason(reply.refusal)}", "red")
    if reply.bids:
        line("  what it would offer (nothing is held):")
        show_bids(reply.bids, wide=wide)
    for each in reply.estimates:
        _show(each, wide=wide)


def _show(one: operator_pb2.MoveEstimate, *, wide: bool) -> None:
    where = device_name(one.node, one.device, one.stand_in)
    line(f"  {one.answer}  {where}  {one.precision}  {one.provider}", "bold")
    for need in one.needs:
        line(f"    with {need.need}: {need.what}")
    if one.refusal.code:
        line(f"    because {reason(one.refusal)}", "red")
        if one.nearest:
            line(f"    would do with: {one.nearest}")
    if one.answer == "no" and not wide:
        return
    fetch = show_bytes(one.fetch_bytes) if one.fetch_bytes else "held there"
    both = f", {one.cost_of_both:.2g} USD while both run" if math.isfinite(one.cost_of_both) else ""
    load = estimate(one.load_s, show_seconds)
    load = "time unknown" if load == "-" else load
    line(f"    bytes {fetch}, load {load}{_transfer(one)}{both}")
    source, target = one.now if one.HasField("now") else None, one.then if one.HasField("then") else None
    rows: list[list[str | Cell]] = [
        ["p95 at the worker", _of(source, "latency_p95_s", show_seconds), _of(target, "latency_p95_s", show_seconds)],
        ["energy/inference", _energy(source), _energy(target)],
        ["cost", _cost(source), _cost(target)],
    ]
    table([Column(""), Column("NOW"), Column("THEN")], rows, wide=wide)
    if one.drift:
        bounds = ", ".join(f"{each.metric} {each.bound:g}" for each in one.drift)
        line(f"    a move is refused where answers differ by more than {bounds}", "dim")


def _transfer(one: operator_pb2.MoveEstimate) -> str:
    """The part of the load that the device's link takes, and by which figures; empty: unknown."""
    if not one.HasField("link") or not one.transfer_s > 0:
        return ""
    return f", of it at least {show_seconds(one.transfer_s)} over {link_text(one.link)}"


def _of(figures: operator_pb2.MoveFigures | None, name: str, show_one: Callable[[float], str]) -> Cell:
    return estimate_cell(getattr(figures, name), show_one) if figures is not None else Cell("-")


def _energy(figures: operator_pb2.MoveFigures | None) -> Cell:
    cell = _of(figures, "joules", show_joules)
    if figures is None or cell.text == "-":
        return cell
    source = f" ({figures.energy_source})"
    return Cell(cell.text + source, cell.short + source)


def _cost(figures: operator_pb2.MoveFigures | None) -> str:
    known = figures is not None and math.isfinite(figures.cost_usd_per_h)
    return show_usd_per_hour(figures.cost_usd_per_h) if figures is not None and known else "-"
