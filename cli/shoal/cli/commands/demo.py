"""`shoal demo`: the whole demo on this machine, in about two minutes."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from shoal.cli.commands.dev import link, show_up
from shoal.cli.render.demo_screen import DemoScreen, SilentDemo
from shoal.cli.render.output import emit, line
from shoal.client import Contexts
from shoal.devstack import layout
from shoal.devstack.control import Control
from shoal.devstack.layout import StackOptions
from shoal.types.codes import Code, refuse
from shoal.types.units import show_joules

if TYPE_CHECKING:
    from shoal.devstack.demo import DemoReport

_NEXT: Final = (
    "what to do next:",
    "  docs/tutorial.md      ten minutes by hand: apply, plan, can-move, migrate, explain",
    "  shoal demo --keep     the same, and it stays: then `shoal dashboard`, `shoal top`, `shoal get all`",
    "  docs/how-to           sixteen policies, each for a need",
)
_NEXT_KEPT: Final = (
    "what to do next:",
    "  shoal dashboard       all of it in a browser; `shoal top` here",
    "  shoal get workloads   then `shoal explain line-text`, `shoal can-move line-text --to plain-cpu`",
    "  docs/tutorial.md      ten minutes by hand",
    "  shoal dev down        when you are done",
)


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
    if data_dir is not None and not keep:
        raise refuse(Code.USAGE, "--data-dir without --keep", "both, or neither", "without --keep nothing is left")
    # Only this verb needs pictures and onnx (extra `local`); the others start without them.
    from shoal.devstack.demo import CHAPTERS, Demo

    with tempfile.TemporaryDirectory(prefix="shoal-demo-") as scratch:
        # Its own contexts and state, so that a demo disturbs nothing that the user has.
        own = Path(scratch)
        control = Control(data_dir) if keep else Control(own, Contexts(own / "contexts"), is_temporary=True)
        _refuse_if_there(control)
        try:
            with SilentDemo() if as_json else DemoScreen(len(CHAPTERS)) as screen:
                report = Demo(control, screen, link).run()
        finally:
            if not keep:
                control.down()
    if as_json:
        emit(report.data(), "json")
    else:
        _show_end(report)
        if keep:
            show_up(control.up(StackOptions(link=link), lambda text: None))
        else:
            line("everything is stopped and nothing is left behind")
        for each in ("", *(_NEXT_KEPT if keep else _NEXT)):
            line(each)
    if not report.ok:
        raise click.exceptions.Exit(1)


def _refuse_if_there(control: Control) -> None:
    """Nobody's regions are to be broken and moved about, those that are stopped neither: they would be started. Raises
    ShoalError(IN_USE)."""
    is_up = control.running()
    if is_up or (control.folder / layout.FILE).exists():
        state = "are up" if is_up else "were up, and are kept,"
        found = f"regions {state} in {control.folder}, and the demo moves work and breaks machines"
        raise refuse(Code.IN_USE, found, "regions of its own", "--data-dir FOLDER; or shoal dev down --purge first")


def _show_end(report: "DemoReport") -> None:
    """The figures of the run."""
    failed = [check for check in report.checks if not check.ok]
    moved, slower = report.migration, f"emulated devices, {report.time_scale:g} times slower than real ones"
    line("")
    line(
        f"{len(report.checks) - len(failed)} expectations held, {len(failed)} failed", "bold red" if failed else "bold"
    )
    if moved:
        line(
            f"  live move: {moved['sent']} requests, {moved['lost']} lost, {moved['wrong']} answers changed; "
            f"a page costs {show_joules(moved['joules_per_page_after'])} "
            f"instead of {show_joules(moved['joules_per_page_before'])}"
        )
        line(f"  meanwhile {moved['requests_per_s']:g} requests/s on {slower}")
    if report.load:
        line(f"  machine lost: replaced in {report.load['replaced_in_s']:g}s, {report.load['lost']} requests lost")
    if report.federation:
        line(
            f"  other region: an agreement in {report.federation['granted_in_s']:g}s, "
            f"answers after {report.federation['answered_in_s']:g}s"
        )
