"""`shoal region`: settings of the region as a whole."""

import click

from shoal.cli.options import connect, connection, output
from shoal.cli.render.data import as_data
from shoal.cli.render.output import emit, line
from shoal.cli.render.resources import signal_text
from shoal.types.codes import Code, refuse


@click.group()
def region() -> None:
    """Price and carbon of the region by hand. Each act goes to the audit log."""


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
