"""Options that many verbs share, and the connection that they open."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import click

from shoal.client import Context, Contexts, Region, freshen
from shoal.types.codes import Code, refuse

F = TypeVar("F", bound=Callable[..., Any])

FORMATS = ("table", "wide", "json", "yaml")

SINGULAR = {
    "nodes": "node",
    "devices": "device",
    "models": "model",
    "workloads": "workload",
    "placements": "placement",
    "policies": "policy",
    "tenants": "tenant",
    "regions": "region",
    "tokens": "token",
    "events": "event",
    "agreements": "agreement",
    "migrations": "migration",
}
"""The kinds of things, as listings name them and as one of them is called."""


class ResourceKind(click.ParamType[str]):
    """A kind by its plural or singular; the plural is what the command gets."""

    name = "kind"

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds or tuple(SINGULAR)

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        for kind in self._kinds:
            if value in (kind, SINGULAR[kind]):
                return kind
        return self.fail(f"{value!r} is none of {', '.join(self._kinds)}", param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return f"[{'|'.join(self._kinds)}]"


def connection(command: F) -> F:
    """--context and --region."""
    command = click.option("--region", envvar="SHOAL_REGION", default="", help="Refuse any other region than this.")(
        command
    )
    return click.option("--context", envvar="SHOAL_CONTEXT", default="", help="A context of `shoal context ls`.")(
        command
    )


def output(command: F) -> F:
    """-o table|wide|json|yaml."""
    return click.option(
        "-o", "--output", type=click.Choice(FORMATS), default="table", show_default=True, envvar="SHOAL_OUTPUT"
    )(command)


def tenant(command: F) -> F:
    return click.option("--tenant", envvar="SHOAL_TENANT", default="default", show_default=True)(command)


def chosen(context: str, region: str) -> Context:
    """The context to use, renewed if that is due. Raises ShoalError(CONTEXT_UNKNOWN | REGION_MISMATCH)."""
    found = Contexts().get(context)
    if region and found.region != region:
        raise refuse(
            Code.REGION_MISMATCH,
            f"context {found.name} is of region {found.region}",
            f"region {region}",
            "choose another with --context",
        )
    if (refusal := freshen(found)) is not None:
        click.echo(f"not renewed: {refusal}", err=True)
    return found


@contextmanager
def connected(context: str, region: str) -> Iterator[Region]:
    """Where the region has several coordinators, the context remembers which one led."""
    found = chosen(context, region)
    with Region(found) as api:
        try:
            yield api
        finally:
            if (addresses := ",".join(api.addresses)) != found.address:
                Contexts().save(replace(found, address=addresses), use=False)
