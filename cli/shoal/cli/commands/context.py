"""`shoal context`: which region to call, and as whom."""

import shutil
from pathlib import Path

import click

from shoal.cli.names import CONTEXT
from shoal.cli.options import connect, connection, output, tenant
from shoal.cli.render.columns import Column
from shoal.cli.render.output import emit, line, note, table
from shoal.cli.render.resources import when
from shoal.client import Context, Contexts, RegionClient, client_files, renew_context
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.wire.certificates import identity_of_pem
from shoal.wire.enrol import redeem, renew


@click.group()
def context() -> None:
    """Which region the commands talk to, and as whom."""


@context.command(name="ls")
@output
def ls(output: str) -> None:
    """The contexts on this machine."""
    contexts = Contexts()
    rows = [
        {
            "name": one.name,
            "current": one.name == contexts.current,
            "region": one.region,
            "address": one.address,
            "identity": _identity(one),
        }
        for one in contexts.all()
    ]
    if output in ("json", "yaml"):
        emit(rows, output)
        return
    table(
        ["", Column("NAME"), Column("REGION", rank=2), Column("ADDRESS", rank=3, least=20), Column("IDENTITY", rank=1)],
        [
            ["*" if row["current"] else "", *(str(row[k]) for k in ("name", "region", "address", "identity"))]
            for row in rows
        ],
        wide=output == "wide",
    )


@context.command()
@click.argument("name", type=CONTEXT)
def use(name: str) -> None:
    """Make NAME the context of later commands."""
    line(f"using {Contexts().use(name).name}")


@context.command()
@click.option("--coordinator", required=True, metavar="HOST:PORT", help="The region's enrolment address.")
@click.option(
    "--token",
    required=True,
    envvar="SHOAL_TOKEN",
    help="A join token for role operator or viewer; better by SHOAL_TOKEN.",
)
@click.option(
    "--as",
    "as_",
    default="",
    help="Your name in the audit log, where the token leaves it open.",
)
@click.option("--name", default="", help="Name of the context. [default: the region's]")
def login(coordinator: str, token: str, as_: str, name: str) -> None:
    """Redeem a token of `shoal token create --role operator` for a certificate, and use it."""
    try:
        enrolled = redeem(coordinator, token, as_)
    except ShoalError as error:
        if error.code is not Code.NAME_INVALID or as_:
            raise
        raise refuse(
            Code.FIELD_MISSING, "no name of yours: the token leaves it open", "--as NAME, for the audit log",
            "shoal context login .. --as NAME",
        ) from error  # fmt: skip
    if enrolled.role not in (Role.OPERATOR, Role.VIEWER):
        raise refuse(
            Code.ROLE_DENIED, f"a token of role {enrolled.role}, which is used up now", "one of operator or viewer",
            "shoal token create --role operator; a device redeems its own by shoal-agent join",
        )  # fmt: skip
    contexts = Contexts()
    name = name or enrolled.region
    folder = contexts.folder / name
    enrolled.write(folder)
    address = enrolled.api_address or enrolled.link_address
    contexts.save(Context(name, enrolled.region, address, str(folder), enrolment=enrolled.enrol_address))
    line(f"logged in to region {enrolled.region} as {enrolled.role} {enrolled.name}; context {name} is in use")


@context.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--coordinator",
    default="127.0.0.1:7443",
    show_default=True,
    metavar="HOST:PORT",
    help="The region's link address.",
)
@click.option("--name", default="", help="Name of the context. [default: the region's]")
def add(folder: Path, coordinator: str, name: str) -> None:
    """Call a region with the cert.pem, key.pem and ca.pem in FOLDER, and use it from now on.

    A coordinator's first start makes such a folder for the first operator, DATA_DIR/operator, and keeps its files fresh
    there. Everybody else redeems a token: shoal context login.
    """
    try:
        identity = identity_of_pem((folder / "cert.pem").read_bytes())
    except OSError as cause:
        raise refuse(
            Code.SOURCE_UNREACHABLE, f"{cause.filename}: {cause.strerror}",
            "cert.pem, key.pem and ca.pem of an operator or viewer",
            "name the folder `operator` in the coordinator's --data-dir, as a user who may read it",
        ) from cause  # fmt: skip
    if identity.role not in (Role.OPERATOR, Role.VIEWER):
        raise refuse(
            Code.ROLE_DENIED, f"a certificate of role {identity.role}", "one of operator or viewer",
            "name the folder `operator` in the coordinator's --data-dir",
        )  # fmt: skip
    added = Context(name or identity.region, identity.region, coordinator, str(folder.resolve()))
    try:
        with RegionClient(added) as api:
            api.who_am_i()
    except ShoalError as error:
        if error.code not in (Code.COORDINATOR_UNREACHABLE, Code.UNIMPLEMENTED):
            raise
        other = f"{coordinator} is another port of the region, or another program's"
        raise refuse(
            Code.COORDINATOR_UNREACHABLE, other if error.code is Code.UNIMPLEMENTED else error.refusal.found,
            "the coordinator's --link, port 7443 unless it was told otherwise",
            "--coordinator HOST:PORT, as `link` in the line that the coordinator prints when it serves",
        ) from error  # fmt: skip
    Contexts().save(added)
    line(f"using {added.name}: region {added.region} as {identity.role} {identity.name}")


@context.command(name="renew")
@click.argument("name", default="", type=CONTEXT)
@click.option(
    "--files",
    type=click.Path(exists=True, file_okay=False),
    default=None,
    help="Renew the cert.pem, key.pem and ca.pem in this folder instead, a tenant's client's for example.",
)
@click.option(
    "--coordinator",
    default="",
    metavar="HOST:PORT",
    help="The region's enrolment address, for --files. [default: as the context NAME knows it]",
)
def renew_(name: str, files: str | None, coordinator: str) -> None:
    """Get a new certificate for NAME now. [default: the context in use]

    Commands do this by themselves when two thirds of its life are over. A certificate that ended may be renewed for 90
    days; one whose CA was followed by another, too.
    """
    if files is None:
        found = Contexts().get(name)
        renewed, whose = renew_context(found), found.name
    else:
        renewed = renew(coordinator or _enrol_address(name), Path(files))
        renewed.write(Path(files))
        whose = f"{renewed.role} {renewed.name}"
    line(f"{whose} is good until {when(identity_of_pem(renewed.certificate_pem).not_after)}")


def _enrol_address(name: str) -> str:
    found = Contexts().get(name)
    if found.enrolment:
        return found.enrolment
    with RegionClient(found) as api:
        return str(api.who_am_i().enrol_address)


@context.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@tenant
@connection
def client(folder: Path, tenant: str, context: str, region: str) -> None:
    """Have what a client of the tenant's workloads needs in FOLDER: cert.pem, key.pem, ca.pem, and a bearer token in
    `bearer`. Prints the address of the gateway's data port, alone on standard output.

    Files that are there and good for a while are left as they are.
    """
    with connect(context, region) as api:
        client_files(api, _enrol_address(context), folder, tenant)
        address = api.context.gateway or next(iter(api.who_am_i().gateways), "")
    if not address:
        raise refuse(Code.NOT_FOUND, "the region has no gateway that is ready", "one", "shoal-agent run --role gateway")
    print(address)
    note(f"{folder}: files of a client of tenant {tenant}, and the address of its gateway above")


@context.command()
@click.argument("name", type=CONTEXT)
def rm(name: str) -> None:
    """Forget NAME and delete the files that login wrote for it."""
    contexts = Contexts()
    found = contexts.get(name)
    contexts.remove(name)
    if Path(found.folder).parent == contexts.folder:
        shutil.rmtree(found.folder, ignore_errors=True)
    line(f"removed {name}")


def _identity(found: Context) -> str:
    try:
        identity = identity_of_pem(found.certificate.read_bytes())
    except Exception:
        return "unreadable"
    return f"{identity.role} {identity.name}"
