"""`shoal region`: settings of the region as a whole."""

from pathlib import Path
from typing import Final

import click

from shoal.cli.options import connect, connection, output
from shoal.cli.render.columns import Column
from shoal.cli.render.data import as_data
from shoal.cli.render.output import emit, line, table
from shoal.cli.render.resources import reason, signal_text, when
from shoal.types.codes import Code, refuse
from shoal.v1 import operator_pb2

FILE: Final = click.Path(path_type=Path, allow_dash=True)


@click.group()
def region() -> None:
    """Price and carbon of the region by hand, and what other regions measured. Each act goes to the audit log."""


@region.command("set")
@click.argument("signal", type=click.Choice(["price", "carbon"]))
@click.argument("value", default="")
@click.option("--clear", is_flag=True, help="Take the word back: what the Region document says counts again.")
@connection
@output
def set_signal(signal: str, value: str, clear: bool, context: str, region: str, output: str) -> None:
    """Say what counts, with its unit, whatever the Region document says: "0.55 USD/h", "410 gCO2/kWh".

    It counts until it is cleared, also after a restart.
    """
    if bool(value) == clear:
        raise refuse(
            Code.FIELD_INVALID,
            "a value and --clear" if clear else "no value",
            "either of the two",
            f'shoal region set {signal} "{"0.55 USD/h" if signal == "price" else "410 gCO2/kWh"}", or with --clear',
        )
    with connect(context, region) as api:
        view = api.set_signal(signal, value)
    if output in ("json", "yaml"):
        emit(as_data(view), output)
    else:
        line(f"{signal} is {signal_text(view)}")


@region.group()
def measurements() -> None:
    """What warm-ups measured, from one region to another: predictions of a region know by it what models take on
    devices that it has never run them on."""


@measurements.command("export")
@click.argument("file", type=FILE, default="-")
@connection
def export_measurements(file: Path, context: str, region: str) -> None:
    """Write what this region measured to FILE, or to standard output.

    A row for each model and class of devices, as medians of all of its nodes. No node, tenant or workload is named.
    """
    with connect(context, region) as api:
        document = api.export_measurements()
    if str(file) == "-":
        click.echo(document, nl=False)
    else:
        file.write_bytes(document)


@measurements.command("import")
@click.argument("file", type=FILE)
@click.option("--dry-run", is_flag=True, help="Show what of it would count, and keep nothing.")
@connection
@output
def import_measurements(file: Path, dry_run: bool, context: str, region: str, output: str) -> None:
    """Keep what another region exported to FILE (-: standard input), instead of what that region exported before.

    What this region measures itself counts instead of it. A row that cannot be is left out.
    """
    with click.open_file(str(file), "rb") as opened:
        document = opened.read()
    with connect(context, region) as api:
        reply = api.import_measurements(document, dry_run=dry_run)
    if output in ("json", "yaml"):
        emit({"dryRun": dry_run, **as_data(reply)}, output)
        return
    found = reply.imported
    line(
        f"region {found.region}: {found.rows} row{'s' if found.rows != 1 else ''}"
        f" {'would be' if dry_run else 'is' if found.rows == 1 else 'are'} kept"
        f" ({found.models} models on {found.device_classes} device classes)"
    )
    if reply.left_out:
        line(f"{reply.left_out} left out:", "yellow")
    for each in reply.reasons:
        line(f"  {reason(each)}")
    if (further := reply.left_out - len(reply.reasons)) > 0:
        line(f"  and {further} more")


@measurements.command("ls")
@connection
@output
def list_measurements(context: str, region: str, output: str) -> None:
    """Of which regions measurements were imported."""
    with connect(context, region) as api:
        imported = api.imported_measurements()
    if output in ("json", "yaml"):
        emit([as_data(each) for each in imported], output)
        return
    columns = [
        Column("REGION"),
        Column("ROWS", right=True),
        Column("MODELS", right=True),
        Column("CLASSES", right=True),
        Column("EXPORTED", rank=1),
        Column("IMPORTED", rank=2),
        Column("BY", rank=3),
    ]
    table(columns, [_cells(each) for each in imported], wide=output == "wide")


@measurements.command("rm")
@click.argument("name", metavar="REGION")
@connection
def remove_measurements(name: str, context: str, region: str) -> None:
    """Forget what was imported of REGION."""
    with connect(context, region) as api:
        api.remove_measurements(name)
    line(f"measurements of region {name} are forgotten")


def _cells(imported: operator_pb2.ImportedMeasurementsView) -> list[str]:
    counts = (imported.rows, imported.models, imported.device_classes)
    return [
        imported.region,
        *map(str, counts),
        when(imported.exported_at),
        when(imported.imported_at),
        imported.actor.rpartition("/")[2],
    ]
