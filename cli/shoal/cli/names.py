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
        kinds = self._kinds or tuple(filter(None, [ctx.params.get("kind")]))
        with suppress(Exception):  # whoever presses a key wants no error
            return [CompletionItem(each) for each in _names(ctx, kinds) if each.startswith(incomplete)]
        return []


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


CONTEXT: Final = ContextName()
MODEL: Final = RegionName("models")
NODE: Final = RegionName("nodes")
TARGET: Final = RegionName("nodes", "devices")
WORKLOAD: Final = RegionName("workloads")
OF_KIND: Final = RegionName()


def _names(ctx: click.Context, kinds: tuple[str, ...]) -> list[str]:
    from shoal.cli.render.listings import name_of, rows_of
    from shoal.client import Contexts, RegionClient

    with RegionClient(Contexts().get(ctx.params.get("context") or "")) as api:
        return [name_of(kind, row) for kind in kinds for row in rows_of(api, kind, "", "", COMPLETION_S)]
