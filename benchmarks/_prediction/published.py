"""Few measurements on a new device, judged on published latencies: each device in turn is taken as new."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from _prediction.peers import fill_gaps, nearest_device, ridge, roofline
from _prediction.tables import PublishedTable, UnseenDevice

from shoal.coordinator.core.prediction.transfer.known import Floats, Indices, KnownLatencies
from shoal.coordinator.core.prediction.transfer.learned import LearnedTransfer, learn

HUB: Final = "AI Hub onnx NPU"
RIDGE_TABLE: Final[Mapping[tuple[str, str], Mapping[int, float]]] = {
    ("FBNet", "raspi4"): {10: 4.6, 50: 3.5, 200: 3.2},
    ("FBNet", "pixel3"): {10: 3.9, 50: 2.8, 200: 2.3},
    ("FBNet", "gold_6226"): {10: 9.5, 50: 7.0, 200: 5.7},
    ("NAS-Bench-201", "gold_6226"): {10: 5.4, 50: 3.5, 200: 2.9},
    ("NAS-Bench-201", "raspi4"): {10: 76.6, 50: 14.9, 200: 12.6},
    ("NAS-Bench-201", "pixel3"): {10: 120.9, 50: 14.7, 200: 12.8},
    (HUB, "QCS8550 (Proxy)"): {5: 8.2, 10: 7.2, 30: 5.9},
    (HUB, "Samsung Galaxy S25"): {5: 11.4, 10: 9.1, 30: 7.5},
    (HUB, "Snapdragon X Elite CRD"): {5: 14.7, 10: 13.0, 30: 11.0},
    (HUB, "Samsung Galaxy S24"): {5: 18.1, 10: 15.9, 30: 16.0},
    (HUB, "Dragonwing IQ-9075 EVK"): {5: 19.2, 10: 17.0, 30: 15.9},
}
"""MAPE % of a ridge regression in log space from other devices, computed beforehand from the same files (BASELINES.md
beside them). It has no row for 0 measurements."""
_ASKED: Final = 2000
"""Models predicted in one draw, at most."""
_POOL: Final = 400
"""Models among which the next to measure is chosen."""


@dataclass(frozen=True)
class DeviceErrors:
    """One device taken as new, with so many models measured. Errors are MAPE %, means over the draws."""

    # Where the latencies are from.
    table: str
    # Taken as new.
    device: str
    # Models measured on it.
    measured: int
    # Models predicted in each draw.
    predicted: int
    # Shoal's, of models measured at random.
    mape: float
    # The same with the models that it asked for.
    mape_chosen: float
    # Share of the predicted within 10 %.
    within_10: float
    # Ridge regression's in this run.
    ridge: float
    # The nearest known device's.
    nearest: float
    # A roofline's; NaN where it cannot predict.
    roofline: float
    # The ridge's of the published table; NaN where it has no such row.
    ridge_table: float
    # Share of the predicted that lie inside the interval.
    coverage: float
    # Median of the interval's high over its low end.
    width: float


def leave_one_out(
    tables: Iterable[PublishedTable], draws: int, every_device: bool, seed: int
) -> Iterable[DeviceErrors]:
    """Every device of AI Hub; of the two spaces of architectures the devices of RIDGE_TABLE, or every one."""
    for table in tables:
        for column, device in enumerate(table.known.devices):
            if every_device or not table.work or (table.name, device) in RIDGE_TABLE:
                known = table.known.without(table.known.families[column])
                unseen = UnseenDevice(device, table, np.exp(table.known.log_seconds[:, column]))
                yield from device_errors(unseen, known, draws, seed)


def device_errors(unseen: UnseenDevice, known: KnownLatencies, draws: int, seed: int) -> Iterable[DeviceErrors]:
    """The device with each number of measurements of its table that leaves models to predict."""
    table, others = unseen.table, fill_gaps(known)
    rows = np.flatnonzero(~np.isnan(unseen.seconds) & ~np.isnan(others).any(1))
    for count in table.counts:
        if len(rows) < max(20, 2 * count):
            continue
        learned = learn(known, unseen.name, count, seed)
        chance = np.random.default_rng(seed)
        found: list[dict[str, float]] = []
        for _ in range(draws if count else 1):
            order = chance.permutation(rows)
            shown, asked = order[:count], order[count : count + _ASKED]
            found.append(_draw(unseen, known, others, learned, shown, asked))
        chosen = _chosen_error(unseen, learned, chance.permutation(rows), count)
        means = {name: float(np.mean([each[name] for each in found])) for name in found[0]}
        in_table = RIDGE_TABLE.get((table.name, unseen.name), {}).get(count, math.nan)
        yield DeviceErrors(
            table.name,
            unseen.name,
            count,
            min(_ASKED, len(rows) - count),
            mape_chosen=chosen,
            ridge_table=in_table,
            **means,
        )


def _draw(
    unseen: UnseenDevice,
    known: KnownLatencies,
    others: Floats,
    learned: LearnedTransfer,
    shown: Indices,
    asked: Indices,
) -> dict[str, float]:
    seconds, actual = unseen.seconds[shown], unseen.seconds[asked]
    ours = learned.predict(shown, seconds, asked)
    logs = np.log(seconds)
    work = unseen.table.work
    return {
        "mape": _mape(ours.mid, actual),
        "within_10": float((np.abs(ours.mid / actual - 1) <= 0.1).mean()),
        "ridge": _mape(np.exp(ridge(others, shown, logs, asked)), actual),
        "nearest": _mape(np.exp(nearest_device(known, others, unseen.name, shown, logs, asked)), actual),
        "roofline": _mape(roofline(work, shown, seconds, asked), actual) if work and len(shown) else math.nan,
        "coverage": float(((ours.low <= actual) & (actual <= ours.high)).mean()),
        "width": float(np.median(ours.high / ours.low)),
    }


def _chosen_error(unseen: UnseenDevice, learned: LearnedTransfer, rows: Indices, count: int) -> float:
    """MAPE % where Shoal says which model to measure next, each time among `_POOL`; judged on the others."""
    shown: list[int] = []
    for _ in range(count):
        shown.append(learned.next_to_measure(np.array(shown, dtype=np.intp), rows[:_POOL]))
    measured = np.array(shown, dtype=np.intp)
    asked = np.setdiff1d(rows, measured)[:: max(1, len(rows) // _ASKED)]
    return _mape(learned.predict(measured, unseen.seconds[measured], asked).mid, unseen.seconds[asked])


def _mape(predicted: Floats, actual: Floats) -> float:
    return float(100 * np.abs(predicted / actual - 1).mean())


def summary(found: Sequence[DeviceErrors]) -> dict[str, object]:
    """For the last line: of each table and number of measurements, means over devices."""
    groups: dict[str, dict[str, object]] = {}
    for name, count in dict.fromkeys((each.table, each.measured) for each in found):
        group = [each for each in found if (each.table, each.measured) == (name, count)]
        figures = ("mape", "mape_chosen", "ridge", "nearest", "roofline", "coverage", "width")
        means = {figure: _mean([getattr(each, figure) for each in group]) for figure in figures}
        groups[f"{name} k={count}"] = {"devices": len(group), **means}
    compared = [each for each in found if not math.isnan(each.ridge_table)]
    lower = sum(each.mape < each.ridge_table for each in compared)
    coverage = _mean([each.coverage for each in found])
    return {
        "published": groups,
        "coverage_c": coverage,
        "below_ridge_table": lower,
        "of": len(compared),
        "below_ridge_of_this_run": sum(each.mape < each.ridge for each in found),
        "cases": len(found),
    }


def _mean(values: Sequence[float]) -> float | None:
    """Rounded to three digits after the point; None where one is unknown, since JSON has no NaN."""
    mean = float(np.mean(values))
    return None if math.isnan(mean) else round(mean, 3)
