"""What a front counts of requests that cross between regions."""

from dataclasses import replace

import pytest

from shoal.agent.core.cross_region_traffic import P95_WINDOW, CrossRegionTraffic
from shoal.types.assignment import AgreementCounts
from shoal.types.codes import Code
from shoal.types.latency import bucket_of
from shoal.types.units import Seconds


def test_requests_errors_and_the_p95_of_the_newest() -> None:
    traffic = CrossRegionTraffic()
    for number in range(P95_WINDOW):
        traffic.add("ag-1", "east", Seconds(10.0 + number))
    for number in range(1, P95_WINDOW + 1):
        traffic.add("ag-1", "east", Seconds(number / P95_WINDOW))
    traffic.add("ag-1", "east", Code.REPLICA_UNREACHABLE)
    traffic.add("ag-1", "east", Code.INVALID_ARGUMENT)
    (counted,) = traffic.agreement_counts()
    assert replace(counted, latencies=()) == AgreementCounts(
        "ag-1", "east", 2 * P95_WINDOW + 2, 1, Seconds(244 / P95_WINDOW), refused=1
    )
    assert sum(counted.latencies) == 2 * P95_WINDOW, "of all that were answered, not of the newest alone"
    assert sum(counted.latencies[bucket_of(10.0) :]) == P95_WINDOW


@pytest.mark.parametrize(
    ("code", "counted_as"),
    [
        (Code.INVALID_ARGUMENT, "refused"),
        (Code.TOO_LARGE, "refused"),
        (Code.CANCELLED, "refused"),
        (Code.DEADLINE_EXCEEDED, "late"),
        (Code.INTERNAL, "errors"),
        (Code.RUNTIME_FAILED, "errors"),
        (Code.OVERLOADED, "errors"),
        (Code.WORKER_CRASHED, "errors"),
    ],
)
def test_a_request_between_regions_without_an_answer_is_counted_by_whose_fault_that_is(
    code: Code, counted_as: str
) -> None:
    traffic = CrossRegionTraffic()
    traffic.add("ag-1", "east", code)
    (counted,) = traffic.agreement_counts()
    assert counted == replace(AgreementCounts("ag-1", "east", 1, 0, Seconds(0.0), counted.latencies), **{counted_as: 1})  # type: ignore[arg-type]


def test_counts_of_other_agreements_are_dropped() -> None:
    traffic = CrossRegionTraffic()
    for agreement in ("ag-1", "ag-2"):
        traffic.add(agreement, "east", Code.OVERLOADED)
    traffic.keep({"ag-2"})
    assert [each.agreement for each in traffic.agreement_counts()] == ["ag-2"]
