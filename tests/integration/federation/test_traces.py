"""Traces by real processes: sent over OTLP to a collector, and drawn by `shoal trace`, the same spans in both."""

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack, documents, policy, region, workload
from harness.servers.otlp_collector import OtlpReceiver, collector
from harness.wait import wait_until

AWAY = "home-2"
X = np.array([[-1, 2, -3, 4]], np.float32)
STAGES = ["planned", "reserved", "shifting", "shifting", "draining"]
"""Of every move; the others are told where the coordinator saw them."""


@pytest.fixture(scope="module")
def traced_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DevStack, OtlpReceiver]]:
    """Two regions of two agents each, all of whose processes know of the collector."""
    folder = tmp_path_factory.mktemp("traced")
    with collector() as found, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.endpoint)
        with region(folder, 2, regions=2, federation=1) as stack:
            yield stack, found


def shoal(stack: DevStack, *arguments: str) -> tuple[str, str]:
    """Its output, and what it says beside it."""
    done = stack.shoal(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def spans_by_id(stack: DevStack, name: str) -> dict[str, dict[str, Any]]:
    """Spans by id, as `shoal trace -o json` has them."""
    out, beside = shoal(stack, "trace", name, "-o", "json")
    assert not beside, beside
    return {span["id"]: span for span in json.loads(out)}


def wait_collected(found: OtlpReceiver, trace: str, ids: set[str]) -> None:
    """All of them arrive at the collector, with the parents that are told."""
    wait_until(
        lambda: {span.span_id.hex() for _, span in found.spans(trace)} >= ids, WAIT_TIMEOUT_S, f"the spans of {trace}"
    )


def drawn_lines(stack: DevStack, name: str) -> list[str]:
    """SPAN and WHERE of each line."""
    out, _ = shoal(stack, "trace", name)
    print(out)
    head, columns, *lines = out.splitlines()
    assert head.startswith("trace ")
    assert columns.split()[:3] == ["SPAN", "WHERE", "TOOK"]
    drawn = [re.match(r"(.*\S) +[\d.]+(?:us|ms|s) +█", line) for line in lines]
    assert all(drawn), out
    return [" ".join(found[1].split()) for found in drawn if found is not None]


def across(stack: DevStack, name: str) -> dict[str, dict[str, Any]]:
    """The spans of one request for a workload of this name, which the other region runs."""
    np.savez(stack.folder / "x.npz", x=X)
    abroad = f"  require: {{residency: [{AWAY}]}}\n  federation: {{delegate: when-infeasible}}\n"
    stack.apply(documents(policy(name, abroad), workload(name, "relu", name)))

    def infer_with_trace() -> str:
        done = stack.shoal("infer", name, "--input", str(stack.folder / "x.npz"), "--trace")
        assert done.returncode == 0, done.stderr
        (trace,) = re.findall(r"shoal trace ([0-9a-f]{32})", done.stderr)
        return str(trace)

    trace = wait_until(infer_with_trace, WAIT_TIMEOUT_S, "an answer from the other region", every_s=0.2)
    spans = wait_until(lambda: spans_by_id(stack, trace), WAIT_TIMEOUT_S, "every node's spans")
    ways = [" ".join((span["region"], span["process"], span["name"])) for span in spans.values()]
    assert {"home front request", "home front attempt", f"{AWAY} front request", f"{AWAY} worker run"} <= set(ways)
    (root,) = [span for span in spans.values() if span["parent"] not in spans]
    assert (root["region"], root["attributes"]["shoal.workload"]) == ("home", f"default/{name}")
    (sent,) = [span for span in spans.values() if span["attributes"].get("shoal.to.region") == AWAY]
    (arrived,) = [span for span in spans.values() if span["attributes"].get("shoal.from.region") == "home"]
    assert arrived["parent"] == sent["id"]
    assert name not in json.dumps([span["attributes"] for span in spans.values() if span["region"] == AWAY])
    assert all(span["seconds"] >= 0 and not span["code"] for span in spans.values())
    lines = drawn_lines(stack, root["trace"])
    assert len(lines) == len(spans)
    assert lines[0].startswith("request home/")
    assert any(re.fullmatch(rf".*run {AWAY}/\S+/worker", line) for line in lines), lines
    return spans


def test_a_request_across_two_regions_is_drawn_as_one(neighbourhood: DevStack) -> None:
    across(neighbourhood, "traced")
    neighbourhood.delete_workloads("traced")


@pytest.mark.long
def test_a_request_across_two_regions_and_what_led_to_it_are_exported(
    traced_stack: tuple[DevStack, OtlpReceiver],
) -> None:
    stack, found = traced_stack
    spans = across(stack, "far")
    (trace,) = {span["trace"] for span in spans.values()}
    wait_collected(found, trace, set(spans))
    exported = {span.span_id.hex(): (service, span) for service, span in found.spans(trace)}
    assert {name: span.parent_span_id.hex() for name, (_, span) in exported.items()} == {
        name: span["parent"] for name, span in spans.items()
    }
    services = {service.rpartition("/")[0] for service, _ in exported.values()}
    assert services == {"shoal-front/home", f"shoal-front/{AWAY}", f"shoal-worker/{AWAY}"}

    (solicitation,) = {event.subject for event in stack.events() if event.code == "SOLICITED"}
    (agreement,) = {event.subject for event in stack.events() if event.code == "GRANTED"}
    negotiation = spans_by_id(stack, solicitation)
    assert spans_by_id(stack, agreement) == negotiation
    by_name = {span["name"]: span for span in negotiation.values()}
    assert [by_name["hold"][key] for key in ("region", "parent")] == [AWAY, by_name["answer"]["id"]]
    assert by_name["award"]["attributes"]["shoal.agreement"] == agreement
    home = {name for name, span in negotiation.items() if span["region"] == "home"}
    wait_collected(found, by_name["award"]["trace"], home)
    (carried,) = wait_until(
        lambda: [span for _, span in found.spans(by_name["award"]["trace"]) if span.name == "fan out"],
        WAIT_TIMEOUT_S,
        "the federation's part",
    )
    assert carried.parent_span_id.hex() == by_name["solicit"]["id"]
    drawn_lines(stack, solicitation)


@pytest.mark.long
def test_a_whole_migration_is_one_trace_before_and_after_its_coordinator_was_killed(
    traced_stack: tuple[DevStack, OtlpReceiver],
) -> None:
    stack, found = traced_stack
    nodes = ("plain-cpu", "edge-npu")
    where = f"  require: {{where: \"node.name in ['{nodes[0]}', '{nodes[1]}']\"}}\n"
    stack.apply(documents(policy("either", where), workload("moving", "relu", "either")))
    (placed,) = stack.wait_serving("moving")
    target = nodes[1 - nodes.index(placed.node)]
    with stack.api() as api:
        move = api.migrate("default", "moving", target).id

    def over() -> bool:
        with stack.api() as api:
            (one,) = api.get("migrations", move).migrations
        assert one.stage != "aborted", one
        return one.stage == "done"

    wait_until(over, 2 * WAIT_TIMEOUT_S, f"{move} to be done")
    spans = spans_by_id(stack, move)
    (root,) = [span for span in spans.values() if not span["parent"]]
    stages = sorted((span for span in spans.values() if span["parent"]), key=lambda span: span["began"])
    assert (root["name"], root["code"], root["attributes"]["shoal.migration"]) == ("migration", "", move)
    assert [span["name"] for span in stages if span["name"] in STAGES] == STAGES
    assert sum(span["seconds"] for span in stages) == pytest.approx(root["seconds"], abs=1e-6), "they fill it"
    wait_collected(found, root["trace"], set(spans))
    (logged,) = [line for line in stack.log_lines("coordinator", "trace_ended") if line["name"] == "migration"]
    assert (logged["shoal.migration"], logged["trace_id"]) == (move, root["trace"])
    assert len(drawn_lines(stack, move)) == len(spans)

    stack.kill("coordinator")
    stack.control.break_member("coordinator", "resume")
    wait_until(lambda: stack.are_nodes_current(), WAIT_TIMEOUT_S, "every node to be heard")
    assert spans_by_id(stack, move) == spans
    assert spans_by_id(stack, root["trace"]) == spans
    stack.delete_workloads("moving")
