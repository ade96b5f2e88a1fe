"""`shoal bench load`: how it loads, and what it says of what it found."""

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cli.commands import bench_load
from shoal.cli.commands.bench_load import random_inputs, run_at_rate, run_in_flight
from shoal.cli.load_figures import LoadRequest, figures_of, quantile
from shoal.client.tensors import ModelMetadata, TensorSpec
from shoal.types.codes import Code, ShoalError, refuse


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_one_of_the_values_that_so_many_do_not_exceed(values: list[float], share: float) -> None:
    ordered = sorted(values)
    found = quantile(ordered, share)
    assert found in ordered
    assert sum(value <= found for value in ordered) >= share * len(ordered)
    assert sum(value < found for value in ordered) < share * len(ordered)


def test_what_was_refused_counts_in_no_latency() -> None:
    requests = [LoadRequest(0.1), LoadRequest(5.0, "OVERLOADED"), LoadRequest(0.2), LoadRequest(6.0, "OVERLOADED")]
    found = figures_of("x", requests, 2.0, 0.5)
    assert (found.answers, found.per_s, found.p50_s, found.p99_s, found.client_core) == (2, 1.0, 0.1, 0.2, 0.25)
    assert found.refused == {"OVERLOADED": 2}
    assert math.isnan(figures_of("x", requests[1:2], 2.0, 0.5).p50_s)


async def test_so_many_are_in_flight_and_no_more() -> None:
    inside = most = 0

    async def ask() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)  # noqa: TID251 - the turn of the others
        inside -= 1

    found = await run_in_flight(ask, 7, 0.05, asyncio.Event())
    assert most == 7
    assert found.per_s > 0
    assert found.level == "7 in flight"


async def test_requests_of_a_rate_count_from_when_they_were_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the earlier ones take; those beyond the limit are not begun."""
    monkeypatch.setattr(bench_load, "MOST_IN_FLIGHT", 5)
    ended = asyncio.Event()

    async def ask() -> None:
        await ended.wait()

    running = asyncio.create_task(run_at_rate(ask, 400.0, 0.1, np.random.default_rng(1), asyncio.Event()))
    asyncio.get_running_loop().call_later(0.15, ended.set)
    found = await running
    assert found.refused[Code.OVERLOADED] > 5
    assert found.p50_s >= 0.05


async def test_a_refusal_is_counted_by_its_code() -> None:
    async def ask() -> None:
        raise refuse(Code.TENANT_RATE)

    found = await run_at_rate(ask, 500.0, 0.1, np.random.default_rng(1), asyncio.Event())
    assert found.per_s == 0
    assert found.refused.keys() == {Code.TENANT_RATE}


async def test_an_interrupt_ends_a_load_and_what_it_found_counts() -> None:
    interrupted = asyncio.Event()
    asked = 0

    async def ask() -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)  # noqa: TID251 - the turn of the others
        if asked % 20 == 0:
            interrupted.set()

    at_rate = await run_at_rate(ask, 1000.0, 3600.0, np.random.default_rng(1), interrupted)
    assert at_rate.answers == asked >= 20
    interrupted.clear()
    in_flight = await run_in_flight(ask, 3, 3600.0, interrupted)
    assert in_flight.answers == asked - at_rate.answers > 0


def test_inputs_are_made_for_every_datatype() -> None:
    names = ("BOOL", "INT64", "UINT8", "FP16", "FP32", "BF16", "BYTES")
    metadata = ModelMetadata(tuple(TensorSpec(name, name, (-1, 3)) for name in names), ())
    arrays, datatypes = random_inputs(metadata)
    assert datatypes == {name: name for name in names}
    assert {array.shape for array in arrays.values()} == {(1, 3)}
    assert arrays["FP16"].dtype == np.float16
    with pytest.raises(ShoalError) as refused:
        random_inputs(ModelMetadata((TensorSpec("x", "FP32", (10**5, 10**5)),), ()))
    assert refused.value.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("text", ["0", "a", "1,,2", "-1", "99999"])
def test_levels_that_are_no_numbers_in_flight_are_refused(text: str) -> None:
    with pytest.raises(ShoalError) as refused:
        bench_load._parse_levels(text)
    assert refused.value.code is Code.USAGE
