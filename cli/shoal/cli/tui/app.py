"""`shoal top` on a terminal: tables that follow the region, by keyboard."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static, TabbedContent, TabPane
from textual.worker import get_current_worker

from shoal.cli.options import SINGULAR
from shoal.cli.render.columns import Cell, fit, shorten
from shoal.cli.render.listings import COLUMNS, cells_of, columns_of, name_of, text_of
from shoal.cli.render.migrations import is_over
from shoal.cli.render.output import clean
from shoal.cli.render.resources import event_line
from shoal.cli.tui.model import RegionSnapshot, move_lines, summarise, summary_text
from shoal.types.codes import ShoalError

LOOK_S: Final = 1.0
"""Seconds between two looks at the region."""
KINDS: Final = ("nodes", "devices", "workloads", "placements", "migrations")
"""Kinds with a table of their own, in the order of their keys."""
TITLES: Final = {"migrations": "moves"}

Look = Callable[[], RegionSnapshot]


class Details(ModalScreen[None]):
    """Everything about one row."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "app.pop_screen", "Back")]
    CSS = """
    Details { align: center middle; }
    Details > VerticalScroll { width: 90%; height: 80%; border: round $primary; padding: 0 1; background: $surface; }
    """

    def __init__(self, text: Text) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(self._text)


class TopApp(App[None]):
    """Looks at the region every second, in a thread of its own."""

    TITLE = "shoal top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; overflow: hidden; }
    #summary { height: 1; padding: 0 1; background: $boost; }
    TabbedContent, ContentSwitcher { height: 1fr; }
    TabPane { height: 1fr; padding: 0; }
    #moving { height: auto; max-height: 60%; padding: 0 1; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"open('{kind}')", TITLES.get(kind, kind).capitalize())
            for number, kind in enumerate((*KINDS, "events"), 1)
        ),
        Binding("q", "quit", "Quit"),
        # Textual's own answer to it is a note that another key quits.
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
    ]

    def __init__(self, look: Look) -> None:
        """look: reads the region. Raises ShoalError."""
        super().__init__()
        self._look = look
        self._before: RegionSnapshot | None = None
        self._shown: RegionSnapshot | None = None

    def compose(self) -> ComposeResult:
        yield Static("…", id="summary")
        with TabbedContent(initial="workloads"):
            for kind in KINDS:
                with TabPane(TITLES.get(kind, kind), id=kind):
                    if kind == "migrations":
                        yield Static("", id="moving")
                    yield DataTable(id=f"table-{kind}", cursor_type="row", zebra_stripes=True)
            with TabPane("events", id="events"), VerticalScroll():
                yield Static("", id="said")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self._follow()

    def on_resize(self) -> None:
        if self._shown is not None:
            self.show(self._shown)

    def action_open(self, kind: str) -> None:
        self.query_one(TabbedContent).active = kind
        if kind in KINDS:
            self.query_one(f"#table-{kind}", DataTable).focus()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        kind = str(event.data_table.id).removeprefix("table-")
        rows = self._shown.rows[kind] if self._shown is not None else ()
        found = next((row for row in rows if name_of(kind, row) == event.row_key.value), None)
        if found is not None:
            self.push_screen(Details(describe(kind, found)))

    @work(thread=True, exclusive=True)
    def _follow(self) -> None:
        worker = get_current_worker()
        while not worker.is_cancelled:
            try:
                found = self._look()
            except ShoalError as error:
                why = f"no answer ({error.code}), asked again"
                self.call_from_thread(self._complain, ": ".join(filter(None, (why, error.refusal.found))))
            else:
                if not worker.is_cancelled:
                    self.call_from_thread(self.show, found)
            time.sleep(LOOK_S)  # noqa: TID251 - a thread of a command of its own

    def _complain(self, text: str) -> None:
        self.query_one("#summary", Static).update(Text(clean(text), style="bold red"))

    def show(self, found: RegionSnapshot) -> None:
        """Draw this look."""
        if self._shown is not found:
            self._before, self._shown = self._shown, found
        text = summary_text(found.region, summarise(found, self._before))
        self.query_one("#summary", Static).update(Text(clean(text), style="bold"))
        for kind in KINDS:
            self._fill(kind, found.rows[kind])
        width = max(40, self.size.width - 4)
        moving = [line for row in found.rows["migrations"] if not is_over(row) for line in move_lines(row, width)]
        self.query_one("#moving", Static).update(Text(clean_lines(moving) or "nothing moves", style="cyan"))
        events = [event_line(event) for event in reversed(found.rows["events"])]
        self.query_one("#said", Static).update(Text(clean_lines(events)))

    def _fill(self, kind: str, rows: Sequence[Any]) -> None:
        """The table anew, its cursor on the same row."""
        table = self.query_one(f"#table-{kind}", DataTable)
        at, top = table.cursor_row, table.scroll_y
        columns = columns_of(kind, wide=False)
        cells = [[_cell(each) for each in cells_of(kind, row, wide=False)] for row in rows]
        # The table has a space on both sides of each cell.
        fitted = fit(columns, cells, max(20, self.size.width - 4))
        table.clear(columns=True)
        for index, width in fitted.widths.items():
            table.add_column(columns[index].name, width=width)
        for row, each in zip(rows, cells, strict=True):
            said = [
                Text(shorten(each[index], width), style=each[index].style) for index, width in fitted.widths.items()
            ]
            table.add_row(*said, key=name_of(kind, row))
        if rows:
            table.move_cursor(row=min(at, len(rows) - 1), animate=False)
            table.scroll_to(y=top, animate=False)


def describe(kind: str, row: Any) -> Text:
    """Every column of the row, a line each."""
    said = {each.name.lower(): each.cell(row) for each in COLUMNS[kind]}
    width = max(map(len, said))
    text = Text(f"{SINGULAR[kind]} {clean(name_of(kind, row))}\n\n", style="bold")
    for name, cell in said.items():
        words = clean(text_of(cell))
        if words not in ("", "-"):
            style = cell.style if isinstance(cell, Cell) else ""
            text.append(f"{name.rjust(width)}  ", "dim").append(f"{words}\n", style)
    return text


def clean_lines(lines: Sequence[str]) -> str:
    return "\n".join(map(clean, lines))


def _cell(cell: str | Cell) -> Cell:
    if isinstance(cell, str):
        return Cell(clean(cell))
    return replace(cell, text=clean(cell.text), short=clean(cell.short), tail=clean(cell.tail))
