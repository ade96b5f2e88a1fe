"""Every table in a pseudo-terminal: no line is longer than the terminal is wide, and a pipe gets everything."""

import os
import sys
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.terminal import run_in_terminal
from shoal.cli.render.columns import ELLIPSIS, GAP, Cell, Column, fit, shorten
from shoal.cli.render.resources import show_age

COMMANDS: Final = (
    *(f"get {kind}" for kind in (
        "nodes", "devices", "models", "workloads", "placements", "policies", "tenants", "regions", "tokens", "events",
        "agreements", "migrations",
    )),
    "plan", "explain reader", "can-move reader --to there", "history reader", "doctor", "ca status", "model ls",
    "model inspect reader", "federation regions", "federation bids", "federation agreements", "federation ledger",
    "migrate reader --to there", "node revoke there --reason lost", "token create", "region set price 0.5USD/h",
)  # fmt: skip
"""Command lines whose answers are printed from messages alone."""
_WORDS: Final = {
    "code": "MEMORY_SHORT", "stage": "warming", "state": "progressing", "liveness": "ready", "stand_in": "emulated",
    "sign": "+", "found": "12 MiB free of 64 MiB on the device that was measured last",
    "asked": "64 MiB for the model and what it computes", "remedy": "free 52 MiB, or let it go elsewhere",
    "device": "qualcomm-ai100-dm2", "node": "warehouse-gateway-07", "digest": "sha256:" + "0123456789abcdef" * 4,
}  # fmt: skip
"""Field -> what a filled message says in it."""


def fill(message: Message, depth: int = 0) -> Any:
    """The message with a value in every field, lists of two, down to five levels."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if depth < 5:
                inner = [getattr(message, field.name).add() for _ in range(2)] if field.is_repeated else [
                    getattr(message, field.name)
                ]  # fmt: skip
                for each in inner:
                    each.SetInParent()
                    fill(each, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend([_value(field)] * 2)
        elif field.containing_oneof is None or field.has_presence:
            setattr(message, field.name, _value(field))
    return message


def _value(field: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return _WORDS.get(field.name, f"some-{field.name.replace('_', '-')}-with-a-name")
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b"\1"
    if field.type == FieldDescriptor.TYPE_BOOL:
        return True
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return 1_234_567.25
    return 1 if field.type == FieldDescriptor.TYPE_ENUM else 123_456


def print_everything() -> None:
    """Run every command, as a process of its own does, on a region whose every answer is filled."""
    from shoal.cli import options
    from shoal.cli.main import shoal
    from shoal.client import Context, RegionClient, region
    from shoal.types.codes import ShoalError
    from shoal.v1 import artifacts_pb2, operator_pb2

    methods = {
        **operator_pb2.DESCRIPTOR.services_by_name["Operator"].methods_by_name,
        **artifacts_pb2.DESCRIPTOR.services_by_name["Artifacts"].methods_by_name,
    }
    context = Context("dev", "home", "127.0.0.1:1", "/nowhere")

    class FilledRegion(RegionClient):
        def __init__(self, context: Context) -> None:
            self.context = context

        @property
        def addresses(self) -> tuple[str, ...]:
            return (self.context.address,)

        def close(self) -> None: ...

        def who_am_i(self) -> Any:
            return fill(operator_pb2.WhoAmIReply())

        def coordinators(self) -> dict[str, Any]:
            return {"127.0.0.1:1": fill(operator_pb2.WhoAmIReply()), "127.0.0.1:2": None}

        def events(self, *_: Any, **__: Any) -> Any:
            yield fill(operator_pb2.Event())

        def _call(self, method: str, request: Any, timeout_s: float = 0.0) -> Any:
            reply = fill(GetMessageClass(methods[method].output_type)())
            for plan in getattr(reply, "problems", ()):
                plan.refusal.code = "MEMORY_SHORT"
            if method in ("Plan", "Apply"):
                del reply.problems[:]
            if method == "GetAuthority":
                reply.stage = "issue"
            return reply

    with (
        mock.patch.object(region, "RegionClient", FilledRegion),
        mock.patch.object(options, "select_context", return_value=context),
    ):
        for command in COMMANDS:
            print(f"$ {command}"[:60], flush=True)
            try:
                shoal(command.split(), standalone_mode=False, prog_name="shoal")
            except SystemExit:
                pass
            except ShoalError as error:
                print(f"refused: {error.code}")


def in_a_terminal(columns: int, *command: str) -> list[str]:
    # This file is run too, and finds what pytest found.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    answer = run_in_terminal(columns, sys.executable, *command, environment=environment)
    assert answer.has_colours
    return list(answer.lines)


@pytest.mark.parametrize("columns", [80, 120])
def test_no_table_wraps_in_a_terminal(columns: int) -> None:
    lines = in_a_terminal(columns, __file__)
    assert [line for line in lines if len(line) > columns and " " in line.strip()] == []
    assert not any(line.startswith(("Traceback", "refused")) for line in lines), "\n".join(lines)
    assert sum(line.startswith("$ ") for line in lines) == len(COMMANDS)
    assert any("MEMORY_SHORT" in line for line in lines)


def test_an_error_is_labelled_lines_in_a_terminal_with_its_code_at_the_end() -> None:
    lines = in_a_terminal(60, "-m", "shoal.cli.main", "get", "nods")
    assert lines[:3] == [
        "found:  no kind is called 'nods'",
        "wanted: nodes, devices, models, workloads, placements,",
        "        policies, tenants, regions, tokens, events,",
    ]
    assert lines[-2:] == ["try:    shoal get nodes, or shoal get --help (USAGE)", ""]
    assert max(map(len, lines)) <= 60


columns_of = st.lists(
    st.builds(
        Column, st.text("ABC", max_size=12), st.integers(0, 3), st.integers(0, 10), st.booleans()
    ),
    min_size=1, max_size=7,
)  # fmt: skip


@settings(max_examples=40)
@given(st.data(), columns_of, st.integers(20, 120))
def test_what_fits_is_within_the_width_and_what_stays_stays(
    data: st.DataObject, columns: list[Column], width: int
) -> None:
    cell = st.builds(Cell, st.text("xy é", max_size=60), st.sampled_from(["", "CODE"]))
    rows = data.draw(st.lists(st.lists(cell, min_size=len(columns), max_size=len(columns)), max_size=3))
    whole = fit(columns, rows, None)
    assert len(whole.widths) == len(columns)
    assert not whole.is_cut
    found = fit(columns, rows, width)
    staying = [index for index, column in enumerate(columns) if not column.rank]
    assert set(staying) <= found.widths.keys()
    total = sum(found.widths.values()) + GAP * (len(found.widths) - 1)
    if total > width:  # only where even the least of what stays is too much
        assert max(found.widths.values()) <= 8
    for row in rows:
        for index, wide in found.widths.items():
            assert len(shorten(row[index], wide)) <= max(wide, 1)


def test_a_reason_becomes_its_code_and_a_mark_stays() -> None:
    cell = Cell("MEMORY_SHORT 12MiB free, wanted 64MiB", "MEMORY_SHORT")
    assert shorten(cell, 37) == cell.text
    assert shorten(cell, 20) == "MEMORY_SHORT"
    assert shorten(cell, 30) == f"MEMORY_SHORT 12MiB free, want{ELLIPSIS}"
    device = Cell("edge/qualcomm-ai100 (emulated)", tail=" (emulated)")
    assert shorten(device, 21) == f"edge/qual{ELLIPSIS} (emulated)"


def test_columns_leave_by_rank_and_empty_ones_first() -> None:
    columns = [Column("A"), Column("B", rank=1), Column("C", rank=3), Column("D", rank=2)]
    rows = [[Cell("a" * 10), Cell("-"), Cell("c" * 10), Cell("d" * 10)]]
    found = fit(columns, rows, 34)
    assert (list(found.widths), found.hidden) == ([0, 2, 3], ())
    found = fit(columns, rows, 24)
    assert (list(found.widths), found.hidden) == ([0, 3], ("C",))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (172_800, "2d")]
)
def test_an_age_is_in_one_unit(seconds: float, text: str) -> None:
    assert show_age(seconds) == text


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]
    print_everything()
