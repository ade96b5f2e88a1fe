"""What makes strangers of containers into a federation: the two commands of `docker-compose.yml` that run once.

    python -m shoal.devstack.compose etcd --out FOLDER --host NAME ..
    python -m shoal.devstack.compose join --stack FOLDER --out FOLDER --published REGION=HOST:PORT ..

`etcd` makes the certificates of the store, before anything starts. `join` comes when coordinators serve: it has every
region in the federation, puts a join token where an agent or gateway without an identity finds it, and writes files and
contexts for `shoal` and other clients outside. Both leave alone what is good already.

Under `--stack` are the members' own folders, their volumes, as REGION/ROLE/NAME; a member is dialled by its NAME.
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

from shoal.client import TOKEN_S, Context, Contexts, Region, client_files, enrol
from shoal.devstack import etcd
from shoal.devstack.joining import federate
from shoal.devstack.layout import FEDERATION
from shoal.types.codes import Code, ShoalError, refuse
from shoal.wire.private import write_private

LINK: Final = 7443
ENROL: Final = 7444
"""Of coordinators and federations, inside."""
PUBLISHED: Final = {"link": 1, "enrol": 2, "grpc": 3, "rest": 4, "token": 5}
"""Where a region is reached from outside: so many ports above its first."""
NODES: Final = ("agent", "gateway")
SCRAPER: Final = "prometheus"
OUTSIDE: Final = "compose"
"""Name of the operator outside, in the audit log."""


@dataclass(frozen=True, slots=True)
class Member:
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
        """That a coordinator makes for its own machine."""
        return Context(self.name, self.region, self.link, str(self.folder / "operator"))


def members_in(stack: Path) -> tuple[Member, ...]:
    """Raises ShoalError(NOT_FOUND)."""
    paths = sorted(stack.glob("*/*/*"))
    found = tuple(Member(path.parent.parent.name, path.parent.name, path.name, path) for path in paths)
    if not found:
        raise refuse(Code.NOT_FOUND, f"{stack} holds no REGION/ROLE/NAME", "volumes of members", "mount them there")
    return found


def outside(region: str, first: str) -> Mapping[str, str]:
    """host:port by use. first: HOST:PORT below the region's published ones. Raises ShoalError(FIELD_INVALID)."""
    host, _, port = first.rpartition(":")
    if not (host and port.isdigit()):
        raise refuse(Code.FIELD_INVALID, f"--published {region}={first}", "REGION=HOST:PORT", "give the first port")
    return {use: f"{host}:{int(port) + above}" for use, above in PUBLISHED.items()}


def join(stack: Path, out: Path, scraper: Path, published: Mapping[str, str]) -> None:
    """The region that is published first is the first context in use. Raises ShoalError."""
    members = members_in(stack)
    with ExitStack() as opened:

        def coordinators(role: str) -> Iterator[tuple[Member, Region]]:
            for member in members:
                if member.role == role:
                    yield member, opened.enter_context(Region(member.operator))

        regions, federations = list(coordinators("coordinator")), list(coordinators(FEDERATION))
        contexts = Contexts(out)
        in_use = contexts.current or next(iter(published))
        for member, api in (*regions, *federations):
            enrol(api, member.enrol, "viewer", SCRAPER, scraper / member.region)
            _give(scraper / member.region, member.folder)
            if member.region in published:
                files = out / member.region / "operator"
                enrol(api, member.enrol, "operator", OUTSIDE, files)
                contexts.save(_context(member, outside(member.region, published[member.region]), files))
        for member, api in regions:
            client_files(api, member.enrol, out / member.region / "client")
            for node in members:
                if node.region == member.region and node.role in NODES:
                    _invite(api, node, like=member.folder)
        for member, api in federations:
            federate(api, member.enrol, {each.region: its for each, its in regions}, _say)
        contexts.use(in_use)


def _context(member: Member, addresses: Mapping[str, str], files: Path) -> Context:
    is_region = member.role == "coordinator"
    return Context(
        member.region,
        member.region,
        addresses["link"],
        str(files),
        gateway_rest=addresses["rest"] if is_region else "",
        gateway_grpc=addresses["grpc"] if is_region else "",
        enrolment=addresses["enrol"],
    )


def _invite(api: Region, node: Member, *, like: Path) -> None:
    """A token, where it has no identity yet; its folder is its own, as a coordinator's is."""
    if not (node.folder / "identity" / "cert.pem").exists():
        _say(f"{node.name} may join {node.region}")
        write_private(node.folder / "token", api.create_token(node.role, node.name, 12 * TOKEN_S).token.encode())
        node.folder.chmod(0o700)
        _give(node.folder, like)


def _give(folder: Path, like: Path) -> None:
    """To whom another path belongs. Raises OSError."""
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
def etcd_(out: Path, hosts: Sequence[str]) -> None:
    """Certificates of the store, in OUT/etcd."""
    etcd.prepare(out, datetime.datetime.now(datetime.UTC), hosts)  # noqa: TID251 - dates of certificates


@compose.command(name="join")
@click.option("--stack", type=_folder, required=True)
@click.option("--out", type=_folder, required=True, help="For clients outside.")
@click.option("--scraper", type=_folder, required=True, help="For Prometheus.")
@click.option("--like", type=_folder, required=True, help="Whose owner gets what is in --out.")
@click.option("--published", multiple=True, required=True, metavar="REGION=HOST:PORT")
def join_(stack: Path, out: Path, scraper: Path, like: Path, published: Sequence[str]) -> None:
    """Regions, clients and nodes."""
    join(stack, out, scraper, dict(each.split("=", 1) for each in published))
    _give(out, like)


def main() -> None:
    try:
        compose(standalone_mode=False)
    except ShoalError as error:
        sys.exit(str(error.refusal))


if __name__ == "__main__":
    main()
