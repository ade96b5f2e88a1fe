"""`shoal dashboard`: opens the region's dashboard in a browser."""

import asyncio
import webbrowser

import click

from shoal.cli.options import connect, connection
from shoal.client import tunnel
from shoal.types.address import HostPort


@click.command()
@connection
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of this machine; 0: any that is free.")
@click.option("--no-browser", is_flag=True, help="Print the link, and open nothing.")
@click.option("--address", default="", help="HOST:PORT of the dashboard, if this machine reaches it by another.")
@click.option(
    "--direct", is_flag=True, help="Print a link to the coordinator itself, whose CA the browser has to trust."
)
def dashboard(context: str, region: str, port: int, no_browser: bool, address: str, direct: bool) -> None:
    """Open the region's dashboard in a browser.

    The link opens one session, once, within two minutes. Whoever uses it reads as you do, and can change nothing. The
    browser asks a port of this machine, which reaches the coordinator over TLS for as long as this command runs. With
    --direct it asks the coordinator itself.
    """
    with connect(context, region) as api:
        link, used = api.open_dashboard(), api.context
    address = address or used.dashboard or link.address
    if direct:
        click.echo(f"https://{address}/#link={link.secret}")
        return

    def on_ready(bound: int) -> None:
        url = f"http://127.0.0.1:{bound}/#link={link.secret}"
        click.echo(url)
        click.echo(f"dashboard of {used.region}, until you press Ctrl-C", err=True)
        if not no_browser:
            webbrowser.open(url)

    asyncio.run(tunnel.serve(used, HostPort.parse(address, "--address"), port, on_ready))
