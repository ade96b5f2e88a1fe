"""The demo on a terminal: what happened stays above, what happens now is drawn below it. A pipe gets what happened."""

import math
import textwrap
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shoal.cli.render.columns import Cell, Column
from shoal.cli.render.output import clean, table_text
from shoal.cli.render.resources import device_cell, place
from shoal.devstack.serving_shares import ServingShare
from shoal.types.units import show_joules, show_seconds, show_usd_per_hour
from shoal.v1 import operator_pb2

WIDTH: Final = 100
"""Characters of a line, at most."""
BAR: Final = 30
_SHARE_BAR: Final = (8, 20)
"""Characters of a share's bar on a narrow and on a wide terminal, and below of a place."""
_PLACE: Final = (30, 39)
_DRAWN_PER_S: Final = 4


class DemoScreen:
    """Tells the demo, as `shoal.devstack.demo.Narrator`. A context: the part that is drawn goes at its end."""

    def __init__(self, chapters: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._chapters = chapters
        self._began = time.monotonic()  # noqa: TID251 - shown to a person
        self._chapter = 0
        self._now = ""
        self._shares: tuple[ServingShare, ...] = ()
        self._live = Live(
            get_renderable=self._drawn, console=self._console, refresh_per_second=_DRAWN_PER_S, transient=True
        )

    @property
    def _width(self) -> int:
        return min(WIDTH, self._console.width) if self._console.is_terminal else WIDTH

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def chapter(self, title: str) -> None:
        self._chapter += 1
        self._now, self._shares = "", ()
        self._print("")
        self._print(f"{self._chapter}/{self._chapters}  {title}", "bold cyan")

    def say(self, text: str, style: str = "") -> None:
        self._print(text, style)

    def now(self, text: str) -> None:
        self._now = text
        self._draw()

    def check(self, name: str, ok: bool, found: str) -> None:
        if ok:
            self._print(f"  ok    {name}", "green")
        else:
            self._print(f"  FAIL  {name}: {found}", "bold red")

    def serving(self, shares: Sequence[ServingShare]) -> None:
        self._shares = tuple(shares)
        self._draw()

    def plan(self, plan: operator_pb2.PlanReply) -> None:
        rows = [_planned(one) for one in plan.workloads if _is_news(one)]
        columns: list[str | Column] = [
            "WORKLOAD", Column("GOES TO", least=12), Column("P95", right=True), Column("ENERGY", right=True),
            Column("COST", right=True), Column("OTHER PLACES", rank=1),
        ]  # fmt: skip
        for each in table_text(columns, rows, self._width - 2)[0].split("\n"):
            self._console.print(Text("  ") + each, soft_wrap=True)

    def migration(self, migration: operator_pb2.MigrationView) -> None:
        source, target = place(migration.source), place(migration.target)
        self._print(f"  {migration.workload.name}: {source} -> {target}, {migration.stage}")
        began = migration.stages[0].at
        took = ", ".join(f"{one.stage.replace('_', ' ')} {one.at - began:.1f}s" for one in migration.stages)
        self._print(f"  {took}", "dim")
        if migration.verdict.samples:
            worst = ", ".join(
                f"{one.metric} {one.worst:.4g} (bound {one.bound:.4g})" for one in migration.verdict.drifts
            )
            self._print(f"  {migration.verdict.samples} answers compared before it took a request: {worst}", "dim")

    def _draw(self) -> None:
        if self._live.is_started:
            self._live.refresh()

    def _drawn(self) -> Text:
        width = self._width
        lines = [*share_lines(self._shares, width), "", progress_line(self._chapter, self._chapters, self._elapsed_s())]
        lines.append(f"now: {self._now or '…'}")
        drawn = Text(no_wrap=True, overflow="ellipsis")
        for index, each in enumerate(lines):
            is_share = index < len(lines) - 3
            drawn.append(clean(each)[:width], "cyan" if is_share else "bold" if index == len(lines) - 2 else "")
            drawn.append("\n" if index < len(lines) - 1 else "")
        return drawn

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began  # noqa: TID251 - shown to a person

    def _print(self, text: str, style: str = "") -> None:
        indent = text[: len(text) - len(text.lstrip())]
        words = textwrap.fill(
            clean(text), self._width, subsequent_indent=f"{indent}    ", break_long_words=False, break_on_hyphens=False,
            drop_whitespace=True,
        )  # fmt: skip
        self._console.print(Text(words, style=style), soft_wrap=True)


class SilentDemo(DemoScreen):
    """For programs that want only the report."""

    def __init__(self) -> None:
        super().__init__(0, Console(quiet=True))


def share_lines(shares: Sequence[ServingShare], width: int = WIDTH) -> list[str]:
    """Who serves now: place, share as a bar, requests a second, p95 at the worker and joules of an inference."""
    wide, lines = width >= WIDTH, list[str]()
    cells, room = _SHARE_BAR[wide], _PLACE[wide]
    for each in shares:
        full = round(each.share * cells)
        bar = "█" * full + "░" * (cells - full)
        p95 = show_seconds(each.latency_p95_s) if math.isfinite(each.latency_p95_s) else "-"
        joules = show_joules(each.joules) if math.isfinite(each.joules) else "-"
        where = f"{each.place[: room - 1]}…" if len(each.place) > room else each.place
        lines.append(f"  {where:<{room}} {bar} {each.share:>4.0%} {each.rate:>5.1f}/s  p95 {p95:<7} {joules:>7}")
    return lines


def progress_line(chapter: int, chapters: int, elapsed_s: float) -> str:
    """A bar of the chapters: those before this one are full, this one is half."""
    full = round(BAR * max(0.0, chapter - 0.5) / chapters) if chapters else 0
    minutes, seconds = divmod(int(elapsed_s), 60)
    return f"{'━' * full}{'─' * (BAR - full)}  {chapter} of {chapters}  {minutes}:{seconds:02}"


def _is_news(one: operator_pb2.WorkloadPlan) -> bool:
    return bool(one.refusal.code) or any(change.sign != "=" for change in one.changes)


def _planned(one: operator_pb2.WorkloadPlan) -> list[str | Cell]:
    name = one.workload.name
    chosen = [each for each in one.candidates if each.chosen]
    others = [each for each in one.candidates if not each.chosen]
    out = [each.refusal.code for each in others if each.refusal.code]
    left = f"{len(others) - len(out)} fit, {len(out)} do not"
    if not chosen:
        return [name, f"nowhere: {one.refusal.code}", "", "", "", left]
    new = next((each for each in chosen if not each.current), chosen[0])
    figures = new.prediction
    joules = show_joules(figures.joules.mid) if math.isfinite(figures.joules.mid) else "-"
    return [
        name, device_cell(new.node, new.device, new.stand_in), show_seconds(figures.latency_p95_s.mid), joules,
        show_usd_per_hour(new.cost_usd_per_h), left,
    ]  # fmt: skip
