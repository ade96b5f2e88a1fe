"""What `get` can be asked for: which rows, in which order, in which form."""

import csv
import io
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shoal.cli import jsonpath, listing
from shoal.cli.commands import get as get_module
from shoal.cli.commands.apply import surplus
from shoal.cli.main import shoal
from shoal.cli.options import SHORT, SINGULAR, read_targets
from shoal.cli.render import output
from shoal.cli.render.output import note, note_outage
from shoal.cli.selection import field_of, parse_selector, sort_key
from shoal.cli.wrong_word import WrongWord
from shoal.client import Context, RegionClient
from shoal.client import region as region_module
from shoal.types.codes import Code, ShoalError, refuse
from shoal.v1 import nouns_pb2, operator_pb2

DOCUMENT = '{"apiVersion":"shoal/v1","kind":"Workload","metadata":{"name":"reader"},"spec":{"policy":"mild"}}'


class ThreeNodes(RegionClient):
    """A region that answers from memory."""

    def __init__(self) -> None:
        self.context = Context("dev", "home", "127.0.0.1:1", "/nowhere")
        self.rows = {
            "edge-1": ("ready", {"site": "shop", "rack": "2"}, 30.0),
            "edge-2": ("lost", {"site": "shop"}, 10.0),
            "cloud": ("ready", {"site": "cloud"}, 20.0),
        }
        # Its record of edge-2 does not say since when.
        self.joined_at = {"edge-1": 1_000_000.0, "cloud": time.time() - 300.0}  # noqa: TID251 - the command's own clock
        # They have a workload `reader` too.
        self.other_tenants = list[str]()
        self.looks = 0
        self.on_look: Callable[[int], None] = lambda number: None

    def get(self, kind: str, name: str = "", tenant: str = "") -> operator_pb2.GetReply:
        self.looks += 1
        self.on_look(self.looks)
        if name and name not in (*self.rows, "reader"):
            raise refuse(Code.NOT_FOUND, f"{kind} {name!r}")
        key = nouns_pb2.WorkloadKey(tenant="default", name="reader")
        nodes = {
            each: operator_pb2.NodeView(
                node=nouns_pb2.Node(name=each, role="agent", labels=labels),
                liveness=liveness,
                last_seen=seen,
                joined_at=self.joined_at.get(each, 0.0),
            )
            for each, (liveness, labels, seen) in self.rows.items()
            if name in ("", each)
        }
        return operator_pb2.GetReply(
            nodes=nodes.values() if kind == "nodes" else (),
            devices=[
                operator_pb2.DeviceView(node=each, device=nouns_pb2.Device(name="cpu0"), liveness="ready")
                for each in nodes
            ] if kind == "devices" else (),
            workloads=[operator_pb2.WorkloadView(workload=key, state="ready", document=DOCUMENT)] + [
                operator_pb2.WorkloadView(workload=nouns_pb2.WorkloadKey(tenant=each, name="reader"), state="ready")
                for each in self.other_tenants
            ] if kind == "workloads" else (),
            agreements=[operator_pb2.AgreementView(agreement="g-1", workload=key, state="active")]
            if kind == "agreements" else (),
        )  # fmt: skip


@pytest.fixture
def region(monkeypatch: pytest.MonkeyPatch) -> ThreeNodes:
    found = ThreeNodes()

    @contextmanager
    def connect(*_: object) -> Iterator[ThreeNodes]:
        yield found

    found.on_outage = note_outage
    monkeypatch.setattr(get_module, "connect", connect)
    return found


def run(*words: str) -> str:
    done = CliRunner().invoke(shoal, ["get", *words], catch_exceptions=False)
    return done.stdout


@pytest.mark.usefixtures("region")
def test_kinds_have_short_names_and_come_together() -> None:
    assert set(SHORT.values()) == SINGULAR.keys()
    for word in ("nodes", "node", "no", "NODES"):
        assert run(word, "-o", "name").split() == ["node/edge-1", "node/edge-2", "node/cloud"]
    both = run("no,dev")
    assert both.index("NODES\n") < both.index("edge-1 ") < both.index("DEVICES\n") < both.index("edge-1/cpu0")
    assert [each for each in run("all").splitlines() if each.lower() in SINGULAR] == [
        "NODES",
        "WORKLOADS",
        "AGREEMENTS",
    ]
    assert "agreement/g-1" in run("all", "-o", "name").split(), "a workload that another region runs has no placement"
    assert run("node/cloud", "node/edge-2", "-o", "name").split() == ["node/cloud", "node/edge-2"]
    assert run("node", "cloud", "edge-2", "-o", "name").split() == ["node/cloud", "node/edge-2"]
    assert json.loads(run("no,dev", "-o", "json")).keys() == {"nodes", "devices"}


def test_names_belong_to_their_kind() -> None:
    assert read_targets("nodes,devices", ()) == {"nodes": (), "devices": ()}
    assert read_targets("nodes", ("a", "b", "a")) == {"nodes": ("a", "b")}
    assert read_targets("nodes", ("node/a", "b")) == {"nodes": ("a", "b")}
    assert read_targets("devices", ("device/a/cpu0", "device/cpu0")) == {"devices": ("a/cpu0", "device/cpu0")}
    assert read_targets("devices/a/cpu0", ("wl/reader",)) == {"devices": ("a/cpu0",), "workloads": ("reader",)}
    for kind, names in (("nodes/a", ("b",)), ("nodes/", ())):
        with pytest.raises((ShoalError, WrongWord)):
            read_targets(kind, names)


@pytest.mark.usefixtures("region")
def test_selectors_take_nodes_and_what_is_on_them() -> None:
    assert run("no", "-l", "site=shop", "-o", "name").split() == ["node/edge-1", "node/edge-2"]
    assert run("no", "-l", "site=shop,rack", "-o", "name").split() == ["node/edge-1"]
    assert run("dev", "-l", "site!=shop", "-o", "name").split() == ["device/cloud/cpu0"]
    with pytest.raises(ShoalError) as refused:
        run("wl", "-l", "a=b")
    assert refused.value.code is Code.USAGE


@pytest.mark.parametrize("text", ["=x", "!a=b", "a b"])
def test_a_selector_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ShoalError) as refused:
        parse_selector(text)
    assert refused.value.code is Code.USAGE


@given(st.dictionaries(st.sampled_from("abc"), st.sampled_from("xy")))
def test_a_term_and_its_opposite_never_agree(labels: dict[str, str]) -> None:
    for there, absent in (("a=x", "a!=x"), ("a", "!a")):
        assert parse_selector(there)[0].matches(labels) != parse_selector(absent)[0].matches(labels)


@pytest.mark.usefixtures("region")
def test_rows_are_sorted_by_a_column_or_a_field() -> None:
    assert run("no", "--sort-by", "node", "-o", "name").split() == ["node/cloud", "node/edge-1", "node/edge-2"]
    assert run("no", "--sort-by", "liveness", "-o", "name").split()[0] == "node/edge-2"
    assert run("no", "--sort-by", ".node.labels.rack", "-o", "name").split()[0] == "node/edge-1"
    with pytest.raises(ShoalError, match="no column or field"):
        run("no", "--sort-by", "wheels")


@pytest.mark.usefixtures("region")
def test_nodes_have_an_age_in_every_form_and_the_youngest_is_first() -> None:
    assert run("no", "--sort-by", "age", "-o", "name").split() == ["node/cloud", "node/edge-1", "node/edge-2"]
    rows = {row["node"]: row for row in csv.DictReader(io.StringIO(run("no", "-o", "csv")))}
    assert (rows["cloud"]["age"], rows["edge-1"]["joined"]) == ("5m", "1970-01-12 13:46:40Z")
    assert (rows["edge-2"]["age"], rows["edge-2"]["joined"]) == ("-", "-")
    for loaded in (json.loads(run("no", "-o", "json")), yaml.safe_load(run("no", "-o", "yaml"))):
        assert loaded[0]["joined_at"] == "1970-01-12T13:46:40.000+00:00"
    assert {"AGE", "JOINED"} <= set(run("no", "-o", "wide").splitlines()[0].split())


def test_figures_sort_in_their_units() -> None:
    words = [
        "2s",
        "-",
        "900ms",
        "65.9 TFLOP/s",
        "858 GFLOP/s",
        "7.45GiB",
        "edge",
        "465us [361us..568us]",
        "140mJ (profile)",
    ]
    assert sorted(words, key=sort_key) == [
        "465us [361us..568us]", "140mJ (profile)", "900ms", "2s", "7.45GiB", "858 GFLOP/s", "65.9 TFLOP/s", "edge", "-",
    ]  # fmt: skip
    assert field_of({"a": [{"b": 3}]}, "a.0.b") == 3
    assert field_of({"a": [1]}, "a.7") is None


@pytest.mark.usefixtures("region")
def test_forms_for_programs() -> None:
    lines = run("no", "-o", "csv").splitlines()
    assert lines[0].startswith("node,role,liveness,")
    assert lines[1].startswith("edge-1,agent,ready,")
    assert yaml.safe_load(run("wl", "reader", "-o", "yaml")) == json.loads(DOCUMENT), "what apply takes"
    assert run("no", "-o", "jsonpath={.items[*].node.name}") == "edge-1 edge-2 cloud\n"
    assert run("no", "cloud", "-o", "jsonpath={.liveness}") == "ready\n"


@pytest.mark.parametrize("form", ["name", "csv", "json", "yaml", "jsonpath={.items[*].node.name}", "table", "wide"])
def test_watching_prints_a_row_again_when_it_changes(
    region: ThreeNodes, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """That one is gone is said on stderr where programs read: JSON, say, would be followed by what is none."""
    monkeypatch.setattr(listing, "POLL_S", 0.0)

    def on_look(number: int) -> None:
        if number == 2:
            region.rows["edge-2"] = ("ready", {}, 40.0)
        if number == 3:
            del region.rows["cloud"]
        if number == 4:
            raise KeyboardInterrupt

    region.on_look = on_look
    done = CliRunner().invoke(shoal, ["get", "no", "-o", form, "-w"])
    gone = "node/cloud is gone"
    if form in ("table", "wide"):
        assert done.stdout.splitlines()[-1] == gone
    else:
        assert gone not in done.stdout
        assert done.stderr.splitlines()[0] == gone
    if form == "name":
        assert done.stdout.split("\n") == ["node/edge-1", "node/edge-2", "node/cloud", "node/edge-2", ""]


def test_watching_tells_workloads_of_one_name_apart(region: ThreeNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the last of two tenants' was the only one that was shown."""
    monkeypatch.setattr(listing, "POLL_S", 0.0)
    region.other_tenants = ["bank", "shop"]

    def on_look(number: int) -> None:
        if number == 2:
            region.other_tenants.remove("bank")
        if number == 3:
            raise KeyboardInterrupt

    region.on_look = on_look
    done = CliRunner().invoke(shoal, ["get", "wl", "-o", "jsonpath={range .items[*]}{.workload.tenant} {end}", "-w"])
    assert done.stdout.splitlines() == ["default bank shop "]
    assert done.stderr.splitlines()[0] == "workload/bank/reader is gone"


@pytest.mark.parametrize("code", [Code.COORDINATOR_UNREACHABLE, Code.DEADLINE_EXCEEDED, Code.NOT_LEADER])
def test_watching_says_once_that_nobody_answers_and_once_that_somebody_does(
    region: ThreeNodes, monkeypatch: pytest.MonkeyPatch, code: Code
) -> None:
    """Before, it was silent. No row is told twice, and one that changed meanwhile is told."""
    monkeypatch.setattr(listing, "POLL_S", 0.0)
    monkeypatch.setattr(region_module, "RETRY_PAUSE_S", 0.0)

    def on_look(number: int) -> None:
        if number in (2, 3, 4, 7):
            region.rows["edge-2"] = (f"lost-{number}", {}, 40.0)
            raise refuse(code, "127.0.0.1:1: Connection refused", "the region's coordinator")
        if number == 9:
            raise KeyboardInterrupt

    region.on_look = on_look
    done = CliRunner().invoke(shoal, ["get", "no", "-o", "jsonpath={range .items[*]}{.liveness} {end}", "-w"])
    assert done.stdout.split("\n") == ["ready lost ready ", "lost-4 ", "lost-7 ", ""]
    assert done.stderr.removesuffix("\nAborted!\n").splitlines() == [
        f"127.0.0.1:1: Connection refused ({code}); the region is asked again", "the region answers again",
    ] * 2  # fmt: skip


def test_who_watches_is_told_why_it_ends_where_nobody_answers_for_long(
    region: ThreeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_module, "RESTART_TIMEOUT_S", -1.0)

    def on_look(number: int) -> None:
        raise refuse(Code.COORDINATOR_UNREACHABLE, "nobody there")

    region.on_look = on_look
    with pytest.raises(ShoalError, match="nobody there"):
        run("no", "-w")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_note_stands_above_what_is_drawn_on_the_same_terminal(
    region: ThreeNodes, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """Written to the terminal past the display, it would stand in the middle of the table."""
    screen, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr(listing, "POLL_S", 0.0)
    monkeypatch.setattr(region_module, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(listing, "console", Console(file=screen, force_terminal=True, width=60, no_color=True))
    monkeypatch.setattr(output, "_stderr_console", Console(file=errors, force_terminal=is_terminal, width=60))

    def on_look(number: int) -> None:
        if number == 2:
            raise refuse(Code.COORDINATOR_UNREACHABLE, "nobody there")
        if number == 4:
            raise KeyboardInterrupt

    region.on_look = on_look
    CliRunner().invoke(shoal, ["get", "no", "-w"])
    said = {True: screen, False: errors}[is_terminal].getvalue()
    assert said.index("nobody there") < said.index("the region answers again")
    assert not is_terminal or errors.getvalue() == ""
    note("afterwards")
    assert "afterwards" in errors.getvalue()


def test_a_screen_of_several_kinds_names_each_and_leaves_out_what_is_empty(
    region: ThreeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nothing to show` without a word of what, and columns up to the edge, which ^C then breaks."""
    shown = io.StringIO()
    monkeypatch.setattr(listing, "console", Console(file=shown, force_terminal=True, width=60, no_color=True))

    def on_look(number: int) -> None:
        if number == 3:  # two kinds at each look
            raise KeyboardInterrupt

    region.on_look = on_look
    CliRunner().invoke(shoal, ["get", "no,tokens", "-w"])
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue()).splitlines()
    assert "NODES" in lines
    assert not {"TOKENS", "nothing to show"} & set(lines)
    assert max(map(len, lines)) <= 58


@pytest.mark.usefixtures("region")
@pytest.mark.parametrize("kinds", ["no", "no,devices"])
def test_a_selector_that_nothing_matches_is_said(kinds: str) -> None:
    assert run(kinds, "-l", "site=nowhere") == "nothing to show\n"


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("{.a}", "1"),
        (".a", "1"),
        ("{$.list[0].n}-{.list[-1].n}", "x-y"),
        ("{.list[*].n}", "x y"),
        ('{range .list[*]}{.n}{"\\t"}{@.m}{"\\n"}{end}', "x\t2\ny\t\n"),
        ("{range .list[*]}{range .k[*]}{@}{end};{end}", "pq;;"),
        ("{['a']}", "1"),
        ("{.nope.x}", ""),
        ("{.list[9]}", ""),
        ("{.flag}", "true"),
    ],
)
def test_a_jsonpath_says_what_kubectls_would(expression: str, said: str) -> None:
    data = {"a": 1, "flag": True, "list": [{"n": "x", "m": 2, "k": ["p", "q"]}, {"n": "y"}]}
    assert jsonpath.evaluate(expression, data) == said


@pytest.mark.parametrize("expression", ["{", "{.a", "{end}", "{range .a}", "{.a..b}", "{.a[b]}", "x" * 3000, "{}}"])
def test_a_jsonpath_that_cannot_be_read_is_refused(expression: str) -> None:
    with pytest.raises(ShoalError) as refused:
        jsonpath.evaluate(expression, {"a": 1})
    assert refused.value.code is Code.USAGE


@given(st.text("{}.[]*\"ar end0'$@", max_size=30))
def test_any_expression_is_answered_or_refused(expression: str) -> None:
    codes = set()
    try:
        jsonpath.evaluate(expression, {"a": [{"r": 1}]})
    except ShoalError as error:
        codes.add(error.code)
    assert codes <= {Code.USAGE}


class AppliedRegion(RegionClient):
    """A region with workloads: (tenant, name, policy)."""

    def __init__(self, *workloads: tuple[str, str, str]) -> None:
        self.workloads = workloads

    def get(self, kind: str, name: str = "", tenant: str = "") -> operator_pb2.GetReply:
        if kind == "policies":
            names = sorted({policy for _, _, policy in self.workloads})
            return operator_pb2.GetReply(documents=[operator_pb2.DocumentView(name=name) for name in names])
        views = [
            operator_pb2.WorkloadView(workload=nouns_pb2.WorkloadKey(tenant=tenant, name=name), policy=policy)
            for tenant, name, policy in self.workloads
        ]
        return operator_pb2.GetReply(workloads=views)


def test_pruning_takes_what_the_tenants_of_the_files_have_besides() -> None:
    region = AppliedRegion(
        ("shop", "kept", "common"), ("shop", "old", "common"), ("shop", "older", "rare"), ("bank", "other", "bank"),
    )  # fmt: skip
    assert surplus(region, [("shop", "kept")]) == [
        ("workload", "old", "shop"), ("workload", "older", "shop"), ("policy", "rare", ""),
    ]  # fmt: skip
    assert surplus(region, []) == [], "files without a workload name no tenant"
