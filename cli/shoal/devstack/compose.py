"""Sets up the federation of `docker-compose.yml`, with two commands that each run once.

    python -m shoal.devstack.compose etcd --out FOLDER --host NAME .. --scope ROLE/NAME ..
    python -m shoal.devstack.compose join --stack FOLDER --out FOLDER --published REGION=HOST:PORT ..

`etcd` makes the store's certificates before anything starts.

`join` runs once coordinators serve. It joins every region to the federation, puts a join token where an agent or
gateway without an identity finds it, and writes files and contexts for `shoal` and other clients outside.

Both commands keep what is already valid. Under `--stack` are the members' own folders, their volumes, as
REGION/ROLE/NAME; a member is dialled by its NAME.
"""

import datetime
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from shoal.client import TOKEN_S, Context, Contexts, RegionClient, client_files, enrol
from shoal.devstack import etcd
from shoal.devstack.bootstrap import federate
from shoal.devstack.layout import FEDERATION
from shoal.host.private_files import write_private
from shoal.types.address import HostPort
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.identity import check_name

LINK: Final = 7443
ENROL: Final = 7444
"""Port of coordinators and federations inside the network."""
PORT_OFFSETS: Final = {"link": 1, "enrol": 2, "data": 3, "dashboard": 4}
"""Ports at which a region is reached from outside, relative to its first one."""
NODES: Final = ("agent", "gateway")
SELF_DECLARED_LABELS: Final = ("site", "price")
"""Labels that the services of `docker-compose.yml` declare themselves: the operator writes their command lines."""
SCRAPER: Final = "prometheus"
OUTSIDE_OPERATOR: Final = "compose"
"""Name of the operator outside, in the audit log."""


@dataclass(frozen=True, slots=True)
class ContainerMember:
    """One container and its folder."""

    region: str
    role: str
    name: str
    folder: Path

    @property
    def link(self) -> str:
        return f"{self.name}:{LINK}"

    @property
    def enrol(self) -> str:
        return f"{self.name}:{ENROL}"

    @property
    def operator(self) -> Context:
        """The operator's context that a coordinator writes for its own machine."""
        return Context(self.name, self.region, self.link, str(self.folder / "operator"))


def members_in(stack: Path) -> tuple[ContainerMember, ...]:
    """Raises ShoalError(NOT_FOUND)."""
    paths = sorted(stack.glob("*/*/*"))
    found = tuple(ContainerMember(path.parent.parent.name, path.parent.name, path.name, path) for path in paths)
    if not found:
        raise refuse(Code.NOT_FOUND, f"{stack} holds no REGION/ROLE/NAME", "volumes of members", "mount them there")
    return found


def published_addresses(region: str, first_address: str) -> Mapping[str, str]:
    """host:port by use. first_address: HOST:PORT just below the region's published ports. Raises
    ShoalError(FIELD_INVALID)."""
    first = HostPort.parse(first_address, f"--published {region}=")
    return {use: str(HostPort(first.host, first.port + above)) for use, above in PORT_OFFSETS.items()}


def join(stack: Path, out: Path, scraper: Path, published: Mapping[str, str]) -> None:
    """Set up everything; the region that is published first becomes the current context. Raises ShoalError."""
    members = members_in(stack)
    with ExitStack() as opened:

        def coordinators(role: str) -> Iterator[tuple[ContainerMember, RegionClient]]:
            for member in members:
                if member.role == role:
                    yield member, opened.enter_context(RegionClient(member.operator))

        regions, federations = list(coordinators("coordinator")), list(coordinators(FEDERATION))
        contexts = Contexts(out)
        in_use = contexts.current or next(iter(published))
        for member, api in (*regions, *federations):
            enrol(api, member.enrol, "viewer", SCRAPER, scraper / member.region)
            _chown_like(scraper / member.region, member.folder)
            if member.region in published:
                files = out / member.region / "operator"
                enrol(api, member.enrol, "operator", OUTSIDE_OPERATOR, files)
                contexts.save(_context(member, published_addresses(member.region, published[member.region]), files))
        for member, api in regions:
            client_files(api, member.enrol, out / member.region / "client")
            for node in members:
                if node.region == member.region and node.role in NODES:
                    _write_join_token(api, node, like=member.folder)
        for member, api in federations:
            federate(api, member.enrol, {each.region: its for each, its in regions}, _say)
        contexts.use(in_use)


def _context(member: ContainerMember, addresses: Mapping[str, str], files: Path) -> Context:
    is_region = member.role == "coordinator"
    return Context(
        member.region,
        member.region,
        addresses["link"],
        str(files),
        gateway=addresses["data"] if is_region else "",
        enrolment=addresses["enrol"],
        dashboard=addresses["dashboard"] if is_region else "",
    )


def _write_join_token(api: RegionClient, node: ContainerMember, *, like: Path) -> None:
    """Write a token for a node without an identity, and give its folder the owner of `like`."""
    if not (node.folder / "identity" / "cert.pem").exists():
        _say(f"{node.name} may join {node.region}")
        labels = {"entry": "*"} if node.role == "agent" else {}
        token = api.create_token(node.role, node.name, 12 * TOKEN_S, labels, SELF_DECLARED_LABELS).token
        write_private(node.folder / "token", token.encode())
        node.folder.chmod(0o700)
        _chown_like(node.folder, like)


def _chown_like(folder: Path, like: Path) -> None:
    """Give the folder the owner of `like`. Raises OSError."""
    owner = like.stat()
    for path in (folder, *folder.rglob("*")):
        shutil.chown(path, owner.st_uid, owner.st_gid)


def _say(text: str) -> None:
    print(text, flush=True)


@click.group()
def compose() -> None:
    """See the module."""


_folder = click.Path(path_type=Path, file_okay=False)


@compose.command(name="etcd")
@click.option("--out", type=_folder, required=True)
@click.option("--host", "hosts", multiple=True, required=True)
@click.option("--scope", "scopes", multiple=True, metavar="ROLE/NAME", help="Who keeps state there: region/NAME, ..")
@click.option("--owner", type=int, help="Number of the user who gets all but the CA's key.")
def etcd_(out: Path, hosts: Sequence[str], scopes: Sequence[str], owner: int | None) -> None:
    """Certificates of the store, in OUT/etcd: a folder for each who uses one."""
    for scope in scopes:
        role, _, name = scope.partition("/")
        if role not in ("region", FEDERATION):
            raise refuse(Code.FIELD_INVALID, f"--scope {scope:.80}", "region/NAME or federation/NAME", "name its role")
        check_name(name, role)
    now = datetime.datetime.now(datetime.UTC)  # noqa: TID251 - dates of certificates
    files = etcd.prepare(out, now, scopes, hosts)
    if owner is None:
        return
    for folder in (each for each in files.iterdir() if each.name != etcd.AUTHORITY):
        folder.chmod(0o700)
        for path in (folder, *folder.iterdir()):
            shutil.chown(path, owner, owner)


@compose.command(name="join")
@click.option("--stack", type=_folder, required=True)
@click.option("--out", type=_folder, required=True, help="For clients outside.")
@click.option("--scraper", type=_folder, required=True, help="For Prometheus.")
@click.option("--like", type=_folder, required=True, help="Whose owner gets what is in --out.")
@click.option("--published", multiple=True, required=True, metavar="REGION=HOST:PORT")
def join_(stack: Path, out: Path, scraper: Path, like: Path, published: Sequence[str]) -> None:
    """Regions, clients and nodes."""
    join(stack, out, scraper, dict(each.split("=", 1) for each in published))
    _chown_like(out, like)


def main() -> None:
    try:
        compose(standalone_mode=False)
    except ShoalError as error:
        sys.exit(str(error.refusal))


if __name__ == "__main__":
    main()
