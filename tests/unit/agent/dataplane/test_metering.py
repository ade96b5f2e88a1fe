"""What a front counts of requests that cross between regions."""

from dataclasses import replace

from shoal.agent.core.routing import Fault
from shoal.agent.dataplane.metering import NEWEST, FrontCollector, Meter
from shoal.types.assignment import Crossing
from shoal.types.latency import bucket_of
from shoal.types.units import Seconds


def test_requests_errors_and_the_p95_of_the_newest() -> None:
    meter = Meter()
    for number in range(NEWEST):
        meter.crossed("ag-1", "east", Seconds(10.0 + number))
    for number in range(1, NEWEST + 1):
        meter.crossed("ag-1", "east", Seconds(number / NEWEST))
    meter.crossed("ag-1", "east", Fault.REPLICA)
    meter.crossed("ag-1", "east", Fault.REQUEST)
    (counted,) = meter.crossings()
    assert replace(counted, latencies=()) == Crossing("ag-1", "east", 2 * NEWEST + 2, 1, Seconds(244 / NEWEST))
    assert sum(counted.latencies) == 2 * NEWEST, "of all that were answered, not of the newest alone"
    assert sum(counted.latencies[bucket_of(10.0) :]) == NEWEST


def test_what_no_agreement_names_any_more_is_forgotten() -> None:
    meter = Meter()
    meter.crossed("ag-1", "east", Fault.BUSY)
    meter.crossed("ag-2", "north", Seconds(0.5))
    meter.forget({"ag-2"})
    assert [(each.agreement, each.requests, sum(each.latencies)) for each in meter.crossings()] == [("ag-2", 1, 1)]
    shown = {
        sample.name for metric in FrontCollector(meter, lambda: 0, lambda: 0).collect() for sample in metric.samples
    }
    assert {"shoal_front_crossings_total", "shoal_front_crossing_p95_seconds"} <= shown
