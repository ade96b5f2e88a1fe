"""What a load takes, learnt from loads: the law is found, outliers do not bend it, and memory is not under."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders.coordinator_core import profile
from shoal.coordinator import codec
from shoal.coordinator.core.prediction.load_law import (
    LEAST_LOADS,
    LoadSeen,
    LoadSizes,
    load_needs,
    memory_law,
    seconds_law,
    sizes_of,
)
from shoal.types.profile import KernelCost, OperatorCost
from shoal.types.units import Bytes

PROCESSOR = "CPUExecutionProvider"
TRUE = np.array([1.1e7, 2e6, 3.5, 2.2, 1.4, 8e3, 0.8, 2e4])


def sizes(rng: np.random.Generator) -> LoadSizes:
    convolutions = float(rng.integers(2))
    convolved, other = convolutions * 10 ** rng.uniform(5, 7.5), 10 ** rng.uniform(5, 7.5)
    largest = rng.uniform(0.1, 0.9) * max(convolved, other)
    return LoadSizes(
        1.0, convolutions, convolved, other, 10 ** rng.uniform(4, 7), float(rng.integers(5, 400)), largest,
        float(rng.integers(3)),
    )  # fmt: skip


def loads(count: int, noise: float, seed: int = 1) -> list[LoadSeen]:
    rng = np.random.default_rng(seed)
    made = [sizes(rng) for _ in range(count)]
    return [LoadSeen(each, float(np.array(each) @ TRUE) * math.exp(rng.normal(0, noise))) for each in made]


def test_a_law_is_found_from_loads() -> None:
    law = memory_law(loads(30, 0.01), PROCESSOR)
    assert law is not None
    for seen in loads(20, 0.0, seed=2):
        found = law.estimate(seen.sizes, never_under=True)
        assert found.mid == pytest.approx(seen.value, rel=0.06)
        assert found.low < found.mid < found.high


def test_few_loads_make_no_law() -> None:
    assert memory_law(loads(LEAST_LOADS - 1, 0.0), PROCESSOR) is None
    assert seconds_law([], PROCESSOR) is None


def test_intervals_cover_and_memory_is_not_under() -> None:
    inside, under = [], []
    for seed in range(8):
        law = memory_law(loads(24, 0.08, seed), PROCESSOR)
        assert law is not None
        for seen in loads(40, 0.08, seed + 100):
            narrow, safe = law.estimate(seen.sizes), law.estimate(seen.sizes, never_under=True)
            inside.append(narrow.low <= seen.value <= narrow.high)
            under.append(seen.value > 1.05 * safe.high)
    assert 0.85 <= np.mean(inside) <= 0.98
    assert np.mean(under) < 0.05


def test_one_load_that_is_far_off_bends_nothing() -> None:
    honest = loads(30, 0.01)
    law, bent = (
        memory_law(each, PROCESSOR) for each in (honest, [*honest[1:], honest[0]._replace(value=10 * honest[0].value)])
    )
    assert law is not None
    assert bent is not None
    for seen in loads(10, 0.0, seed=3):
        assert bent.estimate(seen.sizes).mid == pytest.approx(law.estimate(seen.sizes).mid, rel=0.05)


def test_what_small_models_take_by_chance_says_nothing_of_large_ones() -> None:
    """Of models of a few operators, most take little and some a whole pool: fifty times what the law says of them."""
    small = [
        LoadSeen(LoadSizes(1.0, 0.0, 0.0, 200.0, 500.0, 1.0), 11e6 if index % 8 == 0 else 2e5) for index in range(160)
    ]
    large = [
        LoadSeen(LoadSizes(1.0, 0.0, 0.0, 1e4, 3.5e7 * share, 200.0), 7e7 * share) for share in (0.1, 0.3, 0.7, 1.0)
    ]
    law = memory_law([*small, *large], PROCESSOR)
    assert law is not None
    found = law.estimate(LoadSizes(1.0, 1.0, 1.3e7, 5e3, 4.3e8, 60.0), never_under=True)
    assert 4.3e8 < found.mid < found.high < 2.5e9
    assert law.estimate(small[0].sizes, never_under=True).high >= 11e6 / 1.2


@settings(deadline=None)
@given(
    st.lists(st.floats(min_value=1e-6, max_value=1e15), min_size=LEAST_LOADS, max_size=20),
    st.sampled_from(("CPUExecutionProvider", "QNNExecutionProvider")),
)
def test_any_values_give_an_interval_in_order(values: list[float], provider: str) -> None:
    rng = np.random.default_rng(0)
    law = seconds_law([LoadSeen(sizes(rng), value) for value in values], provider)
    assert law is not None
    found = law.estimate(sizes(rng))
    assert 0 < found.low <= found.mid <= found.high < math.inf


def test_graphs_inside_nodes_count_apart() -> None:
    costs = tuple(OperatorCost(name, count, 1.0, 1.0) for name, count in (("If", 3), ("Loop", 2), ("Add", 5)))
    found = sizes_of(replace(profile(), costs=costs, largest_weight_bytes=Bytes(70)))
    assert (found.nodes, found.inner_graphs, found.largest_weight_bytes) == (10, 8, 70)
    older = codec.load(LoadSizes, b"[1.0, 0.0, 0.0, 4.0, 5.0, 6.0]")
    assert (older.largest_weight_bytes, older.inner_graphs) == (0, 0)


def test_a_run_uses_again_what_a_load_has_freed() -> None:
    """1.25 bytes for each of `run_bytes`; freed are the file, and half of the further copies."""
    made = replace(profile(), size_bytes=Bytes(1000), run_bytes=Bytes(900), copied_bytes=Bytes(300), kernels=())
    assert sizes_of(made).activation_bytes == 0
    assert 1.25 * sizes_of(made, batch=4).activation_bytes == pytest.approx(1.25 * 3600 - 1000 - 150)
    assert sizes_of(made).other_bytes == 1000 + 100
    older = replace(made, run_bytes=Bytes(0), copied_bytes=Bytes(0), activation_bytes=Bytes(2000))
    assert sizes_of(older).activation_bytes == 2000, "live tensors, which are less than a run takes already"


def test_memory_peaks_as_a_file_is_read_as_it_is_optimised_or_as_it_runs() -> None:
    mib = 2**20

    def phases_of(**changes: object) -> tuple[float, float]:
        """Beside the runtime's code, in MiB: until the model is ready, and by a run beyond that."""
        base = replace(profile(), size_bytes=Bytes(20 * mib), run_bytes=Bytes(mib), costs=(), kernels=())
        found = load_needs(replace(base, **changes)).memory_sizes  # type: ignore[arg-type]
        assert (found.convolution_bytes, found.largest_weight_bytes) == (0, 0)
        return 3 * found.other_bytes / mib, 1.25 * found.activation_bytes / mib

    assert phases_of() == pytest.approx((60 - 8.1, 0)), "as read, as parsed, as tensors"
    assert phases_of(copied_bytes=Bytes(10 * mib)) == pytest.approx((70 - 8.1, 0)), "constants in nodes once more"
    assert phases_of(largest_weight_bytes=Bytes(19 * mib)) == pytest.approx((59, 0)), "packed, after it was read"
    assert phases_of(inner_packed_bytes=Bytes(19 * mib)) == pytest.approx((59, 0)), "all of them, likewise"
    assert phases_of(folded_bytes=Bytes(19 * mib)) == pytest.approx((59, 0)), "beside what they are made of"
    kinds = tuple(OperatorCost(name, 9, 1.0, 1.0) for name in ("Add", "Relu"))
    assert phases_of(costs=kinds) == pytest.approx((60 - 8.1 + 0.16e6 / mib, 0)), "the code of each kind"
    convolution = KernelCost("conv", 2.0, 1.0, 1.0, 10.0 * mib)
    of_weights = {"kernels": (convolution,), "weight_bytes": Bytes(20 * mib)}
    largest = {"largest_convolution_bytes": Bytes(5 * mib), "largest_weight_bytes": Bytes(8 * mib)}
    assert phases_of(**of_weights, **largest) == pytest.approx((2 * 20 + 10 + 3 * 5, 0)), "the largest thrice"
    older = largest | {"largest_convolution_bytes": Bytes(0)}
    assert phases_of(**of_weights, **older) == pytest.approx((2 * 20 + 10 + 3 * 8, 0)), "at most the largest of all"
    assert phases_of(run_bytes=Bytes(100 * mib)) == pytest.approx((60 - 8.1, 20 + 125 - (60 - 8.1)))
    oldest = replace(profile(), run_bytes=Bytes(0))
    assert load_needs(oldest).memory_sizes == sizes_of(oldest)


def test_a_provider_with_a_hundred_megabytes_of_its_own_that_compiles_is_learnt() -> None:
    """As QNN's simulator: 118 MB before any model, and 0.1 to 1 s for what a processor's provider loads in 0.01 s."""
    rng = np.random.default_rng(3)
    made = [
        LoadSizes(1.0, 1.0, file, 1e4, 0.0, nodes, file / 4)
        for file, nodes in zip(10 ** rng.uniform(5, 7, 24), rng.uniform(10, 100, 24), strict=True)
    ]
    taken = [1.18e8 + 4 * each.convolution_bytes + 5e4 * each.nodes for each in made]
    seconds = [0.1 + 6e-8 * each.convolution_bytes + 4e-3 * each.nodes for each in made]
    for law, values in ((memory_law, taken), (seconds_law, seconds)):
        seen = [LoadSeen(each, value) for each, value in zip(made[:12], values, strict=False)]
        learnt = law(seen, "QNNExecutionProvider")
        assert learnt is not None
        for each, value in zip(made[12:], values[12:], strict=True):
            assert learnt.estimate(each).mid == pytest.approx(value, rel=0.1 if law is memory_law else 0.3)


def large_loads(count: int, seed: int, true: LoadSizes) -> list[LoadSeen]:
    """Of models of 80 to 500 MB alone, which tell little of what a session takes."""
    rng = np.random.default_rng(seed)
    found = list[LoadSeen]()
    for file in np.exp(rng.uniform(math.log(8e7), math.log(5e8), count)):
        made = LoadSizes(1.0, 0.0, 0.0, file, 1e6, rng.uniform(50, 400), file / 10)
        found.append(LoadSeen(made, float(np.array(made) @ np.array(true)) * math.exp(rng.normal(0, 0.05))))
    return found


def test_a_small_model_on_a_processor_is_not_taken_for_one_of_a_provider_that_is_large_or_compiles() -> None:
    small = LoadSizes(1.0, 0.0, 0.0, 2e6, 1e6, 50.0, 5e5)
    memory, seconds = LoadSizes(1e7, 0, 0, 3.0, 1.3, 0, 0), LoadSizes(5e-3, 0, 0, 5e-9, 0, 1e-4, 0)
    taken, took = (float(np.array(small) @ np.array(each)) for each in (memory, seconds))
    close, committed, close_s = [], [], []
    for seed in range(20):
        law, law_s = (
            memory_law(large_loads(8, seed, memory), PROCESSOR),
            seconds_law(large_loads(8, seed, seconds), PROCESSOR),
        )
        assert law is not None
        assert law_s is not None
        found = law.estimate(small, never_under=True)
        close.append(abs(found.mid / taken - 1) < 0.3)
        committed.append(found.high / taken)
        close_s.append(abs(law_s.estimate(small).mid / took - 1) < 0.3)
    assert np.mean(close) >= 0.9
    assert np.median(committed) < 2.5
    assert np.mean(close_s) >= 0.8


def test_a_negative_session_leaves_a_least_of_the_prior() -> None:
    """Loads that take less than 3 bytes of each make the law negative for a model of nothing."""
    seen = [LoadSeen(LoadSizes(1.0, 0.0, 0.0, 1e8 * size, 0.0, 0.0), 3e8 * size - 2e8) for size in range(1, 13)]
    law = memory_law(seen, "QNNExecutionProvider")
    assert law is not None
    assert law.estimate(LoadSizes(1.0, 0.0, 0.0, 1e3, 0.0, 0.0)).mid == 1e6
