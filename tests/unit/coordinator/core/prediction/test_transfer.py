"""Transfer to new devices: on tables whose law is known, errors fall with measurements and intervals cover."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.core.prediction.transfer.known import Floats, KnownLatencies, name_similarity
from shoal.coordinator.core.prediction.transfer.learned import UNTAUGHT, WAYS, LearnedTransfer, learn
from shoal.coordinator.core.prediction.transfer.process import ProcessSettings, covariance
from shoal.coordinator.core.prediction.transfer.space import space_for

MODELS, DEVICES = 120, 8
FEW_WAYS = tuple(way for way in WAYS if way.settings.noise > 0.001 and way.settings.distance > 1)


def table(seed: int = 0, devices: int = DEVICES, features: bool = False) -> Floats:
    """(models, devices): log seconds of devices that differ in speed, in one thing more, and by 3 % of noise."""
    chance = np.random.default_rng(seed)
    work, kind = chance.normal(-4, 1, MODELS), chance.normal(0, 1, MODELS)
    speeds, tastes = chance.normal(0, 0.7, devices), chance.normal(0, 0.3, devices)
    found: Floats = work[:, None] + speeds + kind[:, None] * tastes + chance.normal(0, 0.03, (MODELS, devices))
    return found


def latencies_of(logs: Floats) -> KnownLatencies:
    names = tuple(f"maker{number} chip" for number in range(logs.shape[1]))
    return KnownLatencies(names, names, logs, np.empty((len(logs), 0)))


def learn_last(logs: Floats, count: int) -> LearnedTransfer:
    """About the last device, from the others."""
    return learn(latencies_of(logs[:, :-1]), "maker9 chip", count, 0, FEW_WAYS)


def error_and_cover(logs: Floats, count: int) -> tuple[float, float]:
    rows = np.random.default_rng(3).permutation(len(logs))
    shown, asked = rows[:count], rows[count:]
    seconds = np.exp(logs[:, -1])
    found = learn_last(logs, count).predict(shown, seconds[shown], asked)
    inside = (found.low <= seconds[asked]) & (seconds[asked] <= found.high)
    return float(np.abs(found.mid / seconds[asked] - 1).mean()), float(inside.mean())


def test_ten_measurements_find_how_a_device_differs() -> None:
    assert error_and_cover(table(), 0)[0] > 0.15
    assert error_and_cover(table(), 10)[0] < 0.06
    assert error_and_cover(table(), 30)[0] < 0.045


def test_intervals_cover_what_was_not_shown() -> None:
    covers = [error_and_cover(table(seed), 10)[1] for seed in range(6)]
    assert 0.85 <= np.mean(covers) <= 0.97


def test_a_chosen_measurement_is_never_asked_for_twice() -> None:
    learned, shown = learn_last(table(), 5), np.empty(0, np.intp)
    for _ in range(5):
        chosen = learned.next_to_measure(shown, np.arange(40))
        assert chosen not in shown
        assert chosen < 40
        shown = np.append(shown, chosen)


def test_the_first_chosen_measurement_leaves_least_doubt() -> None:
    learned, allowed = learn_last(table(), 1), np.arange(40)
    way = int(learned.weights.argmax())
    settings, space = learned.ways[way].settings, learned.spaces[way].rows(allowed)
    prior = covariance(settings, space, space)

    def doubt(row: int) -> float:
        gone = np.outer(prior[:, row], prior[row]) / (prior[row, row] + settings.noise)
        return float(np.trace(prior - gone))

    assert learned.next_to_measure(np.empty(0, np.intp), allowed) == min(range(40), key=doubt)


def test_an_outlier_does_not_decide() -> None:
    logs = table()
    rows, seconds = np.arange(20), np.exp(logs[:20, -1])
    learned = learn_last(logs, 20)
    clean = learned.predict(rows, seconds, np.arange(20, MODELS)).mid
    wrong = learned.predict(rows, np.where(rows == 7, 50 * seconds, seconds), np.arange(20, MODELS)).mid
    assert np.abs(np.log(wrong / clean)).mean() < np.log(50) / 20


def test_gaps_and_models_that_nobody_ran() -> None:
    logs = table()
    logs[::7, 2] = np.nan
    logs[5, :-1] = np.nan
    rows = np.array([1, 5, 9, 11])
    found = learn_last(logs, 4).predict(rows, np.exp(logs[rows, -1]), np.arange(MODELS))
    assert np.flatnonzero(np.isnan(found.mid)).tolist() == [5]
    assert np.abs(found.mid / np.exp(logs[:, -1]) - 1)[np.arange(MODELS) != 5].mean() < 0.3


@pytest.mark.parametrize("devices", [2, 3])
def test_too_few_known_devices_teach_no_weights(devices: int) -> None:
    learned = learn_last(table(devices=devices), 3)
    assert learned.quantile == UNTAUGHT
    assert {way.kinship for way, weight in zip(learned.ways, learned.weights, strict=True) if weight} == {0.0}


def test_a_family_is_left_out_whole() -> None:
    logs = table()
    twins = np.concatenate([logs, logs[:, :1]], 1)
    names = tuple(f"chip{number}" for number in range(DEVICES + 1))
    families = (*names[:DEVICES], names[0])
    known = KnownLatencies(names, families, twins, np.empty((MODELS, 0)))
    assert known.without("chip0").devices == names[1:DEVICES]
    apart = KnownLatencies(names, names, twins, np.empty((MODELS, 0)))
    together = learn(known, "new", 5, 0, FEW_WAYS).quantile
    assert together != learn(apart, "new", 5, 0, FEW_WAYS).quantile


def test_features_remove_the_noise_of_known_devices() -> None:
    chance = np.random.default_rng(5)
    features = chance.integers(0, 2, (MODELS, 6)).astype(float)
    truth = features @ chance.uniform(0.2, 1, 6)
    logs = truth[:, None] + chance.normal(0, 0.2, (MODELS, 5))
    known = KnownLatencies(tuple("abcde"), tuple("abcde"), logs, features)
    raw, smooth = (space_for(known, "f", 0, smooth) for smooth in (False, True))
    errors = [np.std(space.level - truth) for space in (raw, smooth)]
    assert errors[1] < errors[0] / 2


def test_names_weigh_known_devices() -> None:
    assert name_similarity("Galaxy S24", "Galaxy S25") == pytest.approx(1 / 2)
    assert name_similarity("Galaxy S24", "galaxy-s24") == 1
    assert name_similarity("", "") == 0
    known = KnownLatencies(("Galaxy S24", "Board 7"), ("a", "b"), np.array([[0.0, 1.0]] * 4), np.empty((4, 0)))
    even, near = (space_for(known, "Galaxy S25", kinship, False).level[0] for kinship in (0.0, 10.0))
    assert even == pytest.approx(0.5)
    assert near < 0.2


@given(st.integers(0, 2**31), st.integers(0, 12))
def test_intervals_are_in_order_and_finite(seed: int, count: int) -> None:
    logs = table(seed % 50)[:30]
    chance = np.random.default_rng(seed)
    rows = chance.permutation(30)[:count]
    found = learn(latencies_of(logs[:, :3]), "new", count, seed, FEW_WAYS[:1]).predict(
        rows, np.exp(chance.normal(-3, 2, count)), np.arange(30)
    )
    assert np.isfinite(found.high).all()
    assert ((found.low <= found.mid) & (found.mid <= found.high)).all()


def test_a_covariance_is_one() -> None:
    space = space_for(latencies_of(table()), "new", 0, False).rows(np.arange(20))
    both = covariance(ProcessSettings(), space, space)
    assert np.allclose(both, both.T)
    assert np.linalg.eigvalsh(both).min() > -1e-9


def test_a_table_must_be_one() -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        KnownLatencies(("a",), ("a",), np.zeros((3, 2)), np.empty((3, 0)))
