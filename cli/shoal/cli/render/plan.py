"""Plans, explanations and problems for people."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import click

from shoal.cli.render.columns import Cell, Column
from shoal.cli.render.data import as_data
from shoal.cli.render.listings import show
from shoal.cli.render.output import emit, line, show_refusal, table
from shoal.cli.render.resources import (
    device_cell,
    device_name,
    energy_text,
    estimate,
    estimate_cell,
    full_reason,
    place,
    reason,
    reason_cell,
    region_name,
    requested_target,
    show_budget,
    show_signals,
    when,
)
from shoal.cli.render.styles import SIGNS, state
from shoal.policies import Problem
from shoal.types.agreement import GUEST_TENANT
from shoal.types.codes import Code, Refusal
from shoal.types.device import EnergySource
from shoal.types.migration import UPGRADE_REMEDY
from shoal.types.units import show_bytes, show_gain, show_joules, show_seconds, show_usd_per_hour
from shoal.v1 import federation_pb2, operator_pb2


def problems_of(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Problems in the same shape as those of the API."""
    return [
        {
            "document": one.document,
            "line": one.line,
            "column": one.column,
            "refusal": {
                "code": str(one.refusal.code),
                "found": one.refusal.found,
                "asked": one.refusal.asked,
                "remedy": one.refusal.remedy,
            },
        }
        for one in problems
    ]


def show_problems(problems: Iterable[dict[str, Any]], *, stderr: bool = False) -> None:
    """Each with file:line:column, in a pipe `file:line:column: found: ..; wanted: ..; try: .. (CODE)`."""
    for one in problems:
        refusal = one["refusal"]
        said = Refusal(Code(refusal["code"]), refusal["found"], refusal["asked"], refusal["remedy"])
        show_refusal(said, place=f"{one['document']}:{one['line']}:{one['column']}", stderr=stderr)


def refuse_problems(problems: Iterable[Problem], output: str) -> None:
    """Show the problems that files have by themselves, if there are any. Raises Exit(255) then."""
    found = problems_of(problems)
    if not found:
        return
    if output in ("json", "yaml"):
        emit({"problems": found}, output)
    else:
        show_problems(found, stderr=True)
    raise click.exceptions.Exit(255)


def show_plan(plan: operator_pb2.PlanReply, *, wide: bool) -> None:
    show_problems((as_data(problem) for problem in plan.problems), stderr=True)
    if plan.problems:
        return
    for change in plan.documents:
        line(f"{change.sign} {change.kind} {change.name}", SIGNS.get(change.sign, ""))
        for text in change.lines:
            line(f"    {text}", SIGNS.get(text[:1], ""))
    shown = [workload for workload in plan.workloads if wide or _says_something(workload, plan.documents)]
    for workload in shown:
        show_workload(workload, wide=wide)
    if unchanged := len(plan.workloads) - len(shown):
        line(f"{unchanged} workload{'s' * (unchanged != 1)} without a change (-o wide shows them)", "dim")
    show_signals(plan.signals)
    for budget in plan.budgets:
        line(f"budget of {budget.tenant}: {show_budget(budget)}", "yellow" if budget.exceeded else "")
    if not plan.changes:
        line("nothing to do")
    line(summary(plan), "bold")
    if plan.hash:
        line(f"plan {plan.hash}")


def _says_something(plan: operator_pb2.WorkloadPlan, documents: Iterable[operator_pb2.DocumentChange]) -> bool:
    """Whether anything about the workload changes, or is not as it should be."""
    named = {(change.kind, change.name) for change in documents}
    key = f"{plan.workload.tenant}/{plan.workload.name}"
    return bool(
        plan.refusal.code
        or plan.no_standby.code
        or plan.bids
        or any(change.sign != "=" for change in plan.changes)
        or ("Workload", key) in named
        or ("Policy", plan.policy) in named
    )


def report_plan(plan: operator_pb2.PlanReply, output: str) -> None:
    """In the form that was asked for."""
    if output in ("json", "yaml"):
        emit(as_data(plan), output)
    else:
        show_plan(plan, wide=output == "wide")


def summary(plan: operator_pb2.PlanReply) -> str:
    """Count documents by change, workloads without a placement, and replicas that start and stop."""
    signs = Counter(change.sign for change in plan.documents)
    parts = [f"{signs[sign]} {what}" for sign, what in (("+", "to add"), ("~", "to change"), ("-", "to delete"))]
    if missing := sum(bool(workload.refusal.code) for workload in plan.workloads):
        parts.append(f"{missing} cannot be placed")
    replicas = Counter(change.sign for workload in plan.workloads for change in workload.changes)
    moves = " ".join(f"{sign}{replicas[sign]}" for sign in "+-" if replicas[sign])
    return f"Plan: {', '.join(parts)}" + (f"; replicas {moves}" if moves else "")


def show_workload(plan: operator_pb2.WorkloadPlan, *, wide: bool) -> None:
    """Candidates best first, the chosen ones marked; then what changes and why."""
    name = f"{plan.workload.tenant}/{plan.workload.name}"
    where = f"{plan.placed} of {plan.wanted} placed"
    if plan.delegated_to and not plan.wanted:  # nothing is wanted here
        where = f"DELEGATED to {plan.delegated_to} under agreement {plan.agreement}"
    line(f"{name}  {where}" + (f"  policy {plan.policy}" if plan.policy else ""), "bold")
    columns = [*_CANDIDATE, *(_CANDIDATE_WIDE if wide else ())]
    if plan.candidates:
        rows = [_candidate(candidate)[: len(columns)] for candidate in plan.candidates]
        table(columns, rows, wide=wide)
    for change in plan.changes:
        where = device_name(change.node, change.device, change.stand_in)
        line(f"  {change.sign} {where} {change.precision}  {change.why}", SIGNS.get(change.sign, ""))
    for digest in plan.compared_with:
        line(f"  compared before it takes requests, with what serves: {digest}")
        line(f"    answers that differ are refused (VERIFY_FAILED); {UPGRADE_REMEDY}")
    if plan.relaxed:
        line(f"  relaxed: {'; '.join(plan.relaxed)}", "yellow")
    if plan.refusal.code:
        line(f"  not placed: {reason(plan.refusal)}", "red")
        if plan.nearest:
            line(f"  would fit: {plan.nearest}")
    if plan.no_standby.code:
        line(f"  no standby: {reason(plan.no_standby)}", "yellow")
    _show_delegation(plan, wide=wide)


def _show_delegation(plan: operator_pb2.WorkloadPlan, *, wide: bool) -> None:
    """Which region runs the workload, or what other regions would offer."""
    if plan.delegated_to:
        line(f"  delegate: {plan.delegate}  {plan.delegated_to} runs it, agreement {plan.agreement}")
        return
    if plan.bids:
        line(f"  delegate: {plan.delegate}  others would offer (nothing is held):")
        show_bids(plan.bids, wide=wide)
    if plan.undelegated.code:
        line(f"  not delegated: {full_reason(plan.undelegated)}")


def show_elsewhere(answers: Iterable[operator_pb2.RegionAnswer]) -> None:
    """What came of asking each other region last."""
    for each in answers:
        line(f"  {each.region}: {reason(each.refusal)}", "yellow")


def show_bids(bids: Iterable[operator_pb2.BidView], *, wide: bool) -> None:
    columns = [*_BID, *(_BID_WIDE if wide else ())]
    table(columns, [_bid(bid)[: len(columns)] for bid in bids], wide=wide)


_BID: Final = (
    Column(""),
    Column("REGION", least=12),
    Column("P95 HERE", rank=2),
    Column("PRICE", rank=3),
    Column("ENERGY", rank=4),
    Column("REPLICAS", rank=6, right=True),
    Column("LOAD", rank=7),
    Column("GAIN", rank=5),
    Column("WHY NOT", rank=1),
)
_BID_WIDE: Final = ("PROMISED", "WAY", "TRUST", "PRECISION", "CACHED", "RESIDENCY", "NEEDS")


def _bid(bid: operator_pb2.BidView) -> list[str | Cell]:
    offer = bid.offer
    if not offer.id:
        return ["", bid.region, *["-"] * 6, reason_cell(bid.refusal), *["-"] * 7]
    return [
        state("WOULD WIN" if bid.chosen else ""),
        region_name(bid.region, offer.stand_in),
        show_seconds(bid.latency_p95_s) if math.isfinite(bid.latency_p95_s) else "-",
        show_usd_per_hour(offer.cost) if math.isfinite(offer.cost) else "-",
        energy_text(offer.joules, offer.energy_source) if math.isfinite(offer.joules) else "-",
        str(offer.replicas),
        show_seconds(offer.load_s) if math.isfinite(offer.load_s) else "-",
        show_gain(bid.gain) if math.isfinite(bid.gain) else "-",
        reason_cell(bid.refusal),
        show_seconds(offer.latency_p95_s),
        show_seconds(bid.way_s) if math.isfinite(bid.way_s) else "-",
        f"{bid.trust:.2f}",
        offer.precision,
        "yes" if offer.cached else "no",
        offer.residency or "-",
        "; ".join(offer.changes),
    ]


def show_explanation(reply: operator_pb2.ExplainReply, *, wide: bool) -> None:
    view = reply.workload
    line(f"{view.workload.tenant}/{view.workload.name} is {view.state}, {view.ready} of {view.wanted} ready", "bold")
    if view.reason.code:
        line(f"  {full_reason(view.reason)}")
    if not reply.plan.bids:  # else they are asked again below
        show_elsewhere(view.elsewhere)
    show_workload(reply.plan, wide=wide)
    show_signals(reply.signals)
    if reply.placements:
        show("placements", reply.placements, wide=wide)
    elif not reply.plan.delegated_to:
        line("  no replica is assigned in this region")
    for each in reply.move_holds:
        until = f", until {when(each.until)}" if each.until else ""
        to = f" to {requested_target(each)}" if each.to else ""
        source = f"{each.source.assignment} from {place(each.source)}"
        line(f"  no move of {source}{to} ({each.cause}: {each.why}): {each.hold}, {each.found}{until}")
        if each.remedy:
            line(f"    {each.remedy}")


def show_delegation(reply: operator_pb2.ExplainReply, steps: Sequence[federation_pb2.LedgerEntry]) -> None:
    """Who runs a delegated workload, since when, and where to ask on. steps: of its agreement, oldest first; the first
    ones may be missing."""
    plan, why = reply.plan, reply.workload.reason
    region, agreement = plan.delegated_to, plan.agreement
    does = why.found if why.code == Code.DELEGATED else f"{region} has it until its notice ends"
    since = ""
    if steps:
        since = f", since {'' if steps[0].what in _FIRST_STEPS else 'before '}{when(steps[0].at)}"
    line(f"  {does}, under agreement {agreement}{since}: its candidates and replicas are known there")
    line(f"  ask there, in a context of {region}: shoal explain {agreement} --tenant {GUEST_TENANT}")
    line(f"  ask here: shoal get agreements {agreement}; shoal federation ledger {agreement}")


_FIRST_STEPS: Final = ("awarded", "granted")
"""Of an agreement, in the origin's ledger."""


_CANDIDATE: Final = (
    Column(""),
    Column("DEVICE", least=14),
    Column("PRECISION", rank=5),
    Column("P95", rank=2),
    Column("MEMORY", rank=6, right=True),
    Column("ENERGY", rank=3),
    Column("COST", rank=4),
    Column("SCORE", rank=7, right=True),
    Column("WHY NOT", rank=1),
)
_CANDIDATE_WIDE: Final = ("PREFER", "TERMS", "LOAD", "BASIS", "PARETO", "NEAREST")


def _energy(prediction: operator_pb2.Prediction) -> str | Cell:
    """With its range where that is no small one: an estimate of power that nothing counted."""
    short = f"{show_joules(prediction.joules.mid)} ({prediction.energy_source})"
    if prediction.energy_source != EnergySource.ESTIMATED:
        return short
    return Cell(f"{estimate(prediction.joules, show_joules)} ({prediction.energy_source})", short)


def _candidate(one: operator_pb2.Candidate) -> list[str | Cell]:
    feasible = not one.refusal.code
    prediction = one.prediction
    known = prediction.latency_p95_s.mid > 0
    terms = " ".join(f"{term.name} {term.weight:g}x{term.normalised:.2f}" for term in one.terms)
    return [
        state("CHOSEN" if one.chosen else "STANDBY" if one.standby else "current" if one.current else ""),
        device_cell(one.node, one.device, one.stand_in),
        one.precision,
        estimate_cell(prediction.latency_p95_s, show_seconds) if known else "-",
        show_bytes(prediction.memory_bytes.mid) if known else "-",
        _energy(prediction) if known else "-",
        show_usd_per_hour(one.cost_usd_per_h),
        f"{one.score:.3f}" if feasible else "-",
        reason_cell(one.refusal) if not feasible else "",
        str(one.preference) if one.preference else "",
        terms,
        estimate(prediction.load_s, show_seconds) if known else "-",
        prediction.basis,
        "yes" if one.pareto else "",
        one.nearest,
    ]
