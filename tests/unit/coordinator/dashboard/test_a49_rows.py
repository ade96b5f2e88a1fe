"""A49: what others wrote is text: in JSON it can end no string, and a page gets it by JSON alone."""

import json
import math

import pytest

from shoal.coordinator.api.dashboard.parameters import PARAMETERS_MOST, parameters_of
from shoal.coordinator.api.dashboard.queries import QUERIES
from shoal.coordinator.api.dashboard.rows import (
    MEMORY_STEP,
    TEXT_MOST,
    device_row,
    event_row,
    node_row,
    placement_row,
    plain,
    row_text,
    rows_text,
    workload_row,
)
from shoal.types.codes import Code, ShoalError
from shoal.v1 import nouns_pb2, operator_pb2

SCRIPT = "</script><img src=x onerror=alert(1)>\u2028\n\"'`"


def test_script_in_labels_reasons_and_messages_stays_text() -> None:
    node = operator_pb2.NodeView(
        node=nouns_pb2.Node(name="n", role="agent", labels={"site": SCRIPT}),
        liveness="lost",
        reason=nouns_pb2.Refusal(code="NODE_LOST", found=SCRIPT),
    )
    event = operator_pb2.Event(sequence=1, at=1.0, code="X", subject=SCRIPT, message=SCRIPT)
    table = json.loads(rows_text([("n", row_text(node_row(node))), (SCRIPT, row_text(event_row(event)))]))
    assert table[0][1]["labels"]["site"] == table[0][1]["reason"]["found"] == SCRIPT
    assert table[1][0] == table[1][1]["message"] == SCRIPT
    for line in rows_text([(SCRIPT, row_text(event_row(event)))]).splitlines():
        assert not line.startswith(("event:", "data:", "id:")), "a line of a message must not begin another field"


def test_a_row_is_one_line_so_that_no_text_ends_an_event() -> None:
    event = operator_pb2.Event(sequence=1, at=1.0, code="X", message="a\n\nevent: ended\ndata: {}\r\n\r\n")
    assert "\n" not in row_text(event_row(event))
    assert "\r" not in row_text(event_row(event))


def test_a_node_says_when_it_joined_if_that_is_known() -> None:
    node = nouns_pb2.Node(name="n", role="agent")
    assert (
        node_row(operator_pb2.NodeView(node=node, liveness="ready", joined_at=1.8e9 + 0.4))["joined"] == 1_800_000_000
    )
    assert "joined" not in node_row(operator_pb2.NodeView(node=node, liveness="ready"))


def test_long_texts_are_cut_and_unknown_figures_left_out() -> None:
    view = operator_pb2.DeviceView(node="n", cost_usd_per_h=math.nan, liveness="ready")
    view.device.name, view.device.memory_bytes = "gpu0", 8 * 2**30
    view.reading.free_bytes, view.reading.utilisation = 3 * MEMORY_STEP + 5, 0.0
    view.reading.temperature_c = view.reading.power_w = math.nan
    row = device_row(view)
    assert row["busy"] == 0.0, "measured, and idle"
    assert row["free"] == 3 * MEMORY_STEP
    assert not {"heat", "watts", "cost"} & row.keys()
    assert "free" not in device_row(operator_pb2.DeviceView(node="n")), "no reading"
    event = operator_pb2.Event(sequence=1, at=1.0, code="X", message="m" * 10_000)
    assert len(event_row(event)["message"]) == TEXT_MOST


def test_a_measured_zero_stays_and_is_written_short() -> None:
    view = operator_pb2.DeviceView(node="n", cost_usd_per_h=0.0, liveness="ready")
    view.device.name, view.device.memory_bytes = "gpu0", 8 * 2**30
    view.reading.free_bytes, view.reading.utilisation = MEMORY_STEP - 1, 1.0
    view.reading.temperature_c, view.reading.power_w = 0.0, 15.04
    text = row_text(device_row(view))
    assert '"free":0,"busy":1,"heat":0,"watts":15,"cost":0' in text, "full, which is not unknown"
    assert '"runs"' not in text, "a count of none"
    replica = operator_pb2.PlacementView(node="n")
    replica.observed.served.add(origin="edge", requests=5, joules=0.0, latency_p95_s=0.0, energy_source="measured")
    assert '"p95":0,"joules":0,"energy":"measured"' in row_text(placement_row(replica))
    replica.observed.served[0].joules = math.nan
    assert "joules" not in placement_row(replica), "unknown"


def test_figures_of_a_replica_are_of_all_its_origins() -> None:
    view = operator_pb2.PlacementView(node="n")
    view.observed.phase = "ready"
    for origin, requests, joules, p95 in (("edge", 30, 3.0, 0.02), ("far", 10, 1.0, 0.5), ("idle", 0, 0.0, math.nan)):
        view.observed.served.add(
            origin=origin, requests=requests, errors=1, joules=joules, latency_p95_s=p95, energy_source="measured"
        )
    row = placement_row(view)
    assert (row["requests"], row["errors"], row["p95"], row["joules"]) == (40, 3, 0.02, 0.1)
    counts = operator_pb2.WorkloadView(state="ready")
    counts.ingress.add(origin="edge", requests=7, answered=5, lost=1, refused=1)
    counts.ingress.add(origin="far", requests=2, answered=2)
    assert (workload_row(counts)["answered"], workload_row(counts)["lost"]) == (7, 1)


def test_messages_as_objects_leave_out_what_is_unset_and_unknown() -> None:
    view = operator_pb2.MigrationView(id="m-1", gap_s=math.nan, share=0.25)
    view.stages.add(stage="planned", at=5.0)
    assert plain(view) == {"id": "m-1", "share": 0.25, "stages": [{"stage": "planned", "at": 5.0}]}
    assert plain(nouns_pb2.Node(labels={"a": "b"})) == {"labels": {"a": "b"}}
    json.dumps(plain(view), allow_nan=False)


@pytest.mark.parametrize(
    "query",
    [
        "nme=x", "name=" + "x" * 1000, "name=%00", "name=a%0Ab", "name=%ff", "tenant=%E2%80%A8",
        "&".join(f"name={number}" for number in range(PARAMETERS_MOST + 1)),
    ],
)  # fmt: skip
def test_parameters_that_are_unknown_long_or_unprintable_are_refused(query: str) -> None:
    with pytest.raises(ShoalError) as refused:
        parameters_of(query, ("name", "tenant"))
    assert refused.value.code is Code.INVALID_ARGUMENT


def test_parameters_are_read_as_they_were_typed() -> None:
    assert parameters_of("name=a&tenant=b%20c", ("name", "tenant")) == {"name": "a", "tenant": "b c"}
    assert {"get", "explain", "history", "can-move", "trace", "timeline", "federation", "plan"} == set(QUERIES)
