"""`shoal delete`: delete documents, nodes or tokens."""

import click

from shoal.cli.documents import Bundle, read
from shoal.cli.names import OF_KIND
from shoal.cli.options import SINGULAR, ResourceKinds, connect, connection, read_targets, tenant
from shoal.cli.render.output import line, show_refusal
from shoal.cli.render.plan import refuse_problems
from shoal.cli.wrong_word import WrongWord
from shoal.client import RegionClient
from shoal.types.codes import ShoalError

_ORDER = ("Workload", "Policy", "Tenant", "Region")
"""Users of other documents come first, because deleting what is in use is refused with IN_USE."""


@click.command()
@click.argument(
    "kind", required=False, type=ResourceKinds("workloads", "policies", "tenants", "regions", "nodes", "tokens")
)
@click.argument("names", nargs=-1, type=OF_KIND, metavar="[NAME]...")
@click.option(
    "-f",
    "--file",
    "files",
    multiple=True,
    help="Delete the documents of a YAML file or folder, or - for standard input; repeat.",
)
@tenant
@connection
def delete(
    kind: str | None, names: tuple[str, ...], files: tuple[str, ...], tenant: str, context: str, region: str
) -> None:
    """Delete things by KIND NAME or KIND/NAME, or the documents of FILES. A workload's replicas drain first.

    What others use is refused IN_USE. The rest of the list is deleted all the same; the exit status is 255 then.
    """
    if bool(files) == bool(kind):
        said = "a KIND beside -f" if files else "neither a KIND nor -f"
        raise WrongWord(said, "what to delete, as KIND NAME.. or as -f FILE", "", None)
    if kind and not names and "/" not in kind:
        raise WrongWord("no NAME", f"KIND and NAME.. as in `shoal delete {kind} NAME`", f"shoal get {kind}", None)
    if kind:
        wanted = read_targets(kind, names)
        targets = [(SINGULAR[each], name, tenant) for each, found in wanted.items() for name in found]
    else:
        targets = _targets(_read_valid(files))
    with connect(context, region) as api:
        _delete(api, targets)


def _read_valid(files: tuple[str, ...]) -> Bundle:
    bundle = read(files)
    refuse_problems(bundle.problems, "")
    return bundle


def _targets(bundle: Bundle) -> list[tuple[str, str, str]]:
    """(kind, name, tenant) of each document, in an order in which they can be deleted."""
    ordered = sorted(bundle.keys, key=lambda key: _ORDER.index(key.kind))
    return [(key.kind.lower(), key.name, key.tenant) for key in ordered]


def _delete(api: RegionClient, targets: list[tuple[str, str, str]]) -> None:
    """Raises Exit(255) if one of several was refused; the refusal itself if it was the only one."""
    refused = False
    for kind, name, owner in targets:
        try:
            api.delete(kind, name, owner if kind == "workload" else "")
        except ShoalError as error:
            if len(targets) == 1:
                raise
            show_refusal(error.refusal)
            refused = True
        else:
            line(f"deleted {kind} {name}")
    if refused:
        raise click.exceptions.Exit(255)
