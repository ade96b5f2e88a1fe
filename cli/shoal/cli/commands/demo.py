"""`shoal demo`: the whole demo on this machine, in about two minutes."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from shoal.cli.commands.dev import link, show_up
from shoal.cli.render.listings import show
from shoal.cli.render.migrations import show_migration
from shoal.cli.render.output import emit, line
from shoal.cli.render.plan import show_plan
from shoal.client import Contexts
from shoal.devstack.control import Control
from shoal.devstack.layout import StackOptions
from shoal.v1 import operator_pb2


class _TerminalNarrator:
    """For a person at a terminal."""

    def section(self, title: str) -> None:
        line("")
        line(title, "bold cyan")

    def say(self, text: str) -> None:
        line(text)

    def plan(self, plan: operator_pb2.PlanReply) -> None:
        show_plan(plan, wide=False)

    def placements(self, rows: Sequence[operator_pb2.PlacementView]) -> None:
        show("placements", rows, wide=False)

    def migration(self, migration: operator_pb2.MigrationView) -> None:
        show_migration(migration)


class _SilentNarrator(_TerminalNarrator):
    """For programs that want only the report."""

    def section(self, title: str) -> None: ...

    def say(self, text: str) -> None: ...

    def plan(self, plan: operator_pb2.PlanReply) -> None: ...

    def placements(self, rows: Sequence[operator_pb2.PlacementView]) -> None: ...

    def migration(self, migration: operator_pb2.MigrationView) -> None: ...


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, and nothing else.")
@click.option("--keep", is_flag=True, help="Leave the regions running, as `shoal dev up` would.")
@click.option("--data-dir", type=click.Path(path_type=Path), help="With --keep: where its state lies.")
@link
def demo(as_json: bool, keep: bool, data_dir: Path | None, link: str) -> None:
    """A region of four agents reads a page, moves the work for energy's sake while it is asked, loses a machine under
    load, and has another region run what it has no place for.

    Real models, real input, real processes; the accelerators are emulated and say so. Status 1 when an expectation
    fails.
    """
    # Only this verb needs pictures and onnx (extra `local`); the others start without them.
    from shoal.devstack.demo import Demo

    with tempfile.TemporaryDirectory(prefix="shoal-demo-") as scratch:
        # Its own contexts and state, so that a demo disturbs nothing that the user has.
        control = Control(data_dir) if keep else Control(Path(scratch) / "dev", Contexts(Path(scratch) / "home"))
        demo = Demo(control, _SilentNarrator() if as_json else _TerminalNarrator(), link)
        try:
            report = demo.run()
        finally:
            if not keep:
                control.down()
    if as_json:
        emit(report.data(), "json")
    else:
        failed = [check for check in report.checks if not check.ok]
        line("")
        seconds = ", ".join(f"{name} {value:g}s" for name, value in report.seconds.items())
        line(f"{len(report.checks) - len(failed)} expectations held, {len(failed)} failed  ({seconds})", "bold")
        if keep:
            show_up(control.up(StackOptions(link=link), lambda text: None))
        else:
            line("everything is stopped and nothing is left behind")
    if not report.ok:
        raise click.exceptions.Exit(1)
