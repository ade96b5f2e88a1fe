"""Options that many verbs share, and the connection that they open."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from textwrap import fill
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem

from shoal.cli.names import CONTEXT, complete_names
from shoal.cli.wrong_word import WrongWord
from shoal.client.contexts import Context, Contexts
from shoal.types.codes import Code, Refusal, refuse

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


SHORT: Final = {
    "no": "nodes",
    "dev": "devices",
    "mo": "models",
    "wl": "workloads",
    "pl": "placements",
    "pol": "policies",
    "ten": "tenants",
    "reg": "regions",
    "tok": "tokens",
    "ev": "events",
    "ag": "agreements",
    "mig": "migrations",
}
"""Short name of a kind -> kind as listings name it."""
ALL: Final = ("nodes", "workloads", "placements", "migrations", "agreements")
"""Kinds of `all`: what runs, and where."""
KINDS_HELP: Final = "\b\n" + fill(
    "Kinds: " + ", ".join(f"{kind} ({short})" for short, kind in SHORT.items()), 78, subsequent_indent="  ",
    break_on_hyphens=False,
)  # fmt: skip


class ResourceKinds(click.ParamType[str]):
    """A kind by its plural, singular or short name, several with commas between, or KIND/NAME. The command gets
    plurals."""

    name = "kind"

    def __init__(self, *kinds: str) -> None:
        """kinds: those that there are; none: all, and `all` too."""
        self._kinds = kinds or tuple(SINGULAR)
        self._has_all = not kinds

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        found = list[str]()
        for word in filter(None, value.split(",")):
            kind, slash, name = word.partition("/")
            if kind == "all" and self._has_all and not slash:
                found += ALL
            else:
                found.append(self._plural(kind, ctx) + slash + name)
        return ",".join(dict.fromkeys(found))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, _, last = incomplete.rpartition(",")
        before += "," if before else ""
        word, slash, name = last.partition("/")
        if slash:
            with suppress(WrongWord):
                return complete_names(ctx, (self._plural(word, ctx),), name, f"{before}{word}/")
            return []
        kinds = (*self._kinds, "all") if self._has_all and not before else self._kinds
        return [CompletionItem(before + kind) for kind in kinds if kind.startswith(last)]

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "KIND"

    def _plural(self, word: str, ctx: click.Context | None) -> str:
        for kind in self._kinds:
            if word.lower() in (kind, SINGULAR[kind]) or SHORT.get(word.lower()) == kind:
                return kind
        near = get_close_matches(word, self._kinds, 1)
        remedy = f"{ctx.command_path if ctx else 'shoal'} {near[0]}" if near else ""
        raise WrongWord(f"no kind is called {word!r:.80}", ", ".join(self._kinds), remedy, ctx)


def read_targets(kind: str, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Kind -> names of it, in order. kind: as `ResourceKinds` gives it. Raises ShoalError(USAGE)."""
    if "/" not in kind:
        return {of: tuple(dict.fromkeys(_name_alone(of, each) for each in names)) for of in kind.split(",")}
    found: dict[str, tuple[str, ...]] = {}
    for word in (*kind.split(","), *(ResourceKinds().convert(each, None, None) for each in names)):
        of, slash, name = word.partition("/")
        if not slash or not name:
            raise refuse(Code.USAGE, f"{word!r:.80} beside KIND/NAME", "all of them as KIND/NAME", "node/edge-npu")
        found[of] = (*found.get(of, ()), name)
    return found


def _name_alone(kind: str, name: str) -> str:
    """The name of `get KIND KIND/NAME`, which somebody types who has `-o name` before his eyes."""
    of, _, alone = name.partition("/")
    is_whole = of == SINGULAR[kind] and alone.count("/") == (kind == "devices")
    return alone if is_whole else name


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


class Share(click.ParamType[float]):
    """`10%`."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        with suppress(ValueError):
            share = float(str(value).removesuffix("%")) / 100
            if str(value).endswith("%") and 0 <= share <= 1:
                return share
        return self.fail(f"{value!r} is no share, like 10%", param, ctx)


SHARE = Share()


class TensorShape(click.ParamType[tuple[str, tuple[int, ...]]]):
    """NAME=1x3x48x320, with ? for an axis that stays open."""

    name = "name=1x3x?x320"

    def convert(
        self, value: str | tuple[str, tuple[int, ...]], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, tuple[int, ...]]:
        if isinstance(value, tuple):
            return value
        name, _, text = value.rpartition("=")
        lengths = text.split("x")
        if not name or not all(each == "?" or (each.isdecimal() and len(each) < 11) for each in lengths):
            self.fail(f"{value!r:.80} is not NAME=1x3x48x320", param, ctx)
        return name, tuple(-1 if each == "?" else int(each) for each in lengths)


TENSOR_SHAPE = TensorShape()


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


def _note_outage(why: Refusal | None) -> None:
    from shoal.cli.render.output import note_outage  # only then: rich takes a while to import

    note_outage(why)


@contextmanager
def connect(context: str, region: str) -> "Iterator[RegionClient]":
    """Connect to the leader; the context remembers which of several coordinators it was."""
    found = select_context(context, region)
    from shoal.client.region import RegionClient  # gRPC's import takes longer than to find that no context is in use

    with RegionClient(found) as api:
        api.on_outage = _note_outage
        try:
            yield api
        finally:
            if (addresses := ",".join(api.addresses)) != found.address:
                Contexts().save(replace(found, address=addresses), use=False)
