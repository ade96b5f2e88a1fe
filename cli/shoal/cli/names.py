"""Names as arguments: they are completed in a shell from the region in use, and else taken as they are."""

from contextlib import suppress
from typing import Final

import click
from click.shell_completion import CompletionItem

COMPLETION_S: Final = 2.0
"""Seconds that the region has to answer while somebody waits for a completion."""


class RegionName(click.ParamType[str]):
    """The name of something in the region."""

    name = "name"

    def __init__(self, *kinds: str) -> None:
        """kinds: of what, as listings name it; none: of the kind that the argument before says."""
        self._kinds = kinds

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:  # fmt: skip
        kinds = self._kinds or tuple(filter(None, (ctx.params.get("kind") or "").split(",")))
        return complete_names(ctx, kinds, incomplete)


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
        super().__init__("nodes", "devices")

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:  # fmt: skip
        return [*super().shell_complete(ctx, param, incomplete), *_regions(ctx, incomplete)]


def complete_names(
    ctx: click.Context, kinds: tuple[str, ...], incomplete: str, prefix: str = ""
) -> list[CompletionItem]:
    """Names of these kinds that begin so, with `prefix` before each; none where the region does not answer."""
    with suppress(Exception):  # whoever presses a key wants no error
        return [CompletionItem(prefix + each) for each in _names(ctx, kinds) if each.startswith(incomplete)]
    return []


CONTEXT: Final = ContextName()
MODEL: Final = RegionName("models")
NODE: Final = RegionName("nodes")
MIGRATION: Final = RegionName("migrations")
TARGET: Final = MoveTarget()
WORKLOAD: Final = RegionName("workloads")
OF_KIND: Final = RegionName()


def _names(ctx: click.Context, kinds: tuple[str, ...]) -> list[str]:
    from shoal.cli.render.listings import name_of, rows_of
    from shoal.client import Contexts, RegionClient

    with RegionClient(Contexts().get(ctx.params.get("context") or "")) as api:
        return [name_of(kind, row) for kind in kinds for row in rows_of(api, kind, "", "", COMPLETION_S)]


def _regions(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """This region and those of the federation that it is in."""
    from shoal.client import Contexts, RegionClient

    with suppress(Exception), RegionClient(Contexts().get(ctx.params.get("context") or "")) as api:
        view = api.federation()
        names = [each.region for each in view.members] if view is not None else []
        return [CompletionItem(each) for each in names if each.startswith(incomplete)]
    return []
