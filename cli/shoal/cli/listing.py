"""Listings as every verb that lists gives them: which rows, in which order and form, once or as they change."""

import csv
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem

from shoal.cli import jsonpath
from shoal.cli.options import SINGULAR
from shoal.cli.render.data import as_data, document_yaml
from shoal.cli.render.listings import cells_of, columns_of, name_of, rows_of, show, text_of
from shoal.cli.render.output import clean, console, emit, line, note, notes_above, table_text
from shoal.cli.render.resources import event_line
from shoal.cli.selection import field_of, parse_selector, sort_key
from shoal.types.codes import Code, refuse

if TYPE_CHECKING:
    from shoal.client import RegionClient

F = TypeVar("F", bound=Callable[..., Any])

POLL_S: Final = 1.0
"""Seconds between two looks of --watch."""
DOCUMENTS: Final = ("policies", "tenants")
"""Kinds that are documents and nothing else."""


@dataclass(frozen=True, slots=True)
class Target:
    """What one word of the command line asks for."""

    # As listings name it.
    kind: str
    # Of these alone; empty: of all.
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ListingOptions:
    """How rows are chosen and shown."""

    # table, wide, json, yaml, name, csv, or jsonpath=EXPRESSION.
    output: str
    # Labels that the node of a row has to have, as `parse_selector` reads them.
    selector: str = ""
    # A column's heading, or a field of the row's JSON; empty: as the region lists them.
    sort_by: str = ""
    # Only this tenant's; empty: of all tenants.
    tenant: str = ""
    # Go on, and show what changes.
    watch: bool = False


class OutputFormat(click.ParamType[str]):
    """A form of a listing."""

    name = "format"
    FORMS: Final = ("table", "wide", "json", "yaml", "name", "csv")

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in self.FORMS or value.startswith("jsonpath="):
            return value
        return self.fail(f"{value!r:.80} is none of {', '.join(self.FORMS)}, jsonpath=EXPRESSION", param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(each) for each in (*self.FORMS, "jsonpath=") if each.startswith(incomplete)]

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "FORMAT"


def listing(command: F) -> F:
    """-o, -l, --sort-by and --watch, as `output`, `selector`, `sort_by` and `watch`."""
    for option in (
        click.option("-w", "--watch", is_flag=True, help="Stay, and show what changes."),
        click.option("--sort-by", default="", metavar="COLUMN|FIELD", help="A heading, or a field of the JSON."),
        click.option("-l", "--selector", default="", metavar="LABELS", help="Of nodes with these: site=shop,rack!=2."),
        click.option(
            "-o", "--output", type=OutputFormat(), default="table", show_default=True, envvar="SHOAL_OUTPUT",
            help="table, wide (every column), json, yaml (what apply takes, of documents), name, csv, "
            "jsonpath=EXPRESSION.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def run_listing(api: "RegionClient", targets: Sequence[Target], options: ListingOptions) -> None:
    """Print the listing; with `watch` until it is interrupted. Raises ShoalError."""
    if not options.watch:
        _print_once(targets, _read(api, targets, options), options)
    elif options.output in ("table", "wide") and console.is_terminal:
        _redraw(api, targets, options)
    else:
        _print_changes(api, targets, options)


Rows = Mapping[str, Sequence[Any]]
"""Kind -> its rows."""


def _read(api: "RegionClient", targets: Sequence[Target], options: ListingOptions) -> Rows:
    found: dict[str, list[Any]] = {}
    for target in targets:
        rows = found.setdefault(target.kind, [])
        for name in target.names or ("",):
            rows += rows_of(api, target.kind, name, options.tenant)
    if options.selector:
        found = {kind: _select(api, kind, rows, options.selector) for kind, rows in found.items()}
    if options.sort_by:
        found = {kind: _sort(kind, rows, options.sort_by) for kind, rows in found.items()}
    return found


def _select(api: "RegionClient", kind: str, rows: Sequence[Any], selector: str) -> list[Any]:
    """Rows whose node has the labels. Raises ShoalError(USAGE) for kinds that belong to no node."""
    if kind not in ("nodes", "devices", "placements"):
        raise refuse(Code.USAGE, f"labels of {kind}", "nodes, devices or placements", f"shoal get {kind}, without -l")
    terms = parse_selector(selector)
    known: list[Any] = list(rows if kind == "nodes" else rows_of(api, "nodes", "", ""))
    nodes = [row.node for row in known]
    chosen = {node.name for node in nodes if all(term.matches(node.labels) for term in terms)}
    return [row for row in rows if (row.node.name if kind == "nodes" else row.node) in chosen]


def _sort(kind: str, rows: Iterable[Any], by: str) -> list[Any]:
    """Raises ShoalError(USAGE) if no row has such a column or field."""
    headings = [column.name.lower() for column in columns_of(kind, wide=True)] if kind != "events" else []
    listed = list(rows)
    if by.lower() in headings:
        at = headings.index(by.lower())
        return sorted(listed, key=lambda row: sort_key(text_of(cells_of(kind, row, wide=True)[at])))
    values = [field_of(as_data(row), by) for row in listed]
    if listed and all(value is None for value in values):
        raise refuse(
            Code.USAGE, f"no column or field {by!r:.80} of {kind}", ", ".join(headings), f"shoal get {kind} -o json"
        )
    return [row for _, row in sorted(zip(values, listed, strict=True), key=lambda each: sort_key(each[0]))]


def _print_once(targets: Sequence[Target], rows: Rows, options: ListingOptions) -> None:
    output = options.output
    if output.startswith("jsonpath="):
        items = [as_data(row) for kind in rows for row in rows[kind]]
        alone = len(items) == 1 and len(targets) == 1 and len(targets[0].names) == 1
        text = jsonpath.evaluate(output.partition("=")[2], items[0] if alone else {"items": items})
        print(text, end="" if text.endswith("\n") else "\n")
    elif output == "name":
        for kind, listed in rows.items():
            for row in listed:
                print(f"{SINGULAR[kind]}/{clean(name_of(kind, row))}")
    elif output == "csv":
        _print_csv(rows)
    elif output == "yaml" and (documents := _documents(rows)) is not None:
        print("---\n".join(documents), end="")
    elif output in ("json", "yaml"):
        data = {kind: [as_data(row) for row in listed] for kind, listed in rows.items()}
        emit(data if len(rows) > 1 else next(iter(data.values())), output)
    else:
        some = {kind: listed for kind, listed in rows.items() if listed}
        if not some:
            line("nothing to show")
        for kind, listed in some.items():
            if len(rows) > 1:
                line(kind.upper(), "bold cyan")
            show(kind, listed, wide=output == "wide")
            if len(rows) > 1:
                line("")


def _print_csv(rows: Rows) -> None:
    """Every column, as `-o wide` has them; a kind after the other."""
    out = csv.writer(sys.stdout, lineterminator="\n")
    for kind, listed in rows.items():
        if kind == "events":
            out.writerows([event_line(row)] for row in listed)
            continue
        out.writerow(column.name.lower().replace(" ", "_") for column in columns_of(kind, wide=True))
        out.writerows([clean(text_of(cell)) for cell in cells_of(kind, row, wide=True)] for row in listed)


def _documents(rows: Rows) -> list[str] | None:
    """The documents of these rows as `apply` takes them; None if any row is something else."""
    if rows.keys() - {*DOCUMENTS, "workloads", "regions"}:
        return None
    found = []
    for kind, listed in rows.items():
        for row in listed:
            text = row.document if kind == "workloads" else row.document.text if kind == "regions" else row.text
            if text:
                found.append(document_yaml(text))
    return found


def _redraw(api: "RegionClient", targets: Sequence[Target], options: ListingOptions) -> None:
    """One screen, drawn again at each look."""
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, auto_refresh=False, screen=False) as live, notes_above(console):
        while True:
            parts = []
            found = {kind: listed for kind, listed in _poll(api, targets, options).items() if kind != "events"}
            for kind, listed in found.items():
                if len(found) > 1 and not listed:
                    continue
                wide = options.output == "wide"
                cells = [cells_of(kind, row, wide=wide) for row in listed]
                # The terminal shows Ctrl-C as ^C: on a line that is full, that would begin another one.
                text, _ = table_text(columns_of(kind, wide=wide), cells, console.width - len("^C"))
                parts.append(Text.assemble((f"{kind.upper()}\n", "bold cyan"), text) if len(found) > 1 else text)
            live.update(Text("\n\n").join(parts), refresh=True)
            time.sleep(POLL_S)  # noqa: TID251


def _print_changes(api: "RegionClient", targets: Sequence[Target], options: ListingOptions) -> None:
    """Every row once, and again whenever it has changed. Where programs read the rows, stderr says what is gone."""
    say = line if options.output in ("table", "wide") else note
    before: dict[tuple[str, str], Any] = {}
    while True:
        rows = _poll(api, targets, options)
        now = {(kind, _watched_name(kind, row)): row for kind, listed in rows.items() for row in listed}
        changed = {key: row for key, row in now.items() if _lasting(key[0], row) != before.get(key)}
        for kind in rows:
            fresh = [row for (of, _), row in changed.items() if of == kind]
            if fresh:
                _print_once(targets, {kind: fresh}, options)
        for kind, name in sorted(before.keys() - now.keys()):
            say(f"{SINGULAR[kind]}/{name} is gone")
        sys.stdout.flush()
        before = {key: _lasting(key[0], row) for key, row in now.items()}
        time.sleep(POLL_S)  # noqa: TID251


def _watched_name(kind: str, row: Any) -> str:
    """Unlike `name_of`, of one row alone: two tenants may each have a workload of that name."""
    return f"{row.workload.tenant}/{row.workload.name}" if kind == "workloads" else name_of(kind, row)


def _lasting(kind: str, row: Any) -> Any:
    """What of a row counts as a change: its columns but for those that count the time."""
    if kind == "events":
        return row.sequence
    named = zip(columns_of(kind, wide=False), cells_of(kind, row, wide=False), strict=True)
    return [text_of(cell) for column, cell in named if column.name not in ("AGE", "SEEN", "FREE")]


def _poll(api: "RegionClient", targets: Sequence[Target], options: ListingOptions) -> Rows:
    """As `_read`, also while the region's only coordinator is restarted or none leads. Raises ShoalError."""
    from shoal.client.region import NO_ANSWER_CODES, retry_while

    return retry_while(lambda: _read(api, targets, options), NO_ANSWER_CODES, api.on_outage)
