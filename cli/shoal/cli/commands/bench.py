"""`shoal bench`: the benchmarks, side by side, as ratios."""

import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import click

from shoal.types.codes import Code, refuse


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("names", nargs=-1, type=click.UNPROCESSED, metavar="[NAMES]... [OPTIONS OF THE BENCHMARK]...")
@click.option("--list", "list_", is_flag=True, help="What there is.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("benchmarks"), show_default=True)
def bench(names: tuple[str, ...], list_: bool, folder: Path) -> None:
    """Run benchmarks/NAME.py (all when none is named), each a process of its own; figures are ratios within one run.

    Options that are not its own go to the benchmark: shoal bench serving --quick. What they are: shoal bench serving --
    --help.
    """
    there = {path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")}
    if not there:
        raise refuse(Code.NOT_FOUND, f"no benchmarks in {folder}", "a checkout of Shoal", "run it at its root")
    if list_:
        print("\n".join(there))
        return
    chosen = tuple(takewhile(lambda each: not each.startswith("-"), names))
    options = [each for each in names[len(chosen) :] if each != "--"]
    if options and len(chosen) != 1:
        found = f"{options[0]} and {len(chosen)} benchmarks"
        raise refuse(Code.FIELD_INVALID, found, "one benchmark, whose options they are", "shoal bench NAME OPTIONS")
    for name in chosen or tuple(there):
        if name not in there:
            raise refuse(Code.NOT_FOUND, f"no benchmark {name!r}", ", ".join(there), "shoal bench --list")
        done = subprocess.run([sys.executable, str(there[name]), *options], check=False)
        if done.returncode:
            raise click.exceptions.Exit(done.returncode)
