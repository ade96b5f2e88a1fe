"""What people see, as files: rewritten by `pytest --update-golden`."""

import errno
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shoal.cli.commands import apply, status, support
from shoal.cli.render import listings, resources
from shoal.cli.render import move as moves
from shoal.cli.render import plan as plans
from shoal.cli.render.data import as_data
from shoal.cli.render.description import show_description
from shoal.cli.render.resources import device_state, energy_text, time_cell, when
from shoal.types.codes import Code, ShoalError
from shoal.types.migration import UPGRADE_REMEDY
from shoal.types.units import (
    show_bytes,
    show_bytes_per_second,
    show_carbon,
    show_flops_per_second,
    show_joules,
    show_number,
    show_seconds,
    show_usd_per_hour,
    show_watts,
)
from shoal.v1 import federation_pb2, nouns_pb2, operator_pb2

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def agrees(name: str, text: str, request: pytest.FixtureRequest) -> None:
    path = GOLDEN / name
    seen = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if request.config.getoption("--update-golden"):
        path.write_text(seen)
    assert seen == path.read_text(), f"differs from {path}; if that is right: pytest --update-golden"


def estimate(mid: float) -> operator_pb2.Estimate:
    return operator_pb2.Estimate(low=mid * 0.8, mid=mid, high=mid * 1.3)


def example_plan() -> operator_pb2.PlanReply:
    prediction = operator_pb2.Prediction(
        latency_p50_s=estimate(0.0008),
        latency_p95_s=estimate(0.001),
        memory_bytes=estimate(64 * 2**20),
        load_s=estimate(0.2),
        joules=estimate(0.02),
        energy_source="profile",
        basis="guess",
    )
    terms = [operator_pb2.ScoreTerm(name="energy", weight=1, value=0.02, unit="J", normalised=0.0)]
    return operator_pb2.PlanReply(
        documents=[
            operator_pb2.DocumentChange(sign="~", kind="Policy", name="mild", lines=["~ replicas: 1 -> 2"])
        ],
        workloads=[
            operator_pb2.WorkloadPlan(
                workload=nouns_pb2.WorkloadKey(tenant="default", name="reader"),
                policy="frugal",
                wanted=2,
                placed=1,
                candidates=[
                    operator_pb2.Candidate(
                        node="edge-npu", device="npu0", precision="fp32", stand_in="emulated", chosen=True, score=0.1,
                        terms=terms, prediction=prediction, cost_usd_per_h=0.05, pareto=True,
                    ),
                    operator_pb2.Candidate(
                        node="old-box",
                        device="cpu0",
                        precision="fp32",
                        refusal=nouns_pb2.Refusal(code="MEMORY_SHORT", found="12MiB free", asked="64MiB"),
                        nearest="free 52MiB on old-box",
                    ),
                ],
                changes=[
                    operator_pb2.PlacementChange(
                        sign="+", node="edge-npu", device="npu0", precision="fp32", why="least energy"
                    )
                ],
                refusal=nouns_pb2.Refusal(code="REPLICAS_SHORT", found="1 device fits", asked="2 replicas"),
                nearest="replicas: 1",
            )
        ],
        hash="plan-0123456789ab",
        changes=True,
    )  # fmt: skip


def test_plan(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    plans.show_plan(example_plan(), wide=False)
    agrees("plan.txt", capsys.readouterr().out, request)


def test_a_plan_and_a_list_show_what_of_a_budget_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    budget = operator_pb2.TenantBudgetView(tenant="shop", limit=5.0, used=3.5)
    plans.show_plan(operator_pb2.PlanReply(budgets=[budget]), wide=False)
    assert "budget of shop: 3.5 of 5 USD/h\n" in capsys.readouterr().out
    budget.used, budget.unpriced, budget.exceeded = 6.25, 1, True
    row = operator_pb2.DocumentView(name="shop", tenant_quota=operator_pb2.TenantView(cost=5.0, budget=budget))
    row.applied_at = time.time() - 7200  # noqa: TID251 - as old as the command's own clock finds
    listings.show("tenants", [row], wide=False)
    assert "6.25 and 1 unpriced of 5 USD/h, exceeded" in (listed := capsys.readouterr().out)
    assert (listed.split()[-1], listed.splitlines()[0].split()[-1]) == ("2h", "AGE")


def test_plan_wide(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    plans.show_plan(example_plan(), wide=True)
    agrees("plan-wide.txt", capsys.readouterr().out, request)


def test_placements_say_what_is_emulated(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    row = operator_pb2.PlacementView(
        assignment=nouns_pb2.Assignment(
            id="a-1", workload=nouns_pb2.WorkloadKey(tenant="default", name="reader"), device="npu0", memory_bytes=2**26
        ),
        node="edge-npu",
        observed=nouns_pb2.Observed(
            phase="ready",
            measured=nouns_pb2.Measured(latency_p95_s=0.0011, samples=8, memory_bytes=2**26),
            served=[
                nouns_pb2.Served(
                    origin="gateway", requests=7, latency_p95_s=0.0012, joules=0.14, energy_source="profile"
                )
            ],
        ),
        stand_in="emulated",
        time_scale=300,
        routed=True,
    )
    listings.show("placements", [row], wide=False)
    agrees("placements.txt", capsys.readouterr().out, request)


def test_a_placement_whose_requests_were_all_refused_shows_what_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = operator_pb2.PlacementView(
        observed=nouns_pb2.Observed(
            phase="ready",
            measured=nouns_pb2.Measured(latency_p95_s=0.0011, samples=8),
            served=[nouns_pb2.Served(origin="gateway", requests=7, latency_p95_s=float("nan"))],
        )
    )
    listings.show("placements", [row], wide=False)
    assert " 1.1ms " in capsys.readouterr().out


def test_a_placement_says_why_it_stays_although_another_place_is_better(capsys: pytest.CaptureFixture[str]) -> None:
    row = operator_pb2.PlacementView(
        assignment=nouns_pb2.Assignment(workload=nouns_pb2.WorkloadKey(tenant="default", name="reader"), device="npu0"),
        node="edge-npu", observed=nouns_pb2.Observed(phase="ready"), routed=True,
        stays="stays: migration.when is not set, though cloud-gpu/gpu0 is better",
    )  # fmt: skip
    listings.show("placements", [row], wide=False)
    assert (
        capsys.readouterr().out.rstrip().endswith("stays: migration.when is not set, though cloud-gpu/gpu0 is better")
    )
    row.observed.code = "WORKER_CRASHED"
    listings.show("placements", [row], wide=False)
    assert "stays" not in capsys.readouterr().out


def signals() -> list[operator_pb2.SignalView]:
    return [
        operator_pb2.SignalView(
            name="price", value=0.4, unit="USD/h", source="./prices.csv", taken_at=1, why="./prices.csv, 3m ago"
        ),
        operator_pb2.SignalView(
            name="carbon", value=350, unit="gCO2/kWh", source="https://grid.example/eu.json", taken_at=1, stale=True,
            fallback=True, why="fallback: https://grid.example/eu.json is stale, 3h ago",
            refusal=nouns_pb2.Refusal(code="SOURCE_UNREACHABLE", found="answers with status 503"),
        ),
    ]  # fmt: skip


def test_regions_say_what_price_and_carbon_are_and_why(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9 + 7200)
    document = operator_pb2.DocumentView(kind="Region", name="eu-west", revision=2, applied_at=1e9, applied_by="ann")
    unknown = operator_pb2.SignalView(name="carbon", value=float("nan"), unit="gCO2/kWh", why="nobody says")
    rows = [
        operator_pb2.RegionView(name="eu-west", document=document, signals=signals()),
        operator_pb2.RegionView(name="eu-east", signals=[unknown]),
    ]
    listings.show("regions", rows, wide=True)
    agrees("regions.txt", capsys.readouterr().out, request)


def test_a_plan_says_what_costs_were_computed_with(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    plans.show_plan(operator_pb2.PlanReply(signals=signals(), hash="plan-0123456789ab"), wide=False)
    agrees("plan-signals.txt", capsys.readouterr().out, request)


def test_a_plan_shows_what_others_would_offer(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    key = nouns_pb2.WorkloadKey(tenant="default", name="detect")
    refusal = nouns_pb2.Refusal(code="NO_CANDIDATE", found="no device fits", asked="one")
    offer = federation_pb2.Offer(
        id="bid-1", region="eu-east", precision="fp16", replicas=1, latency_p95_s=0.012, cost=0.4, joules=0.8,
        energy_source="profile", load_s=1.5, cached=True, stand_in="emulated", residency="eu",
    )  # fmt: skip
    slow = federation_pb2.Offer(
        id="bid-2", region="us-west", precision="fp32", replicas=2, latency_p95_s=0.05, cost=float("nan"),
        joules=float("nan"), load_s=4.0, changes=["latency: {p95: 130ms}"],
    )  # fmt: skip
    denied = nouns_pb2.Refusal(code="TRADE_DENIED", found="takes no work of home", asked="an entry of its `trade`")
    nan = float("nan")
    workload = operator_pb2.WorkloadPlan(
        workload=key, policy="burst", wanted=1, refusal=refusal, delegate="when-infeasible",
        bids=[
            operator_pb2.BidView(region="eu-east", offer=offer, latency_p95_s=0.03, way_s=0.018, trust=1, gain=nan,
                                 chosen=True),
            operator_pb2.BidView(region="us-west", offer=slow, latency_p95_s=0.13, way_s=0.08, trust=0.5, gain=nan,
                                 refusal=nouns_pb2.Refusal(code="SLO_UNREACHABLE", found="p95 130ms")),
            operator_pb2.BidView(region="ap", latency_p95_s=nan, way_s=nan, trust=1, gain=nan, refusal=denied),
        ],
    )  # fmt: skip
    runs = operator_pb2.WorkloadPlan(workload=key, delegate="when-better", delegated_to="eu-east", agreement="g-1")
    joined = nouns_pb2.Refusal(code="FEDERATION_UNREACHABLE", found="in no federation", remedy="join one")
    alone = operator_pb2.WorkloadPlan(workload=key, delegate="when-better", undelegated=joined)
    part = operator_pb2.WorkloadPlan(
        workload=key, placed=1, wanted=1, delegate="when-better", delegated_to="eu-east", agreement="g-1"
    )  # it leaves home, or comes back
    for plan in (workload, runs, part, alone):
        plans.show_workload(plan, wide=plan is workload)
    agrees("plan-elsewhere.txt", capsys.readouterr().out, request)


def test_data_has_numbers_times_and_null_for_what_is_unknown() -> None:
    event = operator_pb2.Event(sequence=2**40, at=1_700_000_000.5, code="X")
    data = as_data(event)
    assert data["sequence"] == 2**40
    assert data["at"] == "2023-11-14T22:13:20.500+00:00"
    assert data["workload"] is None
    node = operator_pb2.NodeView(node=nouns_pb2.Node(labels={"site": "hall"}, devices=[nouns_pb2.Device(name="cpu0")]))
    data = as_data(node)
    assert data["last_seen"] is None
    assert data["node"]["labels"] == {"site": "hall"}
    assert data["node"]["devices"][0]["name"] == "cpu0"
    assert as_data(nouns_pb2.Reading(power_w=float("nan")))["power_w"] is None


def test_nothing_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    listings.show("nodes", [], wide=False)
    assert capsys.readouterr().out == "nothing to show\n"


def test_hostile_names_reach_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    row = operator_pb2.DocumentView(name="\x1b[31mred\x1b]0;title\x07", applied_by="[bold]me[/bold]")
    listings.show("policies", [row], wide=False)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]me[/bold]" in text


def test_can_move(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> None:
    now = operator_pb2.MoveFigures(
        latency_p95_s=estimate(0.004), joules=estimate(5.8), energy_source="profile", cost_usd_per_h=2.5
    )
    then = operator_pb2.MoveFigures(
        latency_p95_s=estimate(0.011), joules=estimate(0.27), energy_source="profile", cost_usd_per_h=math.nan
    )
    reply = operator_pb2.CanMoveReply(
        workload=nouns_pb2.WorkloadKey(tenant="default", name="reader"),
        answer="yes-with",
        source_node="cloud-gpu",
        source_device="gpu0",
        estimates=[
            operator_pb2.MoveEstimate(
                node="edge-npu", device="npu0", stand_in="emulated", precision="int8", provider="OpenVINO",
                answer="yes-with",
                needs=[
                    operator_pb2.MoveNeed(need="rebuild", what="OpenVINO prepares it anew, CUDA ran it"),
                    operator_pb2.MoveNeed(need="precision", what="the int8 variant, fp32 runs now"),
                ],
                fetch_bytes=10 * 2**20, load_s=estimate(0.8), now=now, then=then, cost_of_both=0.0031,
                drift=[nouns_pb2.Tolerance(metric="cosine", bound=0.99)],
            ),
            operator_pb2.MoveEstimate(
                node="edge-npu", device="npu1", stand_in="emulated", precision="fp32", provider="OpenVINO", answer="no",
                refusal=nouns_pb2.Refusal(code="MEMORY_SHORT", found="3 MiB free on edge-npu/npu1", asked="64 MiB"),
                nearest="free 61 MiB on edge-npu/npu1",
            ),
        ],
    )  # fmt: skip
    moves.show_prospect(reply, "edge-npu", wide=False)
    agrees("can-move.txt", capsys.readouterr().out, request)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (show_bytes(1023 * 2**10), "1023KiB"),
        (show_bytes(999.6 * 2**20), "1000MiB"),
        (show_bytes(2**20), "1MiB"),
        (show_seconds(0.9996), "1000ms"),
        (show_joules(0.9996), "1000mJ"),
        (show_flops_per_second(999.7e9), "1000 GFLOP/s"),
        (show_bytes(3.456 * 2**30), "3.46GiB"),
        (show_seconds(9.996e-7), "1000ns"),
        (show_bytes_per_second(999.7), "1000B/s"),
        (show_flops_per_second(999.7), "1000 FLOP/s"),
        (show_joules(9.9971e-4), "1000uJ"),
        (show_joules(1e-12), "0.000001uJ"),
        (show_watts(1234.5), "1234W"),
        (show_carbon(0.00002), "0.00002 gCO2/h"),
        (show_usd_per_hour(123456.0), "123456 USD/h"),
        (show_usd_per_hour(9999.7), "10000 USD/h"),
        (show_usd_per_hour(1e-7), "0.0000001 USD/h"),
        (show_usd_per_hour(0.12345), "0.1235 USD/h"),
        (show_number(-1e-12), "0"),
        (show_number(9.996e14), "999600000000000"),
        (show_number(-3.4028e38), "-3.4e+38"),
        (show_number(math.nan), "nan"),
        (show_number(-math.inf), "-inf"),
    ],
)
def test_a_figure_has_three_digits_and_no_exponent(text: str, expected: str) -> None:
    """Before: 1.02e+03KiB, 1e+03ns and 1.235e+05 USD/h."""
    assert text == expected


def test_a_region_is_a_place_without_a_device() -> None:
    """Before, it was listed as `away/`."""
    place = operator_pb2.MigrationPlace(assignment="g-1", node="away", region="away")
    assert resources.place(place) == "away"


def test_a_policy_is_described_by_what_it_says_and_who_uses_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Before: its revision alone."""
    text = '{"apiVersion":"shoal/v1","kind":"Policy","metadata":{"name":"p"},"spec":{"optimize":{"latency":1.0}}}'
    user = operator_pb2.WorkloadView(state="ready", policy="p")
    user.workload.tenant, user.workload.name = "default", "reader"
    row = operator_pb2.DocumentView(kind="Policy", name="p", revision=3, applied_by="ann", text=text)
    show_description("policies", row, [], (("workloads", [user]),))
    said = capsys.readouterr().out
    assert "DOCUMENT\napiVersion: shoal/v1\nkind: Policy\n" in said
    assert "  optimize:\n    latency: 1.0\n" in said
    assert "WORKLOADS\n" in said
    assert "default/reader" in said


def test_a_support_bundle_that_finds_no_room_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the part of it that was written was in the way of the next try."""

    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(support, "connect", lambda *_: nullcontext())
    monkeypatch.setattr(support, "_bundle_files", lambda *_, **__: iter([("doctor.json", "{}")]))
    monkeypatch.setattr(support, "_add", fill)
    done = CliRunner().invoke(support.support_bundle, [str(tmp_path / "eu.tar.gz")])
    assert isinstance(done.exception, ShoalError)
    assert done.exception.code is Code.DISK_FULL
    assert "eu.tar.gz: No space left" in done.exception.refusal.found
    assert not list(tmp_path.iterdir())


def test_an_event_says_who_did_it_unless_nobody_asked() -> None:
    event = operator_pb2.Event(at=1.0, code="DRAINING", subject="reader", actor="coordinator")
    assert resources.event_line(event) == "1970-01-01 00:00:01Z  DRAINING  reader"
    event.actor, event.message = "shoal://eu/operator/ann", "revision 2"
    assert resources.event_line(event).endswith("  reader  revision 2 by shoal://eu/operator/ann")


def test_what_is_asked_to_go_is_not_unwell() -> None:
    """Before, `shoal status` failed for as long as a deletion took."""
    views = [operator_pb2.WorkloadView(state=state) for state in ("ready", "deleting", "pending")]
    for each in views:
        each.workload.tenant, each.workload.name = "default", each.state
    found = {"nodes": [], "devices": [], "workloads": views}
    assert [what for what, _ in status.unwell(found)] == ["workload default/pending"]


def test_while_a_replica_is_replaced_none_is_ready_beyond_those_asked_for() -> None:
    """Before: `2 of 1 ready`, and `no reason given yet`."""
    view = operator_pb2.WorkloadView(state="progressing", ready=2, wanted=1)
    view.workload.tenant, view.workload.name = "default", "reader"
    assert apply.describe_wait(view) == "default/reader is progressing, 1 of 1 ready and 1 more"
    view.ready = 0
    view.reason.code, view.reason.found = "WAITING_FOR_LOAD", "loading the model"
    assert apply.describe_wait(view) == (
        "default/reader is progressing, 0 of 1 ready: WAITING_FOR_LOAD loading the model"
    )


def test_can_move_says_why_not_where_there_is_no_place_to_list(capsys: pytest.CaptureFixture[str]) -> None:
    refusal = nouns_pb2.Refusal(code="NOT_FOUND", found="away has default/reader", remedy="bring it home first")
    key = nouns_pb2.WorkloadKey(tenant="default", name="reader")
    reply = operator_pb2.CanMoveReply(workload=key, answer="no", source_region="away", refusal=refusal)
    moves.show_prospect(reply, "edge-npu", wide=False)
    said = capsys.readouterr().out
    assert said == (
        "no: default/reader to edge-npu\n  because NOT_FOUND away has default/reader; try: bring it home first\n"
    )
    unknown = operator_pb2.Estimate(low=math.nan, mid=math.nan, high=math.nan)
    held = operator_pb2.MoveEstimate(
        node="edge-npu", device="npu0", answer="yes", load_s=unknown, cost_of_both=math.nan
    )
    reply = operator_pb2.CanMoveReply(workload=key, answer="yes", source_region="away", estimates=[held])
    moves.show_prospect(reply, "home", wide=False)
    said = capsys.readouterr().out
    assert said.startswith("yes: default/reader to home, from away\n")
    assert "bytes held there, load time unknown\n" in said


def test_a_plan_says_that_another_model_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    plan = example_plan()
    plan.workloads[0].compared_with.append("sha256:0123")
    plans.show_plan(plan, wide=False)
    said = capsys.readouterr().out
    assert "compared before it takes requests, with what serves: sha256:0123" in said
    remedy = f"answers that differ are refused (VERIFY_FAILED); {UPGRADE_REMEDY}"
    assert remedy in " ".join(said.split()), "as the refusal says after it"


def test_f50_nodes_say_that_a_front_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    seen = nouns_pb2.Version(generation=3)
    rows = [
        operator_pb2.NodeView(node=nouns_pb2.Node(name=name), liveness="ready", observed=seen, front_ready=ready)
        for name, ready in (("up", True), ("hung", False))
    ]
    listings.show("nodes", rows, wide=False)
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert "ready, front down" in lines["hung"]
    assert "front down" not in lines["up"]


def test_a_plan_shows_what_changes_and_counts_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    plan = example_plan()
    stays = operator_pb2.PlacementChange(sign="=", node="edge", device="npu0", why="stays")
    for name, policy in (("still", "other"), ("users", "mild")):
        key = nouns_pb2.WorkloadKey(tenant="default", name=name)
        plan.workloads.append(operator_pb2.WorkloadPlan(workload=key, policy=policy, changes=[stays]))
    plans.show_plan(plan, wide=False)
    said = capsys.readouterr().out
    assert "default/reader  1 of 2 placed" in said
    assert "default/users  " in said, "its policy changes"
    assert "default/still" not in said
    assert "1 workload without a change" in said
    plans.show_plan(plan, wide=True)
    assert "default/still" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "state"), [(Code.SCALED_TO_ZERO, "idle"), (Code.WAITING_FOR_WAKE, "waking"), ("", "ready")]
)
def test_what_is_ready_and_not_loaded_is_listed_as_idle(code: str, state: str) -> None:
    why = nouns_pb2.Refusal(code=code, found="no request for 600s; the next one waits 1.2s")
    workload = operator_pb2.WorkloadView(state="ready", reason=why)
    placement = operator_pb2.PlacementView(observed=nouns_pb2.Observed(phase="ready", code=code))
    cells = {each.name: listings.text_of(each.cell(workload)) for each in listings.COLUMNS["workloads"]}
    assert cells["STATE"] == state
    cells = {each.name: listings.text_of(each.cell(placement)) for each in listings.COLUMNS["placements"]}
    assert cells["PHASE"] == state


def test_a_workload_is_as_old_as_what_was_applied_last() -> None:
    """An older coordinator says since when it waits, and not when it was applied."""
    now = time.time()  # noqa: TID251 - the command takes its own clock
    ages = [
        listings.text_of(each.cell(operator_pb2.WorkloadView(state="pending", applied_at=applied_at, since=since)))
        for applied_at, since in ((now - 7200, now - 300), (now - 7200, 0.0), (0.0, now - 300), (0.0, 0.0))
        for each in listings.COLUMNS["workloads"]
        if each.name == "AGE"
    ]
    assert ages == ["2h", "2h", "5m", "-"]


@pytest.mark.parametrize("stamp", [math.nan, math.inf, -math.inf, 1e300, -1e300, -1.0, 0.0])
def test_what_is_no_time_is_shown_as_none(stamp: float) -> None:
    """Some of these a node has told."""
    assert when(stamp) == resources.age(stamp) == "-"
    assert listings.text_of(time_cell(stamp)) == "-"
    assert as_data(operator_pb2.PlacementView(observed=nouns_pb2.Observed(since=stamp)))["observed"]["since"] is None
    assert device_state(operator_pb2.DeviceView(liveness="ready", reason=nouns_pb2.Refusal(code="X"), since=stamp)) == (
        "silent"
    )


@pytest.mark.parametrize(
    ("kind", "of", "word"),
    [
        ("nodes", lambda at: operator_pb2.NodeView(node=nouns_pb2.Node(name="edge"), joined_at=at), "joined"),
        ("tokens", lambda at: operator_pb2.TokenView(id="0123456789ab", created_at=at), "made"),
        ("agreements", lambda at: operator_pb2.AgreementView(agreement="g-1", agreed_at=at), "agreed"),
    ],
)
def test_a_listing_and_a_description_say_since_when(
    kind: str, of: Callable[[float], Any], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    at = time.time() - 7200  # noqa: TID251 - the command takes its own clock
    for stamp, age, described in ((at, "2h", f"  {word}: 2h ago, {when(at)}\n"), (0.0, "-", "")):
        headings = [each.name for each in listings.columns_of(kind, wide=True)]
        row = dict(zip(headings, map(listings.text_of, listings.cells_of(kind, of(stamp), wide=True)), strict=True))
        assert (row["AGE"], row[word.upper()]) == (age, when(stamp))
        assert "AGE" in (each.name for each in listings.columns_of(kind, wide=False))
        show_description(kind, of(stamp), [], ())
        said = capsys.readouterr().out
        assert described in said
        assert (f"{word}:" in said) == bool(stamp), "and nowhere else"
        assert "age:" not in said


def test_a_workload_without_a_place_says_what_other_regions_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """`explain` asks them again: without that, it shows what came of it last."""
    key = nouns_pb2.WorkloadKey(tenant="default", name="reader")
    over = nouns_pb2.Refusal(code="COST_OVER", found="0.6 USD/h", asked="at most 0.5 USD/h")
    answer = operator_pb2.RegionAnswer(region="us-east", refusal=over)
    view = operator_pb2.WorkloadView(workload=key, state="pending", wanted=1, elsewhere=[answer])
    said = "us-east: COST_OVER 0.6 USD/h, wanted at most 0.5 USD/h"
    show_description("workloads", view, [], ())
    described = capsys.readouterr().out
    assert "OTHER REGIONS" in described
    assert said in described
    plan = operator_pb2.WorkloadPlan(workload=key, wanted=1)
    plans.show_explanation(operator_pb2.ExplainReply(workload=view, plan=plan), wide=False)
    assert said in capsys.readouterr().out
    plan.bids.add(region="us-east", refusal=over)
    plans.show_explanation(operator_pb2.ExplainReply(workload=view, plan=plan), wide=False)
    explained = capsys.readouterr().out
    assert said not in explained
    assert "COST_OVER 0.6 USD/h" in explained


def test_a_delegated_workload_says_who_runs_it_since_when_and_where_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    key = nouns_pb2.WorkloadKey(tenant="default", name="reader")
    view = operator_pb2.WorkloadView(workload=key, state="ready", wanted=1, ready=1)
    view.reason.code, view.reason.found, view.reason.asked = "DELEGATED", "cloud runs it", "g-1"
    plan = operator_pb2.WorkloadPlan(
        workload=key, delegate="when-better", delegated_to="cloud", agreement="g-1", policy="cheap"
    )
    reply = operator_pb2.ExplainReply(workload=view, plan=plan)
    plans.show_explanation(reply, wide=False)
    steps = [federation_pb2.LedgerEntry(what=what, at=at) for what, at in (("awarded", 60.0), ("renewed", 120.0))]
    plans.show_delegation(reply, steps)
    said = capsys.readouterr().out
    assert "nothing to show" not in said
    assert "no replica is assigned" not in said, "it has some, elsewhere"
    assert "DELEGATED to cloud under agreement g-1" in said
    assert "cloud runs it, under agreement g-1, since 1970-01-01 00:01:00Z" in said
    assert "shoal explain g-1 --tenant guests" in said
    plans.show_delegation(reply, steps[1:])
    assert "since before 1970-01-01 00:02:00Z" in capsys.readouterr().out, "older steps are no longer listed"
    view.reason.code = "NODE_LOST"
    plans.show_delegation(operator_pb2.ExplainReply(workload=view, plan=plan), ())
    assert "cloud has it until its notice ends, under agreement g-1: " in capsys.readouterr().out


def test_a_workload_without_a_replica_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    key = nouns_pb2.WorkloadKey(tenant="default", name="reader")
    view, plan = operator_pb2.WorkloadView(workload=key, state="pending"), operator_pb2.WorkloadPlan(workload=key)
    plans.show_explanation(operator_pb2.ExplainReply(workload=view, plan=plan), wide=False)
    said = capsys.readouterr().out
    assert "nothing to show" not in said
    assert "no replica is assigned in this region" in said


def test_energy_that_nothing_counted_has_its_range() -> None:
    assert energy_text(0.5, "measured") == "500mJ (measured)"
    assert energy_text(0.5, "estimated") == "500mJ [235mJ..895mJ] (estimated)"
