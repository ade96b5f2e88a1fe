"""What is counted is declared; a page that nobody has given readings says nothing that is not so."""

import math

import pytest

from harness.metrics import FEDERATION, REGION, check_page, values
from shoal.coordinator import metrics
from shoal.coordinator.telemetry.metrics import PrometheusMeter
from shoal.types.codes import Code
from shoal.types.metric import CounterMetric


def test_a_fresh_page_has_every_metric() -> None:
    check_page(PrometheusMeter(metrics.REGION).text(), REGION)
    check_page(PrometheusMeter(metrics.FEDERATION).text(), FEDERATION)


def test_a_follower_and_a_coordinator_without_backups_raise_no_alert() -> None:
    text = PrometheusMeter(metrics.REGION).text()
    for metric in (metrics.STORE_WRITABLE, metrics.BACKUP_MADE):
        (value,) = values(text, metric.name)
        assert math.isnan(value), "0 would say that its store takes no writes, or that its backup is old"


def test_counts_add_up_beside_those_that_stay_at_0() -> None:
    meter = PrometheusMeter(metrics.REGION)
    meter.count(metrics.AUDIT_DROPPED, code=Code.STORE_FULL)
    meter.count(metrics.AUDIT_DROPPED, code=Code.DISK_FULL)
    meter.add(metrics.AUDIT_DROPPED, 2.0, code=Code.DISK_FULL)
    assert sorted(values(meter.text(), metrics.AUDIT_DROPPED.name)) == [0.0, 1.0, 3.0]


def test_nothing_is_counted_that_is_not_declared() -> None:
    meter = PrometheusMeter(metrics.REGION)
    with pytest.raises(KeyError):
        meter.count(CounterMetric(metrics.STEPS_FAILED.name, "a copy"))
    with pytest.raises(ValueError, match="labels"):
        meter.count(metrics.RENEWALS_REFUSED)
    with pytest.raises(ValueError, match="code is none of RENEW_DENIED, CSR_DENIED"):
        meter.count(metrics.RENEWALS_REFUSED, code=Code.OVERLOADED)
    meter.read_at_scrape(lambda: {metrics.REGIONS: {("silent",): 1.0}})
    with pytest.raises(ValueError, match="not declared: shoal_coordinator_regions"):
        meter.text()
