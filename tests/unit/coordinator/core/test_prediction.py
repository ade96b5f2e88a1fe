"""Prediction: the equations of its docstrings by hand, and what measurements do to them."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.builders.coordinator_core import MIB, device, node, profile, receipt, warm
from shoal.coordinator.core.prediction.demand import (
    DemandRow,
    OperatorClass,
    at_shapes,
    block_channels,
    class_of,
    demand_of,
    work_of,
)
from shoal.coordinator.core.prediction.model import Basis, Interval, Prediction
from shoal.coordinator.core.prediction.predict import predict
from shoal.coordinator.core.prediction.roofline import service_seconds
from shoal.coordinator.core.prediction.tails import TAIL_GUESS
from shoal.types.assignment import Measured, Served
from shoal.types.codes import Code, Refusal
from shoal.types.device import Device, DeviceLink, EnergySource
from shoal.types.profile import KernelCost, ModelProfile, OperatorCost, TensorSpec
from shoal.types.receipt import Receipt
from shoal.types.units import Bytes, Joules, Seconds, Watts

CPU = device()
HOST = node("a", CPU)
RECEIPT = receipt(HOST, CPU)


def predict_cpu(
    model: ModelProfile | None = None,
    measured_by: Receipt | None = RECEIPT,
    batch: int = 1,
    measured: Measured | None = None,
    served: tuple[Served, ...] = (),
) -> Prediction:
    found = predict(CPU, measured_by, model or profile(), "fp32", batch, measured, served)
    assert isinstance(found, Prediction)
    return found


def served_stats(requests: int, p50: float, joules: float = 0.4) -> Served:
    total = Joules(joules * requests)
    return Served("eu", requests, 0, Seconds(p50), Seconds(2 * p50), total, EnergySource.ESTIMATED)


def test_roofline_by_hand() -> None:
    model = replace(
        profile(),
        costs=(
            OperatorCost("Conv", 10, 8e9, 1e7),
            OperatorCost("Add", 4, 1e6, 2e8),
            OperatorCost("Reshape", 2, 0, 1e6),
        ),
        weight_bytes=Bytes(0),
    )
    # conv: 8e9 / 1e11 and 1e7 / 1e10; addition: 2e8 / 1e10; reshape, by copying: 1e6 / 1e10
    by_hand = 1e-5 + 15 * 1e-6 + (0.08 + 1e-3) + 0.02 + 1e-4
    found = predict_cpu(model)
    assert found.latency_p50_s.mid == pytest.approx(by_hand)
    assert found.latency_p95_s.mid == pytest.approx(TAIL_GUESS.mid * by_hand)
    assert found.latency_p50_s.high == pytest.approx(by_hand * 2 * 1.05)
    assert found.latency_p50_s.low == pytest.approx(by_hand / 2 / 1.05)
    assert found.joules.mid == pytest.approx(20 * by_hand)
    assert found.joules.low == pytest.approx(20 * by_hand / 2 / 1.05 * 3.59 / 7.65, rel=0.01)
    assert found.joules.high == pytest.approx(20 * by_hand * 2 * 1.05 * 13.69 / 7.65, rel=0.01)
    assert found.basis is Basis.GUESS
    assert found.energy_source is EnergySource.ESTIMATED


def test_memory_is_the_stated_bound() -> None:
    found = predict_cpu(profile(size=10 * MIB))
    assert found.memory_bytes.high == 16 * MIB + 5 * 10 * MIB + 4 * MIB
    assert predict_cpu(profile(size=10 * MIB), batch=4).memory_bytes.high == 16 * MIB + 50 * MIB + 16 * MIB
    newer = replace(profile(size=10 * MIB), run_bytes=Bytes(6 * MIB))
    assert predict_cpu(newer, batch=4).memory_bytes.high == 16 * MIB + 50 * MIB + 2 * 24 * MIB


def test_a_first_load_counts_what_the_provider_takes_before_any_model() -> None:
    """As CUDA on an H200, where workers of one model each took 0.86 to 1.46 GB."""
    model = profile(size=30 * MIB)
    unknown = predict_cpu(model).memory_bytes
    on_processor = replace(RECEIPT, provider_bytes=Bytes(int(9.9 * MIB)))
    assert predict_cpu(model, on_processor).memory_bytes == unknown, "it is in what processes were seen to take"
    cuda = replace(RECEIPT, provider_bytes=Bytes(800_000_000))
    found = predict_cpu(model, cuda).memory_bytes
    assert found.mid - unknown.mid == pytest.approx(800_000_000 - 10 * MIB)
    assert found.low < 0.86e9 + 100 * MIB
    assert found.high > 1.46e9 - 30 * MIB


def test_a_model_that_joined_a_worker_takes_its_provider_s_part_in_the_next_one() -> None:
    cuda = replace(RECEIPT, provider_bytes=Bytes(800 * MIB))
    alone, joined = warm(memory=860 * MIB), replace(warm(memory=60 * MIB), joined=True)
    assert predict_cpu(measured_by=cuda, measured=alone).memory_bytes.mid == 860 * MIB
    assert predict_cpu(measured_by=cuda, measured=joined).memory_bytes.mid == 860 * MIB
    assert predict_cpu(measured_by=None, measured=joined).memory_bytes.mid == 60 * MIB


def test_a_batch_takes_more_than_the_warm_up_by_as_much_as_runs_take_of_their_bytes() -> None:
    model = replace(profile(), run_bytes=Bytes(6 * MIB), run_growth_bytes=Bytes(4 * MIB))
    alone, together = (predict_cpu(model, batch=batch, measured=warm()).memory_bytes for batch in (1, 8))
    assert together.mid - alone.mid == pytest.approx(1.25 * 7 * 4 * MIB)
    assert together.high - alone.high == pytest.approx(2 * 7 * 4 * MIB)
    older = predict_cpu(batch=8, measured=warm()).memory_bytes
    assert older.high - alone.high == pytest.approx(7 * 4 * MIB), "of its live tensors"


def test_a_batch_takes_what_the_profile_says_of_it_and_between_two_no_less_than_either() -> None:
    batches = tuple(Bytes(mib * MIB) for mib in (7, 8, 9, 10, 40, 60, 80, 120, 160))
    model = replace(profile(), run_bytes=Bytes(6 * MIB), run_growth_bytes=Bytes(5 * MIB), batch_run_bytes=batches)
    known = {1: 6, 2: 7, 4: 9, 8: 40, 16: 80, 32: 160}
    assert {each: model.memory_of_run(each) / MIB for each in known} == pytest.approx(known)
    assert model.memory_of_run(5) == pytest.approx((6 + 4 * 3 / 3) * MIB), "as of four"
    assert model.memory_of_run(7) == pytest.approx((6 + 6 * 34 / 7) * MIB), "as of eight"
    assert model.memory_of_run(64) == pytest.approx((160 + 32 * 5) * MIB)
    assert model.memory_of_run(0.5) == pytest.approx(3 * MIB)
    older = replace(model, batch_run_bytes=())
    assert older.memory_of_run(8) == pytest.approx((6 + 7 * 5) * MIB)
    shaped = replace(model, inputs=(TensorSpec("x", "FP32", (-1, 3, 224, 224)),))
    doubled = at_shapes(shaped, {"x": (2, 3, 224, 224)})
    assert [doubled.memory_of_run(each) / MIB for each in (1, 2, 4)] == pytest.approx([7, 9, 40])


@given(st.lists(st.integers(0, 2**40), max_size=8), st.integers(0, 2**40), st.integers(1, 70_000))
def test_any_profile_has_a_memory_of_any_batch(batches: list[int], one: int, batch: int) -> None:
    model = replace(profile(), run_bytes=Bytes(one), batch_run_bytes=tuple(map(Bytes, batches)))
    assert 0 <= model.memory_of_run(batch) < math.inf


def test_what_is_committed_holds_a_file_that_is_mostly_one_convolution() -> None:
    """The file as it was read, its tensors, the weights in a new order, and the largest of them through three copies:
    23 MB took 139 MB."""
    kernels = (KernelCost("conv", 22.0, 1e9, 1e6, 23e6),)
    one = replace(profile(size=23_000_000), run_bytes=Bytes(MIB), weight_bytes=Bytes(23_000_000), kernels=kernels)
    one = replace(one, largest_convolution_bytes=Bytes(18_900_000))
    found = predict_cpu(one).memory_bytes
    assert found.high == pytest.approx(18 * MIB + 3 * 23e6 + 3 * 18.9e6)
    assert 139e6 < found.high < 150e6
    even = replace(one, largest_convolution_bytes=Bytes(1_000_000))
    assert predict_cpu(even).memory_bytes.high == 18 * MIB + 5 * 23_000_000


def test_weights_count_as_bytes_that_are_moved() -> None:
    rates = replace(RECEIPT.rates, matmul_flops={"fp32": 1e15}, conv_flops={"fp32": 1e15})
    model = replace(profile(), costs=(OperatorCost("MatMul", 1, 1e6, 1.1e8),), weight_bytes=Bytes(100_000_000))
    assert service_seconds(demand_of(model), rates, "fp32") == pytest.approx(1e-5 + 1.1e8 / 1e10)


@pytest.mark.parametrize(
    ("where", "arch", "precision", "counts"),
    [
        (device(provider="CPUExecutionProvider"), "x86_64", "fp32", True),
        (device(provider="CPUExecutionProvider"), "amd64", "fp32", True),
        (device(provider="CPUExecutionProvider"), "aarch64", "fp32", False),
        (device(provider="CPUExecutionProvider"), "x86_64", "int8", False),
        (replace(device(provider="CPUExecutionProvider"), emulated=True), "x86_64", "fp32", False),
        (device(provider="CUDAExecutionProvider"), "x86_64", "fp32", False),
        (device(provider="OpenVINOExecutionProvider"), "x86_64", "fp32", False),
    ],
)
def test_copies_between_layouts_count_where_the_runtime_makes_them(
    where: Device, arch: str, precision: str, counts: bool
) -> None:
    kernels = (KernelCost("conv", 2.0, 1e9, 1e7, 1e6),)
    model = replace(profile(), kernels=kernels, layout_copies=3, layout_bytes=Bytes(4_000_000))
    found = demand_of(model, block_channels(where, arch, precision))
    assert found.nodes == 2 + 3 * counts
    by_hand = 1e-5 + 1e-6 + (1e9 / 1e11 + 1.1e7 / 1e10) + counts * (3e-6 + 4e6 / 1e10)
    assert service_seconds(found, RECEIPT.rates, "fp32") == pytest.approx(by_hand)


@pytest.mark.parametrize(("isa", "block"), [("avx avx2 fma avx512f", 16), ("avx avx2 fma", 8), ("", 8)])
def test_blocks_are_as_wide_as_the_processors_registers(isa: str, block: int) -> None:
    where = replace(device(provider="CPUExecutionProvider"), attributes={"isa": isa} if isa else {})
    assert block_channels(where, "x86_64", "fp32") == block


def test_copies_between_layouts_grow_with_the_inputs() -> None:
    kernels = (KernelCost("conv", 1.0, 1e9, 1e7, 1e6, (1e7, 1e8)),)
    model = replace(
        profile(),
        inputs=(TensorSpec("x", "FP32", (-1, 3, 224, 224)),),
        layout_bytes=Bytes(1000),
        kernels=kernels,
    )
    found = at_shapes(model, {"x": (4, 3, 224, 224)})
    assert found.layout_bytes == 4000
    assert found.kernels == (KernelCost("conv", 1.0, 4e9, 4e7, 1e6, (4e7, 4e8)),)


@pytest.mark.parametrize("shape", [(4, 3, 224, 224), (4, 3, 224), (-4, 3, 224, 224)])
def test_in_blocks_zeros_are_multiplied_and_each_image_reads_the_weights(shape: tuple[int, ...]) -> None:
    kernels = (KernelCost("conv", 1.0, 1e9, 1e7, 1e6, (1e8, 2e8)), KernelCost("matmul", 1.0, 1e9, 1e7, 1e6))
    model = replace(profile(), kernels=kernels, reference_shapes={"x": shape})
    images = 4 if shape == (4, 3, 224, 224) else 1
    for block, flops in ((8, 1.1e9), (16, 1.2e9)):
        assert demand_of(model, block).rows == (
            DemandRow(OperatorClass.CONV, flops, 1e7, images * 1e6),
            DemandRow(OperatorClass.MATMUL, 1e9, 1e7, 1e6),
        )
    assert demand_of(model).rows[0] == DemandRow(OperatorClass.CONV, 1e9, 1e7, 1e6)


def test_unsure_profiles_have_wider_intervals() -> None:
    sure, unsure = predict_cpu(), predict_cpu(replace(profile(), confident=False))
    assert unsure.latency_p50_s.high > sure.latency_p50_s.high
    assert unsure.latency_p50_s.mid == sure.latency_p50_s.mid


def test_without_a_rate_nothing_is_made_up() -> None:
    for asked, precision in ((None, "fp32"), (RECEIPT, "fp16")):
        found = predict(CPU, asked, profile(), precision)
        assert isinstance(found, Refusal)
        assert found.code is Code.CAPABILITY_UNMEASURED
    blind = replace(RECEIPT, rates=replace(RECEIPT.rates, active_w=Watts(math.nan), load_bytes=math.nan))
    found = predict(CPU, blind, profile(), "fp32")
    assert isinstance(found, Prediction)
    assert math.isnan(found.joules.mid)
    assert math.isnan(found.load_s.mid)


def cpu_behind(bytes_per_s: float | None) -> Device:
    return replace(CPU, links=(DeviceLink("PCIe 4.0 x16", bytes_per_s, "NVML"),))


@given(st.floats(1e3, 1e14), st.floats(1e3, 1e14), st.integers(0, 2**34))
def test_no_load_is_predicted_to_be_faster_than_the_link_unless_that_was_measured(
    link: float, load: float, weights: int
) -> None:
    model = replace(profile(), weight_bytes=Bytes(weights))
    rates = replace(RECEIPT, rates=replace(RECEIPT.rates, load_bytes=load))
    plain, found = (predict(on, rates, model, "fp32") for on in (CPU, cpu_behind(link)))
    assert isinstance(plain, Prediction)
    assert isinstance(found, Prediction)
    assert math.isnan(plain.transfer_s)
    assert found.transfer_s == weights / link
    assert (found.load_s.mid, found.load_s.high) == (plain.load_s.mid, plain.load_s.high), "the rate was measured there"
    assert plain.load_s.low <= found.load_s.low <= found.load_s.mid
    assert found.load_s.low == pytest.approx(max(plain.load_s.low, min(found.transfer_s, plain.load_s.mid)))


def test_a_first_load_takes_what_its_nodes_and_weights_do_and_no_less_than_was_probed() -> None:
    """A processor does not open 264 nodes in the 3 ms in which it reads 10 MB."""
    few, many = profile(), replace(profile(), costs=(OperatorCost("Conv", 264, 0.0, 0.0),))
    fast, slow = (replace(RECEIPT, rates=replace(RECEIPT.rates, load_bytes=rate)) for rate in (3.5e9, 1e6))
    assert predict_cpu(many, fast).load_s.mid == pytest.approx(
        predict_cpu(few, fast).load_s.mid + (264 - sum(each.nodes for each in few.costs)) * 1e-4
    )
    assert predict_cpu(many, fast).load_s.mid > few.size_bytes / 3.5e9 + 264e-4
    assert predict_cpu(few, slow).load_s.mid >= few.size_bytes / 1e6
    assert predict_cpu(few, slow).load_s.high > 2 * few.size_bytes / 1e6
    found = predict_cpu(many, fast).load_s
    assert 0 < found.low < found.mid < found.high


@given(st.floats(1e3, 1e14), st.floats(1e-4, 1e4))
def test_a_measured_load_wins_over_the_link(link: float, load_s: float) -> None:
    known = replace(warm(), load_s=Seconds(load_s))
    plain, found = (predict(on, RECEIPT, profile(), "fp32", 1, known) for on in (CPU, cpu_behind(link)))
    assert isinstance(plain, Prediction)
    assert isinstance(found, Prediction)
    assert found.load_s == plain.load_s
    if profile().weight_bytes / link <= load_s:
        assert found.transfer_s == profile().weight_bytes / link
    else:
        assert math.isnan(found.transfer_s), "it was faster, so the link is another"


def test_of_an_unknown_load_the_link_takes_a_known_part() -> None:
    """As an emulated device has no load rate."""
    blind = replace(RECEIPT, rates=replace(RECEIPT.rates, load_bytes=math.nan))
    found = predict(cpu_behind(31.5e9), blind, profile(), "fp32")
    assert isinstance(found, Prediction)
    assert all(map(math.isnan, found.load_s)), "what else it does is not made up"
    assert found.transfer_s == pytest.approx(profile().weight_bytes / 31.5e9)


@pytest.mark.parametrize("bytes_per_s", [None, math.nan, 0.0, -1.0])
def test_a_link_that_does_not_say_what_it_carries_takes_unknown_time(bytes_per_s: float | None) -> None:
    found = predict(cpu_behind(bytes_per_s), RECEIPT, profile(), "fp32")
    assert isinstance(found, Prediction)
    assert math.isnan(found.transfer_s)
    assert found.load_s == predict_cpu().load_s
    peer = replace(CPU, links=(DeviceLink("NVLink x4", 1e9, "NVML", "gpu1"),))
    assert peer.host_link is None


def test_one_class_stands_in_for_the_other() -> None:
    only_matmul = replace(RECEIPT, rates=replace(RECEIPT.rates, conv_flops={}))
    assert predict_cpu(measured_by=only_matmul).latency_p50_s == predict_cpu().latency_p50_s


def test_warmup_replaces_the_roofline_and_service_the_warmup() -> None:
    warmed = predict_cpu(measured=warm(p50=0.05, samples=16))
    assert warmed.basis is Basis.HERE
    assert warmed.latency_p50_s.mid == 0.05
    assert warmed.memory_bytes.mid == 60 * MIB
    mixed = predict_cpu(measured=warm(p50=0.05, samples=16), served=(served_stats(16, 0.07),))
    assert mixed.latency_p50_s.mid == pytest.approx(0.06)
    long = predict_cpu(
        measured=warm(p50=0.05, samples=16), served=(served_stats(10_000, 0.07), served_stats(10_000, 0.09))
    )
    assert long.basis is Basis.HERE
    assert long.latency_p50_s.mid == pytest.approx(0.08, rel=0.01)
    assert long.joules.mid == pytest.approx(0.4, rel=0.01)
    width = [found.latency_p50_s.high / found.latency_p50_s.mid for found in (predict_cpu(), warmed, long)]
    assert width == sorted(width, reverse=True)


@pytest.mark.parametrize(("is_emulated", "half"), [(False, 1.0), (True, 0.05)])
def test_one_run_of_an_emulated_device_says_what_all_others_take(is_emulated: bool, half: float) -> None:
    """A vendor's simulator is asked once, since a run of it may take seconds."""
    found = predict(device(emulated=is_emulated), RECEIPT, profile(), "fp32", measured=warm(p50=0.05, samples=1))
    assert isinstance(found, Prediction)
    assert found.latency_p50_s == pytest.approx((0.05 * (1 - half), 0.05, 0.05 * (1 + half)))


def test_a_measurement_needs_no_receipt() -> None:
    assert predict_cpu(measured_by=None, measured=warm(p50=0.05)).latency_p50_s.mid == 0.05


def test_mixed_sources_of_energy_are_an_estimate() -> None:
    measured = replace(warm(), energy_source=EnergySource.MEASURED)
    assert predict_cpu(measured=measured).energy_source is EnergySource.MEASURED
    assert predict_cpu(measured=measured, served=(served_stats(5, 0.02),)).energy_source is EnergySource.ESTIMATED


def test_what_an_assignment_carries_of_the_profile() -> None:
    work = work_of(profile(flops=1e9))
    assert (work.conv_flops, work.matmul_flops, work.other_flops) == (0.8e9, 0.2e9, 1e6)
    assert work.nodes == 48
    assert work.bytes == profile().bytes_moved
    assert work.shapes == {"x": (1, 3, 224, 224)}


def test_classes_of_operators() -> None:
    assert [class_of(name) for name in ("Gemm", "Conv", "Transpose", "Softmax", "MyOwn")] == [
        OperatorClass.MATMUL,
        OperatorClass.CONV,
        OperatorClass.COPY,
        OperatorClass.ELEMENTWISE,
        OperatorClass.ELEMENTWISE,
    ]


@given(st.floats(1e6, 1e12), st.floats(1e8, 1e14), st.integers(1, 64), st.floats(0, 1))
def test_law_intervals_are_ordered_and_faster_devices_are_faster(
    flops: float, rate: float, batch: int, spread: float
) -> None:
    slow, fast = (receipt(HOST, CPU, flops=each, spread=spread) for each in (rate, 10 * rate))
    model = profile(flops=flops)
    a, b = (predict_cpu(model, each, batch) for each in (slow, fast))
    for found in (a, b):
        for each in (found.latency_p50_s, found.latency_p95_s, found.memory_bytes, found.load_s, found.joules):
            assert isinstance(each, Interval)
            assert 0 <= each.low <= each.mid <= each.high
    assert b.latency_p50_s.mid <= a.latency_p50_s.mid
    assert predict_cpu(model, slow, batch + 1).latency_p50_s.mid >= a.latency_p50_s.mid


def test_only_energy_that_nothing_counted_has_the_range_of_processors() -> None:
    def ends(source: EnergySource, *served: Served) -> tuple[float, float]:
        known = predict(CPU, RECEIPT, profile(), "fp32", 1, replace(warm(), energy_source=source), served)
        assert isinstance(known, Prediction)
        return known.joules.low / known.joules.mid, known.joules.high / known.joules.mid

    counted, profiled, estimated = (ends(each) for each in EnergySource)
    assert counted == profiled
    assert estimated == pytest.approx((0.47 * counted[0], 1.79 * counted[1]))
    served = replace(served_stats(1, 0.01), energy_source=EnergySource.PROFILE)
    both = ends(EnergySource.PROFILE, served)
    assert ends(EnergySource.MEASURED, served) == both, "both were counted, though not alike"
    assert ends(EnergySource.ESTIMATED, served) == pytest.approx((0.47 * both[0], 1.79 * both[1]))
