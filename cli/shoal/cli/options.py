"""Options that many verbs share, and the connection that they open."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from shoal.cli.names import CONTEXT
from shoal.client.contexts import Context, Contexts
from shoal.types.codes import Code, refuse

if TYPE_CHECKING:
    from shoal.client import RegionClient

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
"""Kind as listings name it -> its singular."""


class ResourceKind(click.ParamType[str]):
    """A kind by its plural or singular name; the command gets the plural."""

    name = "kind"

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds or tuple(SINGULAR)

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        for kind in self._kinds:
            if value in (kind, SINGULAR[kind]):
                return kind
        return self.fail(f"{value!r} is none of {', '.join(self._kinds)}", param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(kind) for kind in self._kinds if kind.startswith(incomplete)]

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return f"[{'|'.join(self._kinds)}]"


class LabelPair(click.ParamType[tuple[str, str]]):
    """NAME=VALUE."""

    name = "name=value"

    def convert(
        self, value: str | tuple[str, str], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, equals, text = value.partition("=")
        return (name, text) if equals and name else self.fail(f"{value!r:.80} is not NAME=VALUE", param, ctx)


LABEL = LabelPair()


def connection(command: F) -> F:
    """--context and --region."""
    command = click.option("--region", envvar="SHOAL_REGION", default="", help="Refuse any other region than this.")(
        command
    )
    return click.option(
        "--context", envvar="SHOAL_CONTEXT", default="", type=CONTEXT, help="A context of `shoal context ls`."
    )(command)


def output(command: F) -> F:
    """-o table|wide|json|yaml."""
    return click.option(
        "-o", "--output", type=click.Choice(FORMATS), default="table", show_default=True, envvar="SHOAL_OUTPUT"
    )(command)


def tenant(command: F) -> F:
    return click.option("--tenant", envvar="SHOAL_TENANT", default="default", show_default=True)(command)


def select_context(context: str, region: str) -> Context:
    """The context to use, renewed if that is due. Raises ShoalError(CONTEXT_UNKNOWN | REGION_MISMATCH)."""
    found = Contexts().get(context)
    if region and found.region != region:
        raise refuse(
            Code.REGION_MISMATCH,
            f"context {found.name} is of region {found.region}",
            f"region {region}",
            "choose another with --context",
        )
    from shoal.client.renewal import renew_if_due  # as in `connect`: cryptography

    if (refusal := renew_if_due(found)) is not None:
        click.echo(f"not renewed: {refusal}", err=True)
    return found


@contextmanager
def connect(context: str, region: str) -> "Iterator[RegionClient]":
    """Connect to the leader; the context remembers which of several coordinators it was."""
    found = select_context(context, region)
    from shoal.client.region import RegionClient  # gRPC's import takes longer than to find that no context is in use

    with RegionClient(found) as api:
        try:
            yield api
        finally:
            if (addresses := ",".join(api.addresses)) != found.address:
                Contexts().save(replace(found, address=addresses), use=False)
