"""The demo on a terminal and in a pipe: width, bar, and who serves."""

import io
import math
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from shoal.cli.render.demo_screen import WIDTH, DemoScreen, progress_line, share_lines
from shoal.devstack.serving_shares import ServedCounts, ServingLook, ServingShare, shares_of
from shoal.v1 import nouns_pb2, operator_pb2

GPU = "cloud-gpu/nvidia-l4 (emulated)"
NPU = "edge-npu/qualcomm-ai100-dm2 (emulated)"
CPU = "plain-cpu/cpu0"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def look(at: float, **counts: ServedCounts) -> ServingLook:
    return ServingLook(at, counts)


def test_shares_are_of_what_was_served_between_two_looks() -> None:
    before = look(10.0, a=ServedCounts(GPU, 100, 2.0, 0.0003))
    now = look(12.0, a=ServedCounts(GPU, 130, 2.6, 0.0003), b=ServedCounts(NPU, 90, 0.9, 0.0009))
    gpu, npu = shares_of(before, now)
    assert (gpu.place, gpu.share, gpu.rate) == (GPU, 0.25, 15.0)
    assert (npu.place, npu.share, npu.rate) == (NPU, 0.75, 45.0)
    assert gpu.joules == pytest.approx(0.02)
    assert npu.joules == pytest.approx(0.01)


def test_a_worker_that_started_again_counts_from_0_and_one_that_served_nobody_has_no_joules() -> None:
    before = look(0.0, a=ServedCounts(GPU, 100, 2.0, 0.0003), b=ServedCounts(CPU, 5, 0.1, 0.01))
    now = look(1.0, a=ServedCounts(GPU, 10, 0.2, 0.0003), b=ServedCounts(CPU, 5, 0.1, 0.01))
    gpu, cpu = shares_of(before, now)
    assert (gpu.share, gpu.rate) == (1.0, 10.0)
    assert (cpu.share, cpu.rate) == (0.0, 0.0)
    assert math.isnan(cpu.joules)
    assert shares_of(now, now)[0].rate == 0.0, "no time between"


def test_who_serves_is_drawn_in_the_width_of_the_demo() -> None:
    long, idle = "edge-npu/" + "x" * 80, ServingShare(CPU, 1, 0, math.nan, math.nan)
    rows = share_lines((ServingShare(long, 0.25, 1234.5, 0.000885, 0.0194), idle))
    assert all(cell_len(each) <= WIDTH for each in rows)
    assert "25%" in rows[0]
    assert rows[1].count("█") == 20
    (narrow,) = share_lines((ServingShare(long, 0.25, 1234.5, 0.000885, 0.0194),), 80)
    assert cell_len(narrow) <= 80
    assert "19.4mJ" in narrow


def test_the_bar_is_full_before_the_chapter_that_goes_on() -> None:
    assert progress_line(1, 6, 0.0).count("━") < progress_line(6, 6, 61.0).count("━") < 30
    assert progress_line(6, 6, 61.0).endswith("6 of 6  1:01")


def tell(console: Console) -> None:
    """What a demo tells, with words that are far too long."""
    plan = operator_pb2.PlanReply()
    one = plan.workloads.add(workload=nouns_pb2.WorkloadKey(tenant="default", name="line-text"))
    one.candidates.add(node="edge-npu", device="qualcomm-ai100-dm2" * 5, stand_in="emulated", chosen=True)
    one.candidates.add(node="small", device="cpu0").refusal.code = "SELECTOR_MISMATCH"
    one.changes.add(sign="+", node="edge-npu", device="qualcomm-ai100-dm2")
    with DemoScreen(2, console) as screen:
        screen.chapter("A title of a chapter")
        screen.now("what goes on " * 20)
        screen.say("  " + "words that say much " * 20)
        screen.serving((ServingShare(NPU, 1.0, 50.0, 0.001, 0.01),))
        screen.plan(plan)
        screen.check("that something holds", True, "")
        screen.check("that something else does", False, "it does not " * 20)
        screen.chapter("Another chapter")


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_wraps_at_a_terminal_where_the_drawing_is_below_what_happened(width: int) -> None:
    out = io.StringIO()
    tell(Console(file=out, force_terminal=True, width=width, color_system=None, highlight=False))
    lines = [CONTROL.sub("", each) for each in re.split("[\r\n]", out.getvalue())]
    assert max(map(cell_len, lines)) <= width
    assert any(each.startswith("now: what goes on") for each in lines)
    assert any("━" in each and each.endswith("0:00") for each in lines)
    assert any("2/2  Another chapter" in each for each in lines)


def test_a_pipe_gets_what_happened_and_no_drawing() -> None:
    out = io.StringIO()
    tell(Console(file=out, width=400, highlight=False))
    lines = out.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= WIDTH
    assert "  ok    that something holds" in lines
    assert any("edge-npu" in each and "0 fit, 1 do not" in each for each in lines)
    assert not any("━" in each or "now:" in each for each in lines)
