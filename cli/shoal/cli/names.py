"""Names as arguments: they are completed in a shell from the region in use, and else taken as they are."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import click
from click.shell_completion import CompletionItem

COMPLETION_S: Final = 2.0
"""Seconds that the region has for all that one completion asks, while somebody waits for it."""
MEMBERS: Final = "members"
"""As a kind of names: this region and those of the federation that it is in. No listing has them."""


class RegionName(click.ParamType[str]):
    """The name of something in the region."""

    name = "name"

    def __init__(self, *kinds: str) -> None:
        """kinds: of what, as listings name it; none: of the kind that the argument before says."""
        self._kinds = kinds

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value and isinstance(param, click.Argument) and (param.required or param.nargs == -1):
            self.fail("an empty name", param, ctx)
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:  # fmt: skip
        before = ctx.params.get("kind") or ""
        if not self._kinds and "/" in before:
            # Then each further one is KIND/NAME too; before the slash there is no name yet.
            of_kind = next(each.type for each in ctx.command.params if each.name == "kind")
            return of_kind.shell_complete(ctx, param, incomplete) if "/" in incomplete else []
        return complete_names(ctx, self._kinds or tuple(filter(None, before.split(","))), incomplete)


class ContextName(click.ParamType[str]):
    """The name of a context on this machine."""

    name = "name"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:  # fmt: skip
        from shoal.client.contexts import Contexts

        with suppress(Exception):
            return [CompletionItem(each.name) for each in Contexts().all() if each.name.startswith(incomplete)]
        return []


class MoveTarget(RegionName):
    """Where a workload may move: a node, a device or another region."""

    def __init__(self) -> None:
        super().__init__("nodes", "devices", MEMBERS)


def complete_names(
    ctx: click.Context, kinds: tuple[str, ...], incomplete: str, prefix: str = ""
) -> list[CompletionItem]:
    """Names of these kinds that begin so, with `prefix` before each: those that the region has told in time."""
    found = list[CompletionItem]()
    with suppress(Exception):  # whoever presses a key wants no error
        found.extend(CompletionItem(prefix + each) for each in _names(ctx, kinds) if each.startswith(incomplete))
    return found


CONTEXT: Final = ContextName()
MODEL: Final = RegionName("models")
NODE: Final = RegionName("nodes")
MIGRATION: Final = RegionName("migrations")
TARGET: Final = MoveTarget()
WORKLOAD: Final = RegionName("workloads")
OF_KIND: Final = RegionName()


def _names(ctx: click.Context, kinds: tuple[str, ...]) -> Iterator[str]:
    """Ends with the first kind that the region does not tell."""
    from shoal.cli.render.listings import name_of, rows_of
    from shoal.client import Contexts, RegionClient

    with RegionClient(Contexts().get(ctx.params.get("context") or ""), COMPLETION_S) as api:
        for kind in kinds:
            if kind == MEMBERS:
                view = api.federation()
                yield from (each.region for each in (view.members if view is not None else ()))
            else:
                yield from (name_of(kind, row) for row in rows_of(api, kind, "", ""))
