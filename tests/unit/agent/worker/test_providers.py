"""What a worker makes of the runtime's division of a graph between providers."""

import math

import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.driver_port import DeviceAccess
from shoal.agent.worker import providers
from shoal.agent.worker.providers import FREE, Partition, Provider, add_provider

FLOPS = {"Conv": 90.0, "Relu": 1.0, "Softmax": 9.0}
COUNTS = st.dictionaries(st.sampled_from([*FLOPS, "Gemm", "Shape", "Transpose"]), st.integers(1, 50))


def test_the_share_is_of_flops() -> None:
    assert math.isclose(Partition({"Conv": 1, "Relu": 1}, {"Softmax": 1}).share_left(FLOPS), 0.09)


def test_arithmetic_of_shapes_is_free() -> None:
    assert {"Shape", "Gather", "Concat", "Reshape"} <= FREE
    assert Partition({"Conv": 1}, {"Shape": 4, "Gather": 4}).share_left(FLOPS) == 0.0


def test_an_unknown_operator_counts_as_the_costliest_where_others_compute_it() -> None:
    assert Partition({"Conv": 1}, {"Gemm": 1}).share_left(FLOPS) == 0.5
    assert Partition({"Gemm": 1}, {"Conv": 1}).share_left(FLOPS) == 1.0


def test_without_known_flops_all_counts_as_left() -> None:
    assert Partition({"Conv": 5}, {"Relu": 1}).share_left({}) == 1.0


@given(COUNTS, COUNTS)
def test_a_share_is_a_share(taken: dict[str, int], left: dict[str, int]) -> None:
    assert 0.0 <= Partition(taken, left).share_left(FLOPS) <= 1.0


def test_cuda_s_libraries_are_loaded_once_before_its_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = list[str]()
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "XExecutionProvider"])
    monkeypatch.setattr(ort, "preload_dlls", lambda: loaded.append("cuda"), raising=False)
    providers.load_cuda_libraries.cache_clear()
    add_provider(ort.SessionOptions(), Provider("XExecutionProvider"))
    assert not loaded, "of other providers, nothing is loaded"
    for _ in range(2):
        added = add_provider(ort.SessionOptions(), Provider("CUDAExecutionProvider"))
        assert added == [("CUDAExecutionProvider", {}), "CPUExecutionProvider"]
    assert loaded == ["cuda"]
    providers.load_cuda_libraries.cache_clear()


def test_options_by_precision() -> None:
    access = DeviceAccess(options={"": {"threads": "$threads", "text": "$5"}, "fp16": {"half": "1"}})
    assert Provider("X", access, "int8", 3).options == {"threads": "3", "text": "$5"}
    assert Provider("X", access, "fp16", 3).options == {"half": "1"}
    assert Provider("X").options == {}
