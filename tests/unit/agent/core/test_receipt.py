"""Which receipts hold, which devices are to be measured."""

from dataclasses import replace
from typing import Any

import pytest

from harness.builders.agent_values import CPU, GPU, receipt
from shoal.agent.core.receipt import (
    check_spread,
    devices_to_probe,
    devices_to_probe_again,
    is_valid,
    valid_receipts,
    with_receipt,
)
from shoal.types.codes import Code
from shoal.types.units import Bytes


@pytest.mark.parametrize(
    "change", [{"driver_version": "2"}, {"runtime_version": "1.32"}, {"provider": "Other"}, {"emulated": True}]
)
def test_any_change_voids_it(change: dict[str, Any]) -> None:
    assert is_valid(receipt(CPU).receipt, CPU)
    assert not is_valid(receipt(CPU).receipt, replace(CPU, **change))


def test_what_was_measured_while_the_machine_did_something_else_is_measured_again() -> None:
    steady = receipt(CPU).receipt
    assert check_spread(replace(steady, spread=10.0)) is None
    torn = replace(steady, spread=34.3)
    refusal = check_spread(torn)
    assert refusal is not None
    assert refusal.code is Code.RECEIPT_ABSURD
    assert not is_valid(torn, CPU)
    assert devices_to_probe((replace(receipt(CPU), receipt=torn),), (CPU,)) == (CPU,)


def test_only_what_is_unmeasured_is_probed() -> None:
    known = (receipt(CPU),)
    assert devices_to_probe((), (CPU, GPU)) == (CPU, GPU)
    assert devices_to_probe(known, (CPU, GPU)) == (GPU,)
    assert devices_to_probe(known, (replace(CPU, runtime_version="1.32"),)) == (replace(CPU, runtime_version="1.32"),)
    assert valid_receipts(known, (GPU,)) == (), "a device that is not there any more"


def test_the_newest_counts_and_a_new_one_takes_its_place() -> None:
    old, new, other = receipt(CPU, 1.0), receipt(CPU, 2.0), receipt(GPU, 1.0)
    assert valid_receipts((new, old, other), (CPU, GPU)) == (new, other)
    assert with_receipt((old, other), new) == (other, new)


def test_a_receipt_that_does_not_say_what_a_provider_takes_is_valid_and_completed() -> None:
    older, newer = (
        replace(signed, receipt=replace(signed.receipt, provider_bytes=Bytes(taken)))
        for signed, taken in ((receipt(CPU), 0), (receipt(GPU), 1))
    )
    assert valid_receipts((older, newer), (CPU, GPU)) == (older, newer)
    assert devices_to_probe((older, newer), (CPU, GPU)) == ()
    assert devices_to_probe_again((older, newer), (CPU, GPU)) == (CPU,)
    assert devices_to_probe_again((), (CPU, GPU)) == (), "nothing is to be completed"


def test_nothing_is_to_be_said_of_an_emulated_device_that_is_no_simulator() -> None:
    emulated = replace(CPU, emulated=True)
    assert devices_to_probe_again((receipt(emulated),), (emulated,)) == ()
    simulated = replace(emulated, simulated=True)
    assert devices_to_probe_again((receipt(simulated),), (simulated,)) == (simulated,)
