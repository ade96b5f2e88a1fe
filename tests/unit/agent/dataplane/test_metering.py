"""What a front counts of the requests that entered the region there."""

import pytest

from shoal.agent import metrics
from shoal.agent.dataplane.metering import RequestMeter, readings
from shoal.types.codes import Code
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import WorkloadKey


@pytest.mark.parametrize(
    ("code", "own_limit", "lost"),
    [
        (Code.DEADLINE_EXCEEDED, True, 0),
        (Code.DEADLINE_EXCEEDED, False, 1),
        (Code.WORKER_CRASHED, True, 1),
        (Code.INVALID_ARGUMENT, False, 0),
    ],
)
def test_lost_is_no_clients_own_time_out_nor_its_bad_value(code: Code, lost: int, *, own_limit: bool) -> None:
    meter, workload = RequestMeter(), WorkloadKey("shop", "ocr")
    meter.record_entry(workload, "gateway")
    meter.record_failure(workload, "gateway", 1, code, caller_deadline=own_limit)
    (counted,) = meter.ingress()
    assert (counted.requests, counted.refused, counted.lost) == (1, 1 - lost, lost)


@pytest.mark.parametrize(
    ("code", "is_too_early", "own"),
    [
        (Code.INVALID_ARGUMENT, False, 1),
        (Code.CANCELLED, False, 1),
        (Code.DEADLINE_EXCEEDED, True, 1),
        (Code.DEADLINE_EXCEEDED, False, 0),  # the replica hangs: no client could have waited long enough
        (Code.OVERLOADED, False, 0),
        (Code.MODEL_NOT_READY, False, 0),
        (Code.SESSION_LOST, False, 0),
    ],
)
def test_a_refusal_is_counted_by_whose_fault_it_is(code: Code, own: int, *, is_too_early: bool) -> None:
    meter, workload = RequestMeter(), WorkloadKey("shop", "ocr")
    meter.record_failure(workload, "gateway", 1, code, caller_deadline=True, is_too_early=is_too_early)
    (counted,) = meter.ingress()
    assert (counted.refused, counted.client_faults) == (1, own)


def test_a_workload_without_a_route_is_forgotten_once_its_requests_have_ended() -> None:
    meter, kept, gone, busy = RequestMeter(), *(WorkloadKey("shop", name) for name in ("kept", "gone", "busy"))
    for workload in (kept, gone, busy):
        meter.record_entry(workload, "gateway")
        meter.record_answer(workload, "gateway", 1, Seconds(0.1), Elapsed(1.0))
    meter.record_entry(busy, "gateway")
    meter.keep_workloads({kept})
    assert [(each.workload, each.requests) for each in meter.ingress()] == [(kept, 1), (busy, 2)]
    assert [labels for labels, _ in meter.latencies()] == [("shop", "kept"), ("shop", "busy")]
    meter.record_failure(busy, "gateway", 1, Code.WORKER_CRASHED)
    assert [(each.requests, each.answered, each.lost) for each in meter.ingress()] == [(1, 1, 0), (2, 1, 1)]
    meter.keep_workloads({kept})
    assert [each.workload for each in meter.ingress()] == [kept]
    meter.record_entry(gone, "gateway")
    assert [(each.workload, each.requests) for each in meter.ingress()] == [(kept, 1), (gone, 1)], "it begins anew"


class CountedKey(WorkloadKey):
    """Counts how often it is compared."""

    uses = 0
    __hash__ = WorkloadKey.__hash__

    def __eq__(self, other: object) -> bool:
        CountedKey.uses += 1
        return super().__eq__(other)


def test_the_totals_of_a_workload_are_found_among_any_number() -> None:
    meter = RequestMeter()
    for n in range(1000):
        for origin in ("gateway", "east"):
            meter.record_entry(WorkloadKey("shop", f"ocr-{n}"), origin)
            meter.record_failure(WorkloadKey("shop", f"ocr-{n}"), origin, 1, Code.WORKER_CRASHED)
    CountedKey.uses = 0
    assert meter.totals(CountedKey("shop", "ocr-7")).failed == 2
    assert CountedKey.uses < 10


def test_what_no_agreement_names_any_more_is_forgotten() -> None:
    meter = RequestMeter()
    meter.record_traffic("ag-1", "east", Code.OVERLOADED)
    meter.record_traffic("ag-2", "north", Seconds(0.5))
    meter.keep_agreements({"ag-2"})
    assert [(each.agreement, each.requests, sum(each.latencies)) for each in meter.agreement_counts()] == [
        ("ag-2", 1, 1)
    ]
    shown = readings(meter, in_flight=0, ejected=0)
    assert shown[metrics.FRONT_AGREEMENT_REQUESTS] == {
        ("ag-2", "north", outcome): float(outcome == "answered") for outcome in metrics.CROSSED
    }
    assert shown[metrics.FRONT_AGREEMENT_P95] == {("ag-2", "north"): 0.5}


def test_the_outcomes_of_requests_add_up_to_all_of_them() -> None:
    meter = RequestMeter()
    for outcome in (Seconds(0.5), Code.INVALID_ARGUMENT, Code.DEADLINE_EXCEEDED, Code.INTERNAL, Seconds(0.1)):
        meter.record_traffic("ag-1", "east", outcome)
    (counted,) = meter.agreement_counts()
    assert readings(meter, in_flight=0, ejected=0)[metrics.FRONT_AGREEMENT_REQUESTS] == {
        ("ag-1", "east", "answered"): 2,
        ("ag-1", "east", "refused"): 1,
        ("ag-1", "east", "late"): 1,
        ("ag-1", "east", "error"): 1,
    }
    assert counted.requests == 5


def test_a_retry_is_counted_beside_how_the_request_ended() -> None:
    meter, workload = RequestMeter(), WorkloadKey("shop", "ocr")
    meter.record_entry(workload, "gateway")
    meter.record_answer(workload, "gateway", 2, Seconds(0.1), Elapsed(1.0))
    shown, entry = readings(meter, in_flight=0, ejected=0), ("shop", "ocr", "gateway")
    assert shown[metrics.FRONT_RETRIED] == {entry: 1}
    assert sum(float(count) for count in shown[metrics.FRONT_REQUESTS].values() if isinstance(count, int)) == 1
