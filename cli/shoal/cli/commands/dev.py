"""`shoal dev`: a local federation that stays up, and faults for it."""

from pathlib import Path
from textwrap import fill

import click

from shoal.cli.options import output
from shoal.cli.render.columns import Column
from shoal.cli.render.output import emit, line, table
from shoal.cli.render.styles import state
from shoal.devstack import layout
from shoal.devstack.control import Control, RunningStack, context_of
from shoal.devstack.process_supervisor import UNTIL_HEALED, VERBS

_folder = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    default=None,
    envvar="SHOAL_DEV_DIR",
    help="Where its state, logs and client files lie. [default: the user's state folder]",
)

link = click.option(
    "--link",
    type=click.Choice(["grpc", "mqtt"]),
    default="grpc",
    show_default=True,
    help="What carries the agents' links; mqtt starts this machine's Mosquitto.",
)


@click.group()
def dev() -> None:
    """Local regions on this machine: coordinator, gateway, agents; certificates and tokens included."""


@dev.command()
@_folder
@click.option(
    "--agents",
    type=int,
    default=None,
    help="One plain CPU, then emulated NPU, GPU and small CPU, then plain. [default: 4; 1 with --providers or --fleet]",
)
@click.option(
    "--fleet",
    "fleets",
    multiple=True,
    metavar="NAME=COUNT[:PROFILE]",
    help="Beside them COUNT emulated agents of the first region, NAME-1 .., each a machine of its own in a site of its "
    f"own: labels site=NAME-1 .. and group=NAME; repeatable. PROFILE: what each emulates. [default: "
    f"{layout.SMALL_PROFILE}]",
)
@click.option(
    "--providers",
    is_flag=True,
    help="The first agent offers all providers that are installed here: the processor's, those of plugins, and "
    "Qualcomm's simulator of its NPU.",
)
@click.option("--region", "name", default=layout.REGION, show_default=True, help="Name of the first region.")
@click.option(
    "--coordinators",
    default=1,
    show_default=True,
    help="Of the first region, coordinator-1 ..: one leads, the others take over. More than one with --store etcd.",
)
@click.option(
    "--regions",
    default=1,
    show_default=True,
    help="So many, NAME and NAME-2 .., each with a CA, a gateway and --agents of its own; contexts dev, dev-NAME-2 ..",
)
@click.option("--neighbours", type=int, default=None, help="Agents of each region but the first. [default: as many]")
@click.option(
    "--federation-replicas",
    default=0,
    show_default=True,
    help="Of the federation that they are in (context dev-federation); more than one with --store etcd.",
)
@click.option(
    "--store",
    type=click.Choice(["sqlite", "etcd"]),
    default="sqlite",
    show_default=True,
    help="Where coordinators keep their state; etcd starts three members of this machine's.",
)
@link
def up(
    data_dir: Path | None,
    agents: int | None,
    fleets: tuple[str, ...],
    providers: bool,
    name: str,
    coordinators: int,
    regions: int,
    neighbours: int | None,
    federation_replicas: int,
    store: str,
    link: str,
) -> None:
    """Start it, or find it running. Everything is enrolled, ready, measured and joined when this returns."""
    control = Control(data_dir)
    count = agents if agents is not None else 1 if providers or fleets else 4
    others = neighbours if regions > 1 and neighbours != count else None
    simulators = layout.installed_simulators() if providers else ""
    if providers and not simulators:
        line("no simulator is installed: pip install onnxruntime-qnn, on x86-64", "dim")
    asked = layout.StackOptions(
        name, count, link, regions, federation_replicas, store, others, coordinators, simulate=simulators,
        groups=tuple(map(layout.AgentGroup.parse, fleets)),
    )  # fmt: skip
    show_up(control.up(asked, lambda text: line(f"  {text}", "dim")))


def show_up(found: RunningStack) -> None:
    """Print what the user needs next: addresses and the client's files."""
    stack = found.stack
    line(f"up: {layout.StackOptions.from_stack(stack)}, data in {found.folder}")
    if found.stack.time_scale != 1:
        line(f"emulated devices run {found.stack.time_scale:g} times slower than the real ones")
    gateway = found.stack.gateways[0].addresses
    client = Path(found.client.folder)
    line(f"gateway   {gateway['data']}: gRPC and REST, with a client certificate or a bearer token")
    line(f"client    {client}: cert.pem, key.pem, ca.pem; bearer token in {found.bearer.name}")
    line(f"link      {stack.coordinator_addresses('link')}: agents and operators")
    enrolment = stack.coordinator_addresses("enrol")
    line(f"enrolment {enrolment}: shoal-agent join --coordinator {enrolment}, shoal context login")
    line("operator  context `dev` is in use: try `shoal get nodes`")
    if others := stack.regions[1:]:
        line(f"others    {', '.join(others)}: as above with `--context {context_of(stack, others[0])}` ..")
    if stack.federation:
        line("          and `shoal federation regions`; the federation's own operator is context `dev-federation`")


@dev.command()
@_folder
@output
def status(data_dir: Path | None, output: str) -> None:
    """Every process of it: name, role, pid, state, addresses, data."""
    control = Control(data_dir)
    rows = control.status()
    if output in ("json", "yaml"):
        stack = layout.load(control.folder)
        gateways = [dict(gateway.addresses) for gateway in stack.gateways]
        emit(
            {
                "region": stack.region,
                "regions": stack.regions,
                "link": stack.link,
                "time_scale": stack.time_scale,
                "gateways": gateways,
                "processes": rows,
            },
            output,
        )
        return
    columns = [
        "NAME", Column("ROLE", rank=2), Column("REGION", rank=4), Column("PID", rank=1), Column("STATE"),
        Column("EMULATES", rank=3, least=10), Column("ADDRESSES", rank=5, least=20),
        *(["DATA"] if output == "wide" else ()),
    ]  # fmt: skip
    table(
        columns,
        [
            [
                row["name"],
                row["role"],
                row["region"],
                str(row["pid"] or "-"),
                state(", ".join((row["state"], *row["broken"]))),
                row["profile"] or "-",
                " ".join(f"{use}={address}" for use, address in row["ports"].items()),
                row["data_dir"],
            ][: len(columns)]
            for row in rows
        ],
        wide=output == "wide",
    )


@dev.command()
@_folder
@click.option("--purge", is_flag=True, help="Delete its state, logs and files too.")
def down(data_dir: Path | None, purge: bool) -> None:
    """Stop all of it; what was applied is there again at the next `up`, unless purged."""
    control = Control(data_dir)
    control.down(lambda text: line(f"  {text}", "dim"))
    if purge:
        control.purge()
    line("down" + (", and purged" if purge else ""))


@dev.command(
    name="break",
    epilog="\b\n" + "\n".join(fill(f"{verb:8}{what}", 78, subsequent_indent=" " * 8) for verb, what in VERBS.items()),
)
@_folder
@click.argument("name", metavar="NAME[/front|/worker|/supervisor]")
@click.argument("verb", type=click.Choice([*VERBS]))
def break_(data_dir: Path | None, name: str, verb: str) -> None:
    """Hurt one part on purpose, or mend it.

    A bare NAME is a machine: `kill` takes all of its processes at once and it stays dead until `resume`. With a part,
    only those processes are hit, and whoever is in charge brings them back.

    `cut`, `slow`, `fill`, `heat` and `unplug` last until `heal`; `shoal dev status` shows them. What you send to the
    machine's own ports still gets there: you sit at its console.
    """
    hit = Control(data_dir).break_member(name, verb)
    if verb == "heal" or verb in UNTIL_HEALED:
        line(f"{verb} {name}: {VERBS[verb]}")
    else:
        line(f"{verb} {name}: " + (f"pids {', '.join(map(str, hit))}" if hit else "started again"))
