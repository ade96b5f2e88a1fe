"""How profiles of emulated devices are derived from published results."""

import math
from itertools import pairwise

import pytest
from derive_profiles.fit import HELD_OUT, Fit, figure_of, fit, pace_error, rate_error, split
from derive_profiles.networks import MLPERF, RESNET50, Network, of_matrix
from derive_profiles.results import Result, hailo_results, hub_results, matrix_results, mlperf_result, rknn_results
from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.emulation import nearest, seconds_of


def result(flops: float, seconds: float, precision: str = "int8", weights: float = 1e6, **more: object) -> Result:
    return Result(f"m-{flops:g}", Network(flops, weights, **more), precision, seconds, math.nan, "row")  # type: ignore[arg-type]


@given(st.floats(0.0, 1e-2), st.floats(1e9, 1e14), st.lists(st.floats(1e7, 1e12), min_size=2, max_size=30, unique=True))
def test_a_line_is_found_again(launch_s: float, rate: float, flops: list[float]) -> None:
    results = [result(each, launch_s + each / rate) for each in flops]
    found = fit(results)
    assert 0.0 <= found.launch_s < min(each.latency_s for each in results)
    if max(flops) > 2 * min(flops) and launch_s < 0.5 * (launch_s + min(flops) / rate):
        assert found.flops_per_s == pytest.approx(rate, rel=0.01)
        assert found.launch_s == pytest.approx(launch_s, rel=0.05, abs=0.05 * min(each.latency_s for each in results))


def test_of_one_result_there_is_a_rate_alone() -> None:
    assert fit([result(1e9, 0.5)]) == Fit(0.0, 2e9)


def test_of_one_size_there_is_a_rate_alone() -> None:
    found = fit([result(1e7, 0.5), result(10000000.125, 0.5)])
    assert found.launch_s == 0.0
    assert found.flops_per_s == pytest.approx(2e7)


def test_what_grows_faster_than_its_flops_has_no_launch() -> None:
    found = fit([result(1e9, 0.1), result(2e9, 0.4), result(3e9, 0.9)])
    assert found.launch_s == 0.0
    assert found.flops_per_s > 0


@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.sampled_from(("int8", "fp32"))), min_size=8, max_size=60, unique=True)
)
def test_a_quarter_of_each_precision_is_left_to_the_rates(given_: list[tuple[int, str]]) -> None:
    results = [result(float(flops), 1.0, precision) for flops, precision in given_]
    paced, fitted = split(results)
    assert len(paced) + len(fitted) == len(results)
    assert not {id(each) for each in paced} & {id(each) for each in fitted}
    for precision in {each.precision for each in results}:
        count = sum(each.precision == precision for each in results)
        assert abs(sum(each.precision == precision for each in fitted) - count / HELD_OUT) <= 1


def test_errors_are_factors() -> None:
    paced = [result(flops, seconds) for flops, seconds in ((1e9, 1.0), (2e9, 4.0), (4e9, 4.0))]
    figures = [figure_of(each) for each in paced]
    # by their neighbours: 2 instead of 1, 2 instead of 4, 8 instead of 4
    assert pace_error(figures, 0.0) == (2.0, 2.0)
    assert all(math.isnan(each) for each in pace_error(figures[:2], 0.0))
    assert rate_error({"int8": Fit(0.0, 1e9)}, paced) == 1.0


@given(st.floats(1e6, 1e13), st.floats(1e3, 1e10), st.booleans())
def test_more_flops_take_more_time(flops: float, weights: float, attention: bool) -> None:
    figures = [figure_of(result(each, each / 1e9, attention=attention)) for each in (1e7, 1e9, 1e11)]
    found = nearest(figures, flops, weights, "int8", attention=attention)
    times = [seconds_of(found, 1e-4, flops * more) for more in (0.5, 1.0, 2.0)]
    assert all(earlier < later for earlier, later in pairwise(times))


@pytest.mark.parametrize(
    ("name", "million_multiply_adds"),
    [
        ("mobilenet-v1-0.5-160-quantized", 77),
        ("mobilenet-v2-1.4-224-non-quantized", 582),
        ("mobilenet-v3-small_224_0.75_float", 44),
        ("mobilenet-v3-large-minimalistic_224_1.0_uint8", 209),
        ("efficientnet-lite4-non-quantized", 2640),
    ],
)
def test_networks_are_known_by_their_names(name: str, million_multiply_adds: float) -> None:
    network = of_matrix(name)
    assert network is not None
    assert network.flops == 2e6 * million_multiply_adds


def test_a_network_that_nobody_counts_is_left_out() -> None:
    assert of_matrix("mobilenet-v2-1.3-96-quantized") is None
    assert of_matrix("shufflenet") is None
    assert of_matrix("resnet50") == RESNET50
    assert RESNET50.flops == pytest.approx(2 * 4.09e9, rel=0.01), "as torchvision counts it"
    assert MLPERF["bert-99"].flops == pytest.approx(246e9, rel=0.01)


def test_rows_become_results() -> None:
    closed = {"source": "v3/closed/X/results/Y/resnet50/SingleStream", "latency_ms": "2", "joules_per_query": "0.5"}
    assert mlperf_result([closed], "results/Y", "resnet50").latency_s == 2e-3
    matrix = {
        "model": "efficientnet-lite0-quantized", "system": "S", "compute": "cpu", "latency_p90_ms": "14",
        "joules_per_query": "", "source": "row",
    }  # fmt: skip
    (found,) = matrix_results([matrix, {**matrix, "system": "T"}, {**matrix, "model": "odd"}], "S", "cpu")
    assert (found.precision, found.latency_s) == ("int8", 0.014)
    assert math.isnan(found.joules)
    hub = {
        "model": "resnet50", "device": "D", "runtime": "onnx", "precision": "float", "latency_ms": "1.7",
        "layers_cpu": "0", "layers_gpu": "0",
    }  # fmt: skip
    (found,) = hub_results([hub, {**hub, "layers_cpu": "2"}, {**hub, "model": "odd"}], "D", "onnx")
    assert found.precision == "fp16", "its NPU has no fp32"
    hailo = {"device": "H", "model": "yolov8n", "params_m": "3.2", "ops_g": "8.74", "fps_batch1": "1000"}
    (found,) = hailo_results([hailo, {**hailo, "model": "odd", "ops_g": "-"}], "H")
    assert (found.latency_s, found.network.attention) == (1e-3, False)
    rknn = {"device": "R", "model": "yolov8n", "input": "[1,3,640,640]", "dtype": "INT8", "fps": "50"}
    (found,) = rknn_results([rknn, rknn, {**rknn, "model": "odd"}], "R", {"yolov8n": found.network})
    assert (found.precision, found.latency_s) == ("int8", 0.02)
