"""`shoal backup` and `shoal restore`: a region's state in one file, and back."""

import shutil
import subprocess
import sys
from pathlib import Path

import click

from shoal.artifacts.backup import Backup
from shoal.cli.options import connect, connection
from shoal.cli.render.output import emit, line
from shoal.cli.render.resources import when
from shoal.types.codes import Code, refuse
from shoal.types.units import show_bytes

FILE = click.Path(path_type=Path)


@click.command()
@click.argument("file", type=FILE)
@click.option("--models", is_flag=True, help="With the bytes of models and samples; without, push them again.")
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", envvar="SHOAL_OUTPUT")
@connection
def backup(file: Path, models: bool, output: str, context: str, region: str) -> None:
    """Write the region's state, as it is now, to FILE, and read it back whole.

    The coordinator goes on meanwhile. The CA's keys are in it where the coordinator was given --backup-key-file, sealed
    with what that file holds. For a federation use a context of its operator.
    """
    with connect(context, region) as api:
        found = api.backup(file, models=models)
    _show(found, output)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("file", type=FILE)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.option("--check", is_flag=True, help="Only read FILE, tell whether it is whole, and what it is.")
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", envvar="SHOAL_OUTPUT")
def restore(file: Path, flags: tuple[str, ...], check: bool, output: str) -> None:
    """Put FILE, of `shoal backup`, back, on the machine of a coordinator that is stopped.

    FLAGS are those of `shoal-coordinator restore`, which does it: --region NAME --data-dir DIR, --replace where there
    is a store, --backup-key-file for the CA's keys, --store etcd --etcd-endpoints and so on.
    """
    if check:
        _show(Backup.open(file), output)
        return
    beside = Path(sys.executable).parent / "shoal-coordinator"
    program = str(beside) if beside.exists() else shutil.which("shoal-coordinator")
    if program is None:
        raise refuse(
            Code.NOT_FOUND,
            "shoal-coordinator is not installed here",
            "the machine of the coordinator",
            "run it there; `shoal restore --check FILE` works anywhere",
        )
    done = subprocess.run([program, "restore", "--from", str(file), *flags], check=False)
    raise click.exceptions.Exit(done.returncode)


def _show(found: Backup, output: str) -> None:
    manifest = found.manifest
    if output in ("json", "yaml"):
        said = {each: getattr(manifest, each) for each in manifest.__dataclass_fields__}
        emit({"file": str(found.path), **said}, output)
        return
    line(
        f"{found.path}: {manifest.role} {manifest.name} at revision {manifest.revision} of its {manifest.store} store,"
        f" {when(manifest.made_at)}, by shoal {manifest.version}"
    )
    total = show_bytes(sum(manifest.models.values()))
    line(
        f"{manifest.records} records, {len(manifest.models)} models ({total}), "
        + ("the CA's keys, sealed" if manifest.keys else "no keys: keep the coordinator's ca/ yourself")
    )
