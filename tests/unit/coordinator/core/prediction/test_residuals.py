"""What a region learns from its warm-ups: rooflines corrected where they were seen to miss, and by how much sure."""

import json
import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from immutables import Map
from numpy.typing import NDArray

from harness.builders.coordinator_core import device, node, profile, receipt
from shoal.coordinator import codec
from shoal.coordinator.core.prediction.demand import PROCESSOR, OperatorClass, demand_of
from shoal.coordinator.core.prediction.load_law import LEAST_LOADS, LoadNeeds, LoadSizes
from shoal.coordinator.core.prediction.model import Basis, Correction, Prediction
from shoal.coordinator.core.prediction.predict import ROOFLINE_FACTOR, predict
from shoal.coordinator.core.prediction.region_residuals import RegionResiduals, region_residuals
from shoal.coordinator.core.prediction.residuals import (
    MOST_RATIO,
    DeviceClass,
    Residual,
    class_of_device,
    residual_of,
)
from shoal.coordinator.core.prediction.roofline import service_parts, service_seconds
from shoal.coordinator.core.prediction.shared_variances import NORMAL_QUANTILE
from shoal.coordinator.core.prediction.tails import TAIL_GUESS
from shoal.types.assignment import Measured
from shoal.types.device import EnergySource
from shoal.types.units import Bytes, Joules, Seconds


def mix_of(launch: float, **shares: float) -> tuple[float, ...]:
    return (launch, *(shares.get(kind.value, 0.0) for kind in OperatorClass))


CONV, MATMUL = mix_of(0.1, conv=0.8, elementwise=0.1), mix_of(0.1, matmul=0.8, elementwise=0.1)
BOARD, BOX = DeviceClass("CPUExecutionProvider", "maker board"), DeviceClass("CPUExecutionProvider", "maker box")
CARD = DeviceClass("CUDAExecutionProvider", "maker card")


def residual(
    factor: float, model: str = "a", where: DeviceClass = BOARD, mix: tuple[float, ...] = CONV
) -> Residual:  # fmt: skip
    return Residual(model, where, mix, math.nan, log_ratio_of_sum=math.log(factor))


def warm_up_of(latency_s: float) -> Measured:
    latency, source = Seconds(latency_s), EnergySource.ESTIMATED
    return Measured(Seconds(0.1), Bytes(2**20), latency, latency, Joules(1.0), source, 20)


def correction(seen: list[Residual], model: str, where: DeviceClass, mix: tuple[float, ...] = CONV) -> Correction:
    found = RegionResiduals(seen).correction(model, where, mix)
    assert found is not None
    return found


def test_nothing_measured_corrects_nothing() -> None:
    assert RegionResiduals(()).correction("a", BOARD, CONV) is None
    absurd = [
        residual(2 * MOST_RATIO),
        replace(residual(2), log_ratio_of_sum=math.nan),
        replace(residual(2), mix=mix_of(2.0)),
    ]
    absurd += [replace(residual(2), mix=()), replace(residual(2), mix=mix_of(math.nan))]
    absurd.append(replace(residual(2), mix=(0.1, 0.0, 0.8, 0.0, 0.1)))  # of a version with four operator classes
    assert RegionResiduals(absurd).correction("a", BOARD, CONV) is None


@pytest.mark.parametrize(
    ("model", "where", "basis"),
    [
        ("a", BOARD, Basis.SAME_CLASS),
        ("b", BOARD, Basis.CALIBRATED),
        ("a", BOX, Basis.TRANSFERRED),
        ("b", CARD, Basis.TRANSFERRED),
    ],
)
def test_a_prediction_says_how_it_knows(model: str, where: DeviceClass, basis: Basis) -> None:
    assert correction([residual(3)], model, where).basis is basis


def test_the_nearer_the_measurement_the_more_it_counts_and_the_surer_it_is() -> None:
    seen = [residual(3), residual(3, "c")]
    near = [
        correction(seen, "a", BOARD),
        correction(seen, "b", BOARD),
        correction(seen, "b", BOARD, MATMUL),
        correction(seen, "b", BOX, MATMUL),
        correction(seen, "b", CARD, MATMUL),
    ]
    assert [each.mid for each in near] == sorted((each.mid for each in near), reverse=True)
    assert near[0].mid == pytest.approx(3, rel=0.2)
    widths = [each.high / each.low for each in near]
    assert widths == sorted(widths)
    assert widths[0] < ROOFLINE_FACTOR**2


def test_few_measurements_on_a_new_class_transfer_to_its_other_models() -> None:
    """A class that is 2.5 times as slow as promised, whatever the model, which others are not."""
    others = [residual(1.2, model, where) for model in "abcdefgh" for where in (BOX, CARD)]
    errors = []
    for count in (0, 1, 5):
        seen = [*others, *(residual(3.0, model) for model in "abcdefgh"[:count])]
        errors.append(abs(math.log(correction(seen, "h", BOARD).mid / 3.0)))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.25 < errors[0]


def test_one_liar_does_not_decide() -> None:
    honest = [residual(1.5, model) for model in "abcdefgh"]
    lied = [*honest, residual(0.002, "z")]
    assert correction(lied, "q", BOARD).mid == pytest.approx(correction(honest, "q", BOARD).mid, rel=0.35)


def test_intervals_cover_models_that_were_left_out() -> None:
    covered = []
    for seed in range(12):
        chance = np.random.default_rng(seed)
        bias = dict(zip((BOARD, BOX, CARD), chance.normal(0.5, 0.4, 3), strict=True))
        taste = dict(zip("abcdefghijkl", chance.normal(0, 0.35, 12), strict=True))
        truth = [
            residual(math.exp(bias[where] + taste[model] + chance.normal(0, 0.1)), model, where)
            for where in bias
            for model in taste
        ]
        for model in taste:
            seen = [each for each in truth if each.model != model]
            for each in truth:
                if each.model == model:
                    found = correction(seen, model, each.device_class)
                    covered.append(found.low <= math.exp(each.log_ratio_of_sum) <= found.high)
    assert 0.85 <= np.mean(covered) <= 0.97


def test_a_correction_is_of_the_values_alone() -> None:
    seen = (residual(2), residual(3, "b"), residual(2.2, where=BOX))
    stored = Map(enumerate(seen))
    again = Map((key, replace(each)) for key, each in reversed(tuple(stored.items())))
    assert region_residuals(stored) is region_residuals(again)
    turned = RegionResiduals(seen[::-1]).correction("c", BOARD, CONV)
    assert turned == RegionResiduals(seen).correction("c", BOARD, CONV)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(), st.sampled_from("abc"), st.sampled_from([BOARD, BOX, CARD])), max_size=8))
def test_any_store_gives_an_interval_in_order_or_none(store: list[tuple[float, str, DeviceClass]]) -> None:
    seen = [Residual(model, where, CONV, math.nan, log_ratio_of_sum=ratio) for ratio, model, where in store]
    found = RegionResiduals(seen).correction("a", CARD, MATMUL)
    assert found is None or 0 < found.low <= found.mid <= found.high < math.inf


def test_a_residual_compares_with_the_receipt() -> None:
    host = node("n", device())
    rates, demand = receipt(host, device()).rates, demand_of(profile())
    promised = service_seconds(demand, rates, "fp32")
    found = residual_of("a", device(), rates, "fp32", demand, warm_up_of(3 * promised))
    assert found is not None
    assert math.exp(found.log_ratio_of_sum) == pytest.approx(3)
    assert sum(found.mix) == pytest.approx(1)
    assert sum(service_parts(demand, rates, "fp32")) == pytest.approx(promised)
    assert found.device_class == class_of_device(device())
    absurd = residual_of("a", device(), rates, "fp32", demand, warm_up_of(2000 * promised))
    assert absurd is not None
    assert not absurd.is_plausible
    for never in (math.nan, -1.0, 0.0, math.inf):
        assert residual_of("a", device(), rates, "fp32", demand, warm_up_of(never)) is None
    assert residual_of("a", device(), rates, "int4", demand, warm_up_of(1.0)) is None


def test_kernels_of_a_kind_miss_by_the_same_factor() -> None:
    """Recurrent cells take four times what products take; a model that is half of each takes the mean of the seconds,
    2.5 times, not of their logarithms."""
    recurrent, half = mix_of(0.0, recurrent=1.0), mix_of(0.0, recurrent=0.5, matmul=0.5)
    seen = [residual(1.0, model, mix=mix_of(0.0, matmul=1.0)) for model in "abcdefgh"]
    seen += [residual(4.0, model, mix=recurrent) for model in "ijklmnop"]
    assert correction(seen, "z", BOARD, recurrent).mid == pytest.approx(4, rel=0.1)
    assert correction(seen, "z", BOARD, half).mid == pytest.approx(2.5, rel=0.1)


def half(seen: list[Residual], mix: tuple[float, ...] = CONV) -> float:
    """Of the interval of a model that was not seen, in logarithms."""
    found = correction(seen, "not seen", BOARD, mix)
    return math.log(found.high / found.mid)


def unlike(errors: Iterable[float], kinds: float = 0.3) -> list[Residual]:
    """Models of which none is a near-copy of another, with these errors. kinds: the more, the more each has."""
    chance = np.random.default_rng(3)
    return [
        residual(math.exp(error), f"model{number}", mix=tuple(chance.dirichlet(np.full(len(CONV), kinds))))
        for number, error in enumerate(errors)
    ]


def test_an_interval_is_as_wide_as_the_errors_are_that_were_made() -> None:
    """Of errors that are mostly small, nine of ten are nearer than those of a normal distribution with their variance.
    Of too few nothing says so."""
    chance = np.random.default_rng(3)
    errors = chance.choice((-1.0, 1.0), 40) * np.where(np.arange(40) % 20 == 0, 0.8, 0.05)
    seen = unlike(errors)
    assert 0.05 < half(seen) < 0.28 < NORMAL_QUANTILE * float(np.std(errors)) < half(seen[:8])


def test_the_interval_of_ten_models_reaches_the_largest_of_their_errors() -> None:
    """The quantile is that of a further model's error: of ten it is the largest, and of nineteen the second."""
    assert half(unlike([0.8, *[0.02] * 9])) > 0.6
    assert half(unlike([0.8, *[0.02] * 18])) < 0.4


def test_what_was_bounded_is_an_error_as_large_as_it_was() -> None:
    """Of 40 models six take six times as much, of which the others believe less. A further one may as well."""
    errors = np.where(np.arange(40) % 7 == 3, math.log(6), 0.02)
    assert half(unlike(errors)) > 1.5


def test_errors_of_fewer_than_nine_models_narrow_no_interval() -> None:
    assert half(unlike([0.0] * 9), MATMUL) < 0.5 * half(unlike([0.0] * 8), MATMUL)


def test_no_interval_is_narrower_than_two_measurements_of_a_model_differ() -> None:
    """All 40 took exactly what was promised; devices of a class differ by 7 %, less where errors are smaller."""
    assert half(unlike([0.0] * 40)) > 0.03


def test_a_model_counts_once_on_however_many_classes_it_was_seen() -> None:
    """One is off by 2 % on each of 60 classes, nine others by up to a factor of two."""
    others = unlike([-0.7, 0.5, 0.6, -0.5, 0.3, -0.6, 0.4, 0.7, -0.4])
    boxes = [DeviceClass(BOARD.provider, f"box {number}") for number in range(60)]
    everywhere = [residual(1.02, "everywhere", box, MATMUL) for box in boxes]
    assert half([*others, *everywhere]) > 0.5


def test_near_copies_count_as_one() -> None:
    """Sixty variants of one architecture, all off by 1 %, tell nothing of another one."""
    chance = np.random.default_rng(1)
    shares = chance.uniform(0.79, 0.81, 60)
    copies = [
        residual(1.01, f"copy{number}", mix=mix_of(0.1, conv=share, elementwise=0.9 - share))
        for number, share in enumerate(shares)
    ]
    alone = half(copies[:1], MATMUL)
    assert half(copies, MATMUL) > 0.8 * alone
    others = unlike([-0.7, 0.5, 0.6, -0.5, 0.3, -0.6, 0.4, 0.7, -0.4])
    assert half([*others, *copies], MATMUL) > 0.8 * half(others, MATMUL)
    for seen in (copies, [*others, *copies]):
        there, elsewhere = (correction(seen, "z", where, MATMUL) for where in (BOARD, CARD))
        assert elsewhere.high / elsewhere.low >= there.high / there.low, "nor of any on a class without a measurement"


def test_what_is_assumed_is_what_the_region_measured() -> None:
    """Where each kind of kernels misses by a factor of its own, errors of models that were left out are as small as
    what is left beside. Under another assumption they are not."""
    errors = []
    for seed in range(8):
        chance = np.random.default_rng(seed)
        missed = np.exp(chance.normal(0, 0.9, len(CONV)))
        mixes = chance.dirichlet(np.full(len(CONV), 0.3), 60)
        seen = [
            residual(float(mix @ missed), f"model{number:02}", mix=tuple(mix)) for number, mix in enumerate(mixes[:40])
        ]
        region = RegionResiduals(seen)
        for mix in mixes[40:]:
            found = region.correction("not seen", BOARD, tuple(mix))
            assert found is not None
            errors.append(abs(math.log(found.mid / float(mix @ missed))))
    assert np.mean(errors) < 0.12


def test_assumptions_are_compared_by_a_bounded_number_of_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, root_of = list[int](), np.linalg.cholesky

    def measured_root(of: NDArray[np.float64]) -> NDArray[np.float64]:
        sizes.append(len(of))
        root: NDArray[np.float64] = root_of(of).astype(np.float64)
        return root

    monkeypatch.setattr(np.linalg, "cholesky", measured_root)
    RegionResiduals(unlike(np.linspace(-0.3, 0.3, 250))).learn()
    assert set(sizes) == {64}


def test_a_kind_that_misses_far_is_found_by_models_of_which_it_is_little() -> None:
    """Recurrent cells take 2,451 times as much: models of which they are a fiftieth take 50 times as much."""
    seen = [residual(1.0, f"without{number}", mix=mix_of(0.0, conv=1.0)) for number in range(20)]
    seen += [residual(50.0, f"with{number}", mix=mix_of(0.0, conv=0.98, recurrent=0.02)) for number in range(20)]
    for share in (0.05, 0.5, 1.0):
        truth = 1 - share + share * 2451
        asked = mix_of(0.0, conv=1 - share, recurrent=share)
        assert truth / 2 < correction(seen, "not seen", BOARD, asked).mid < truth * 2


def test_a_kind_is_not_taken_to_miss_its_rate_without_bound() -> None:
    """Where recurrent cells take 100 times as much and attention 30 times, a model of attention with a twentieth of
    recurrent cells takes 33.5 times. Its attention must not be forgotten over its recurrent cells."""
    seen = [residual(1.0, f"without{number}", mix=mix_of(0.0, conv=1.0)) for number in range(60)]
    mix = mix_of(0.0, conv=0.97, recurrent=0.03)
    seen += [residual(0.97 + 0.03 * 100, f"recurrent{number}", mix=mix) for number in range(60)]
    seen += [residual(30.0, f"attention{number}", mix=mix_of(0.0, attention=1.0)) for number in range(8)]
    found = correction(seen, "not seen", BOARD, mix_of(0.0, attention=0.95, recurrent=0.05))
    assert found.low < 33.5 / 4 < found.mid


def few_of_many(kinds: int, share: float) -> tuple[float, ...]:
    """A mix of convolutions and so many other kinds, of a share each."""
    others = [kind.value for kind in OperatorClass if kind is not OperatorClass.CONV][:kinds]
    return mix_of(0.0, conv=1 - kinds * share, **dict.fromkeys(others, share))


@pytest.mark.parametrize(("kinds", "share"), [(4, 0.024), (8, 0.024), (4, 0.026), (8, 0.03), (3, 0.02)])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_rounding_of_a_mix_changes_no_prediction(kinds: int, share: float, factor: float) -> None:
    """Rounded to twentieths, these add up to between 0.8 and 1.2. Neither the promise is off by that, nor what was
    measured of the model."""
    mix = few_of_many(kinds, share)
    seen = [residual(factor, f"m{number}", mix=mix) for number in range(12)]
    for model in ("m3", "new"):
        found = correction(seen, model, BOARD, mix)
        assert found.low < factor < found.high
        assert found.mid == pytest.approx(factor, rel=0.05 * factor)


def test_a_mix_of_nothing_is_of_no_kind() -> None:
    nothing = mix_of(0.0)
    for seen in ([residual(2.0, f"m{number}") for number in range(12)], [residual(2.0, "m", mix=nothing)] * 12):
        assert 0.5 < correction(seen, "new", BOARD, nothing).mid < 2.5


def needs(sizes: LoadSizes) -> LoadNeeds:
    """As of a model of whose phases nothing is known."""
    return LoadNeeds(sizes, sizes)


def test_memory_follows_the_phases_of_a_load_with_the_runtimes_own_provider_alone() -> None:
    def load_of(number: int, where: DeviceClass) -> Residual:
        sizes = LoadSizes(1.0, 0.0, 0.0, 1e6 * number, 0.0, 10.0)
        phases = sizes._replace(other_bytes=1e6 * (number % 5))
        taken = 1e7 + 3 * (phases if where.provider == "CPUExecutionProvider" else sizes).other_bytes
        seen = replace(residual(2, f"m{number}"), load_sizes=sizes, memory_sizes=phases, memory_bytes=taken)
        return replace(seen, device_class=where, load_s=0.01 * number)

    asked = LoadNeeds(LoadSizes(1.0, 0.0, 0.0, 9e6, 0.0, 10.0), LoadSizes(1.0, 0.0, 0.0, 1e6, 0.0, 10.0))
    for provider, taken in (("CPUExecutionProvider", 1.3e7), ("QNNExecutionProvider", 3.7e7)):
        where = DeviceClass(provider, "one")
        found = RegionResiduals(load_of(number, where) for number in range(1, 20)).load(where, asked)
        assert found is not None
        assert found.memory_bytes.mid == pytest.approx(taken, rel=0.05)


def test_what_a_provider_takes_for_itself_is_no_property_of_models() -> None:
    """A card whose context takes 800 MB teaches one whose context takes 300."""

    def load_of(number: int, own: float, told: float) -> Residual:
        sizes = LoadSizes(1.0, 0.0, 0.0, 1e6 * number, 0.0, 10.0)
        taken = own + 1e7 + 3e6 * number
        seen = replace(residual(2, f"m{number} {own}", CARD), load_sizes=sizes, memory_sizes=sizes, memory_bytes=taken)
        return replace(seen, load_s=0.01 * number, provider_bytes=told)

    def predict_bytes(loads: Iterable[Residual], provider_bytes: float) -> float:
        found = RegionResiduals(loads).load(CARD, needs(LoadSizes(1.0, 0.0, 0.0, 9e6, 0.0, 10.0)), provider_bytes)
        assert found is not None
        return found.memory_bytes.mid

    large = [load_of(number, 8e8, 8e8) for number in range(1, 20)]
    older = [load_of(number, 8e8, 0.0) for number in range(1, 20)]
    assert predict_bytes(large, 8e8) == pytest.approx(8.37e8, rel=0.01)
    assert predict_bytes(large, 3e8) == pytest.approx(3.37e8, rel=0.01)
    assert predict_bytes(large, 0.0) == pytest.approx(8.37e8, rel=0.01), "no receipt says it: as on the others"
    assert predict_bytes([*large, *older], 3e8) == pytest.approx(3.37e8, rel=0.01), "not counted twice"
    assert predict_bytes(older, 8e8) == pytest.approx(8.37e8, rel=0.05), "the law has it already"


def test_a_load_in_an_open_worker_teaches_what_it_takes_alone() -> None:
    assert memory_learnt(6e8, told=5e8) == (6e8, 5e8)
    assert memory_learnt(1e8, told=5e8, joined=True) == (6e8, 5e8)
    assert memory_learnt(1e8) == (1e8, 0)


def memory_learnt(taken: float, *, told: float = 0.0, joined: bool = False, provider: str = "") -> tuple[float, float]:
    """What a load teaches: its memory, and the provider's part of it."""
    asked, gpu = needs(LoadSizes(1.0, 0.0, 0.0, 9e6, 0.0, 10.0)), device("gpu0", kind="gpu")
    gpu = replace(gpu, provider=provider or gpu.provider)
    rates, demand = receipt(node("n", gpu), gpu).rates, demand_of(profile())
    measured = replace(warm_up_of(0.01), memory_bytes=Bytes(int(taken)), joined=joined)
    found = residual_of("a", gpu, rates, "fp32", demand, measured, asked, provider_bytes=told)
    assert found is not None
    return found.memory_bytes, found.provider_bytes


def test_a_load_that_joined_without_saying_so_teaches_no_memory() -> None:
    """Workers of an older agent do not say it."""
    memory, own = memory_learnt(1e8, told=5e8)
    assert math.isnan(memory)
    assert own == 0
    assert memory_learnt(1e6, told=1e7, provider=PROCESSOR) == (1e6, 1e7), "less than its loads differ by"


def test_a_small_model_may_have_a_provider_take_less_than_the_probe_s() -> None:
    """QNN's simulator takes 148 MB with the probe's model, and 124 MB with a perceptron of 0.3 MB in it."""
    assert memory_learnt(124e6, told=148e6) == (124e6, 148e6)

    def load_of(number: int) -> Residual:
        sizes = LoadSizes(1.0, 0.0, 0.0, 1e6 * number, 0.0, 10.0)
        seen = replace(residual(2, f"m{number}", CARD), load_sizes=sizes, memory_sizes=sizes, load_s=0.01 * number)
        return replace(seen, memory_bytes=1.2e8 + 3e6 * number, provider_bytes=1.48e8)

    loads = RegionResiduals(load_of(number) for number in range(1, 20))
    found = loads.load(CARD, needs(LoadSizes(1.0, 0.0, 0.0, 1e6, 0.0, 10.0)), 1.48e8)
    assert found is not None
    assert found.memory_bytes.mid == pytest.approx(1.23e8, rel=0.02)
    lesser = loads.load(CARD, needs(LoadSizes(1.0, 0.0, 0.0, 1e6, 0.0, 10.0)), 2.5e7)
    assert lesser is not None
    assert lesser.memory_bytes.mid > 0.75 * 2.5e7, "a provider of less is not less than nothing"


def test_a_load_that_joined_where_nobody_knows_what_the_provider_takes_teaches_no_memory() -> None:
    memory, _ = memory_learnt(1e8, joined=True)
    assert math.isnan(memory)
    assert memory_learnt(1e8, joined=True, provider=PROCESSOR) == (1e8, 0)


def test_a_law_of_memory_leaves_out_what_an_earlier_version_learnt_of_loads_that_joined() -> None:
    def load_of(number: int, own: float) -> Residual:
        sizes = LoadSizes(1.0, 0.0, 0.0, 1e6 * number, 0.0, 10.0)
        seen = residual(2, f"m{number} {own}", CARD)
        seen = replace(seen, load_sizes=sizes, memory_sizes=sizes, memory_bytes=own + 1e7 + 3e6 * number)
        return replace(seen, load_s=0.01 * number, provider_bytes=8e8)

    alone, joined = ([load_of(number, own) for number in range(1, 20)] for own in (8e8, 0.0))
    found = RegionResiduals([*alone[:9], *joined]).load(CARD, needs(LoadSizes(1.0, 0.0, 0.0, 9e6, 0.0, 10.0)), 8e8)
    assert found is not None
    assert found.memory_bytes.mid == pytest.approx(8.37e8, rel=0.01)


def test_a_ratio_of_an_older_version_tells_nothing() -> None:
    """It is to a roofline that takes the larger of arithmetic and movement."""
    older = [replace(residual(8.0, model), log_ratio=math.log(8), log_ratio_of_sum=math.nan) for model in "abcdefgh"]
    assert RegionResiduals(older).correction("z", BOARD, CONV) is None
    newer = residual(1.0, "y")
    assert RegionResiduals([*older, newer]).correction("z", BOARD, CONV) == RegionResiduals([newer]).correction(
        "z", BOARD, CONV
    )


def test_an_older_version_does_not_take_a_ratio_to_a_sum_for_one_to_the_larger() -> None:
    """It knows `log_ratio` alone, believes what is within a factor of 1000, and otherwise measures again."""
    stored = json.loads(codec.dump(residual(0.7)))
    assert codec.load(Residual, json.dumps(stored).encode()).is_plausible
    del stored["log_ratio_of_sum"]
    assert not abs(stored["log_ratio"]) <= math.log(MOST_RATIO)
    assert not codec.load(Residual, json.dumps(stored).encode()).is_plausible


def test_records_of_an_older_version_still_teach_memory() -> None:
    """They have no sizes of the phases."""

    def load_of(number: int) -> Residual:
        sizes = LoadSizes(1.0, 0.0, 0.0, 1e6 * number, 0.0, 10.0)
        seen = replace(residual(2, f"m{number}"), load_sizes=sizes, memory_bytes=1e7 + 3e6 * number, load_s=0.01)
        stored = json.loads(codec.dump(replace(seen, memory_sizes=sizes)))
        del stored["memory_sizes"]
        return codec.load(Residual, json.dumps(stored).encode())

    asked = needs(LoadSizes(1.0, 0.0, 0.0, 5e6, 0.0, 10.0))
    found = RegionResiduals(load_of(number) for number in range(1, 20)).load(BOARD, asked)
    assert found is not None
    assert found.memory_bytes.mid == pytest.approx(2.5e7, rel=0.05)


def test_loads_are_predicted_where_enough_were_seen() -> None:
    def load_of(number: int) -> Residual:
        sizes = LoadSizes(1.0, 0.0, 0.0, 1e6 * number, 1e5 * number, 10.0 + 7 * (number % 3))
        seen = replace(residual(2, f"m{number}"), load_sizes=sizes, memory_bytes=1e7 + 3e6 * number)
        return replace(seen, load_s=0.01 * number)

    asked = needs(LoadSizes(1.0, 0.0, 0.0, 5e6, 5e5, 20.0))
    few = RegionResiduals(load_of(number) for number in range(1, LEAST_LOADS))
    assert few.load(BOARD, asked) is None
    enough = RegionResiduals(load_of(number) for number in range(1, 20))
    assert enough.load(BOX, asked) is None, "seconds are those of a device class"
    found = enough.load(BOARD, asked)
    assert found is not None
    assert found.memory_bytes.mid == pytest.approx(2.5e7, rel=0.05)
    assert found.load_s.low <= 0.05 <= found.load_s.high
    absurd = replace(load_of(3), memory_bytes=math.nan, load_s=-1.0)
    assert RegionResiduals([absurd] * 20).load(BOARD, asked) is None


def test_waits_of_other_loads_are_no_property_of_a_model() -> None:
    """Every load waits up to five times what it takes of a processor; the law is that of the processor."""
    rng = np.random.default_rng(1)

    def load_of(number: int) -> Residual:
        sizes, work_s = LoadSizes(1.0, 0.0, 0.0, 1e6 * number, 1e5 * number, 10.0), 0.01 * number
        seen = replace(residual(2, f"m{number}"), load_sizes=sizes, memory_bytes=1e7 + 3e6 * number)
        return replace(seen, load_s=work_s * rng.uniform(1, 5), load_cpu_s=work_s)

    asked = needs(LoadSizes(1.0, 0.0, 0.0, 1e7, 1e6, 10.0))
    found = RegionResiduals(load_of(number) for number in range(1, 40)).load(BOARD, asked)
    assert found is not None
    assert found.work_s.mid == pytest.approx(0.1, rel=0.05)
    assert found.load_s.mid == pytest.approx(0.3, rel=0.3)
    assert found.load_s.low < 0.16
    assert found.load_s.high > 0.45


def test_without_processor_time_loads_are_learnt_by_the_clock() -> None:
    def load_of(number: int) -> Residual:
        sizes = LoadSizes(1.0, 0.0, 0.0, 1e6 * number, 1e5 * number, 10.0)
        return replace(residual(2, f"m{number}"), load_sizes=sizes, memory_bytes=1e7, load_s=0.01 * number)

    asked = needs(LoadSizes(1.0, 0.0, 0.0, 5e6, 5e5, 10.0))
    found = RegionResiduals(load_of(number) for number in range(1, 20)).load(BOARD, asked)
    assert found is not None
    assert found.load_s == pytest.approx(found.work_s)


def test_a_corrected_prediction() -> None:
    host = node("n", device())
    signed, model = receipt(host, device()), profile()
    plain = predict(device(), signed, model, "fp32")
    told = Correction(1.5, 2.0, 2.5, Basis.CALIBRATED, TAIL_GUESS)
    found = predict(device(), signed, model, "fp32", correction=told)
    unsure = predict(device(), signed, replace(model, confident=False), "fp32", correction=told)
    assert isinstance(plain, Prediction)
    assert isinstance(found, Prediction)
    assert isinstance(unsure, Prediction)
    assert plain.basis is Basis.GUESS
    assert found.basis is Basis.CALIBRATED
    assert found.latency_p50_s.mid == pytest.approx(2 * plain.latency_p50_s.mid)
    assert found.joules.mid == pytest.approx(2 * plain.joules.mid)
    assert found.latency_p50_s.high == pytest.approx(2.5 * plain.latency_p50_s.mid), "the region's errors have it"
    elsewhere = predict(device(), signed, model, "fp32", correction=told._replace(basis=Basis.TRANSFERRED))
    assert isinstance(elsewhere, Prediction)
    assert elsewhere.latency_p50_s.high == pytest.approx(2.5 * 1.05 * plain.latency_p50_s.mid)
    assert unsure.latency_p50_s.high > found.latency_p50_s.high
