"""`shoal bench`: the benchmarks, side by side, as ratios; and a load for one workload."""

import os
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import click

from shoal.cli.commands.bench_load import load
from shoal.types.codes import Code, refuse


class _Benchmarks(click.Group):
    """`load`, and every benchmark by its name, which is looked for when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return ["load"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        return load if cmd_name == "load" else _make_command(cmd_name)


@click.group(
    cls=_Benchmarks,
    invoke_without_command=True,
    context_settings={"ignore_unknown_options": True},
    subcommand_metavar="[NAMES]... [OPTIONS OF THE BENCHMARK]...",
)
@click.option("--list", "list_", is_flag=True, help="What there is.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("benchmarks"), show_default=True)
@click.pass_context
def bench(context: click.Context, list_: bool, folder: Path) -> None:
    """Run benchmarks/NAME.py (all when none is named), each a process of its own; figures are ratios within one run.

    Options after a name go to the benchmark: shoal bench serving --quick. `shoal bench load WORKLOAD` needs no
    checkout: it measures a workload of yours.
    """
    context.obj = folder
    if list_:
        print("\n".join(_there(folder)))
        context.exit()
    if context.invoked_subcommand is None:
        _run((), [], folder)


def _make_command(name: str) -> click.Command:
    """Runs the benchmark of this name, and those named after it."""

    @click.command(name, add_help_option=False, context_settings={"ignore_unknown_options": True})
    @click.argument("words", nargs=-1, type=click.UNPROCESSED)
    @click.pass_obj
    def run(folder: Path, words: tuple[str, ...]) -> None:
        given = (name, *words)
        chosen = tuple(takewhile(lambda each: not each.startswith("-"), given))
        _run(chosen, [each for each in given[len(chosen) :] if each != "--"], folder)

    return run


def _there(folder: Path) -> dict[str, Path]:
    """Raises ShoalError(NOT_FOUND)."""
    found = {path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")}
    if not found:
        raise refuse(Code.NOT_FOUND, f"no benchmarks in {folder}", "a checkout of Shoal", "run it at its root")
    return found


def _run(chosen: tuple[str, ...], options: list[str], folder: Path) -> None:
    """Raises ShoalError(NOT_FOUND | FIELD_INVALID), Exit with the status of the first that failed."""
    there = _there(folder)
    if options and len(chosen) != 1:
        found = f"{options[0]} and {len(chosen)} benchmarks"
        raise refuse(Code.FIELD_INVALID, found, "one benchmark, whose options they are", "shoal bench NAME OPTIONS")
    for name in chosen or tuple(there):
        if name not in there:
            raise refuse(Code.NOT_FOUND, f"no benchmark {name!r}", ", ".join(there), "shoal bench --list")
        # Of each server that is measured: ONNX Runtime sends its maker nothing meanwhile.
        environment = {"ORT_DISABLE_TELEMETRY": "1", **os.environ}
        done = subprocess.run([sys.executable, str(there[name]), *options], env=environment, check=False)
        if done.returncode:
            raise click.exceptions.Exit(done.returncode)
