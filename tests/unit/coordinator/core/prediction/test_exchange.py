"""What a region measured, told to another: it predicts the same, believes what can be, and its own figures first."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from immutables import Map

from shoal.coordinator import codec
from shoal.coordinator.core.prediction.demand import OperatorClass
from shoal.coordinator.core.prediction.exchange import (
    MOST_DOCUMENT_BYTES,
    MOST_ROWS,
    ImportedMeasurements,
    measurements_document,
    read_measurements,
    with_imported,
)
from shoal.coordinator.core.prediction.load_law import LEAST_LOADS, LoadNeeds, LoadSizes
from shoal.coordinator.core.prediction.model import Basis, Correction
from shoal.coordinator.core.prediction.region_residuals import RegionResiduals
from shoal.coordinator.core.prediction.residuals import MOST_RATIO, DeviceClass, Residual
from shoal.coordinator.core.prediction.shared_variances import LEAST_GROUPS
from shoal.types.codes import Code, ShoalError
from shoal.types.profile import PROFILE_VERSION
from shoal.types.units import Wall

KINDS = 1 + len(OperatorClass)
CLASSES = [
    DeviceClass("CPUExecutionProvider", "maker board"),
    DeviceClass("CPUExecutionProvider", "maker box"),
    DeviceClass("CUDAExecutionProvider", "maker card"),
]
BOARD, BOX, CARD = CLASSES
NOW = Wall(1_800_000_000.0)


def model(number: int) -> str:
    return f"sha256:{number:064x}"


def mix_of(*shares: float) -> tuple[float, ...]:
    padded = (*shares, *(0.0,) * (KINDS - len(shares)))
    return tuple(each / math.fsum(padded) for each in padded)


def sizes_of(megabytes: float) -> LoadSizes:
    return LoadSizes(1.0, 1.0, megabytes * 2**20, 2**20, 2**18, 100.0, 2**16)


def residual(factor: float, number: int = 0, where: DeviceClass = BOARD, **more: Any) -> Residual:
    mix = mix_of(1.0, 1.0 + number, 5.0, 1.0)
    return replace(
        Residual(model(number), where, mix, math.nan, log_ratio_of_sum=math.log(factor), profile_version=4), **more
    )


def load_residual(number: int, factor: float = 1.0, **more: Any) -> Residual:
    """A load that took 50 MiB and three times the file, times the factor."""
    megabytes = 1.0 + 3 * number
    return residual(
        *(2.0, number),
        load_sizes=sizes_of(megabytes),
        memory_sizes=sizes_of(megabytes),
        memory_bytes=factor * (50 + 3 * megabytes) * 2**20,
        load_s=factor * (0.1 + 0.01 * megabytes),
        load_cpu_s=factor * (0.09 + 0.01 * megabytes),
        **more,
    )


def imported_rows(residuals: Sequence[Residual], region: str = "eu") -> tuple[Residual, ...]:
    """As another region has them once it imported them and has read them from its store."""
    found = read_measurements(measurements_document(region, NOW, residuals))
    assert (found.region, found.exported_at, found.left_out) == (region, NOW, 0)
    kept = ImportedMeasurements(region, found.exported_at, NOW, "shoal://us/operator/admin", found.rows)
    return codec.load(ImportedMeasurements, codec.dump(kept)).rows


def correction(seen: Sequence[Residual], number: int, where: DeviceClass) -> Correction:
    asked = residual(1.0, number, where)
    found = RegionResiduals(seen).correction(asked.model, where, asked.mix)
    assert found is not None
    return found


def numbers(found: Correction) -> list[float]:
    return [found.low, found.mid, found.high, *found.tail]


measured = st.builds(
    residual,
    st.floats(0.01, 100.0),
    st.integers(0, 11),
    st.sampled_from(CLASSES),
    mix=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=KINDS).map(lambda shares: mix_of(*shares)),
    log_tail=st.one_of(st.just(math.nan), st.floats(-6.0, 1.5)),
    tail_runs=st.integers(0, 1000),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(measured, min_size=1, max_size=30))
def test_an_empty_region_predicts_as_the_one_that_exported(residuals: list[Residual]) -> None:
    here, there = RegionResiduals(residuals), RegionResiduals(imported_rows(residuals))
    for number, where in product((0, 1, 99), (*CLASSES, DeviceClass("CPUExecutionProvider", "unseen"))):
        asked = residual(1.0, number, where)
        mine, theirs = (each.correction(asked.model, where, asked.mix) for each in (here, there))
        assert mine is not None
        assert theirs is not None
        assert theirs.basis is mine.basis
        assert numbers(theirs) == pytest.approx(numbers(mine), rel=1e-4)


def test_it_predicts_memory_and_load_as_the_one_that_exported() -> None:
    residuals = [load_residual(number) for number in range(LEAST_LOADS)]
    needs = LoadNeeds(sizes_of(17.0), sizes_of(17.0))
    mine, theirs = (RegionResiduals(each).load(BOARD, needs) for each in (residuals, imported_rows(residuals)))
    assert mine is not None
    assert theirs is not None
    assert [*theirs.memory_bytes, *theirs.load_s] == pytest.approx([*mine.memory_bytes, *mine.load_s], rel=1e-4)


def test_a_row_is_of_all_nodes_and_names_none() -> None:
    residuals = [residual(each, log_tail=tail, tail_runs=20) for each, tail in ((2.0, -3.0), (3.0, -2.0), (5.0, -2.5))]
    document = json.loads(measurements_document("eu", NOW, residuals))
    (row,) = document.pop("rows")
    assert document == {
        "apiVersion": "shoal/v1", "kind": "Measurements", "region": "eu", "exportedAt": "2027-01-15T08:00:00Z",
    }  # fmt: skip
    assert math.fsum(row.pop("operators").values()) == pytest.approx(1)
    assert row == {
        "model": model(0),
        "provider": "CPUExecutionProvider",
        "product": "maker board",
        "profileVersion": PROFILE_VERSION,
        "measurements": 3,
        "ratio": 3.0,
        "spread": 1.5,
        "tail": pytest.approx(math.exp(math.exp(-2.5))),
        "tailRuns": 60,
    }


def test_what_was_imported_is_not_exported_again() -> None:
    own, theirs = residual(2.0), imported_rows([residual(3.0, 1)], "asia")
    document = json.loads(measurements_document("eu", NOW, [own, *theirs]))
    assert [each["model"] for each in document["rows"]] == [model(0)]


def test_a_document_is_bounded() -> None:
    sizes = sizes_of(123.456789)
    full = residual(
        1.23456789, mix=mix_of(*(1.23456789 + each for each in range(KINDS))), load_sizes=sizes, memory_sizes=sizes,
        memory_bytes=123_456_789.0, load_s=1.23456789, load_cpu_s=1.23456789, log_tail=-2.3, tail_runs=12_345,
        provider_bytes=123_456_789.0,
    )  # fmt: skip
    many = [replace(full, model=model(number), device_class=BOX) for number in range(MOST_ROWS + 10)]
    document = measurements_document("eu", NOW, many)
    assert 2 * len(document) < MOST_DOCUMENT_BYTES
    assert len(read_measurements(document).rows) == MOST_ROWS


def test_own_figures_count_instead_of_imported_ones() -> None:
    own, theirs = (
        [residual(2.0), residual(2.0, 1, BOX)],
        imported_rows([residual(40.0), residual(40.0), residual(2.5, 0, CARD)]),
    )
    alone, both = correction(own, 0, BOARD), correction([*theirs, *own], 0, BOARD)
    assert both.basis is Basis.SAME_CLASS
    assert both.mid == pytest.approx(alone.mid, rel=0.05)
    assert correction(own, 0, CARD).basis is Basis.TRANSFERRED
    abroad = correction([*theirs, *own], 0, CARD)
    assert abroad.basis is Basis.SAME_CLASS
    assert abroad.low < 2.5 < abroad.high
    assert abroad.high / abroad.low > math.exp(2 * math.sqrt(0.005)), "devices of a class differ"


def test_imported_rows_come_after_the_regions_own_where_there_are_too_many() -> None:
    own = [residual(2.0, number) for number in range(MOST_ROWS // 2, MOST_ROWS + 10)]
    theirs = imported_rows([residual(3.0, number, BOX) for number in range(MOST_ROWS)])
    learnt = RegionResiduals([*theirs, *own])
    basis = {
        number: found.basis
        for number in (0, MOST_ROWS - 1)
        if (found := learnt.correction(model(number), BOX, residual(1.0, number).mix)) is not None
    }
    assert basis == {0: Basis.SAME_CLASS, MOST_ROWS - 1: Basis.CALIBRATED}, "there is no room for the last"
    last = own[-1]
    found = learnt.correction(last.model, BOARD, last.mix)
    assert found is not None
    assert found.basis is Basis.SAME_CLASS


def test_of_several_regions_the_median_counts() -> None:
    rows = [
        row
        for name, factor in (("eu", 2.0), ("us", 2.1), ("liar", 900.0))
        for row in imported_rows([residual(factor)], name)
    ]
    assert correction(rows, 0, BOARD).mid == pytest.approx(correction([residual(2.1)], 0, BOARD).mid, rel=1e-6)


def test_a_region_that_lies_hardly_moves_what_others_are_predicted() -> None:
    own = [residual(2.0 + 0.01 * number, number) for number in range(LEAST_GROUPS)]
    liar = imported_rows([residual(900.0, 100 + number, BOX) for number in range(MOST_ROWS - 50)], "liar")
    for number in (0, 50):
        alone, beside = correction(own, number, BOARD), correction([*own, *liar], number, BOARD)
        assert beside.mid / alone.mid < 2.9, number
    assert correction([*own, *liar], 0, BOARD).mid == pytest.approx(correction(own, 0, BOARD).mid, rel=0.1)


def test_a_region_that_lies_about_memory_is_not_heard_once_the_region_loaded_enough() -> None:
    own = [load_residual(number) for number in range(LEAST_LOADS)]
    liar = imported_rows(
        [replace(load_residual(100 + number, 0.01), device_class=BOARD) for number in range(100)], "liar"
    )
    needs = LoadNeeds(sizes_of(17.0), sizes_of(17.0))
    assert RegionResiduals([*own, *liar]).load(BOARD, needs) == RegionResiduals(own).load(BOARD, needs)


def test_the_joined_map_is_the_same_object_until_something_changes() -> None:
    own = Map({("a", "b", "c"): residual(2.0)})
    assert with_imported(own, Map()) is own
    imported = Map({"eu": ImportedMeasurements("eu", NOW, NOW, "", imported_rows([residual(3.0)]))})
    found = with_imported(own, imported)
    assert len(found) == 2
    assert with_imported(own, imported) is found
    assert with_imported(own.set(("d", "b", "c"), residual(4.0)), imported) is not found


ROW: Mapping[str, Any] = json.loads(measurements_document("eu", NOW, [load_residual(3, log_tail=-2.5, tail_runs=20)]))[
    "rows"
][0]


def document(*rows: object, **more: object) -> bytes:
    envelope = {"apiVersion": "shoal/v1", "kind": "Measurements", "region": "eu", "exportedAt": "2027-01-15T08:00:00Z"}
    return json.dumps({**envelope, "rows": rows, **more}).encode()


ABSURD: Mapping[str, Sequence[object]] = {
    "ratio": (math.nan, math.inf, -1.0, 0.0, 2 * MOST_RATIO, 0.5 / MOST_RATIO, "2", True, None),
    "tail": (math.nan, 0.5, 1e9, []),
    "tailRuns": (-1, 1.5, 2**60),
    "model": ("", "reader", "sha256:" + "g" * 64, 7, [[]], None),
    "provider": ("", "x" * 10_000, "line\nfeed", None),
    "product": ("", {}, "\x1b[31m"),
    "profileVersion": (PROFILE_VERSION + 1, -1, "4"),
    "operators": (
        None, [], {}, {"conv": 2.0}, {"conv": 0.5}, {"unheard": 1.0}, {"conv": math.nan, "matmul": 1.0},
    ),
    "load": (
        7, {"sizes": []}, {"sizes": {"session": -1}}, {"sizes": {"unheard": 1}}, {"memoryBytes": math.nan},
        {"memoryBytes": -1}, {"memoryBytes": 1e300}, {"memoryBytes": 10**400}, {"seconds": math.nan}, {"seconds": 1e9},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in ABSURD.items() for value in values],
    ids=lambda value: f"{value!r:.30}",
)
def test_a_row_that_cannot_be_is_left_out(field: str, value: object) -> None:
    found = read_measurements(document(ROW, {**ROW, "model": model(7), field: value}))
    assert [each.model for each in found.rows] == [ROW["model"]]
    assert found.left_out == 1
    (why,) = found.reasons
    assert why.code in (Code.TELEMETRY_ABSURD, Code.NOT_SUPPORTED_YET)
    assert why.found.startswith("rows[1]: ")
    assert len(str(why)) < 500
    with pytest.raises(ShoalError) as refused:
        read_measurements(document({**ROW, field: value}))
    assert refused.value.code is why.code, "nothing is left"


def test_a_pair_counts_once_and_no_row_need_be_an_object() -> None:
    found = read_measurements(document(ROW, {**ROW, "ratio": 900.0}, [], None, "row", 7))
    assert (len(found.rows), found.left_out) == (1, 5)
    assert read_measurements(document()).rows == ()


def test_reasons_are_bounded() -> None:
    rows = [{**ROW, "ratio": -1.0}] * 200
    found = read_measurements(document(ROW, *rows))
    assert (found.left_out, len(found.reasons)) == (200, 20)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", Code.FIELD_INVALID),
        (b"\xff\xfe\x00", Code.FIELD_INVALID),
        (b"[" * 100_000, Code.FIELD_INVALID),
        (b"[]", Code.FIELD_INVALID),
        (b'{"apiVersion": ' + b"9" * 5000 + b"}", Code.FIELD_INVALID),
        (b"{}", Code.FIELD_MISSING),
        (document(ROW, apiVersion="shoal/v2"), Code.API_VERSION_UNKNOWN),
        (document(ROW, kind="Policy"), Code.KIND_UNKNOWN),
        (document(ROW, region="../eu"), Code.NAME_INVALID),
        (document(ROW, region=7), Code.FIELD_INVALID),
        (document(ROW, exportedAt="yesterday"), Code.FIELD_INVALID),
        (document(ROW, exportedAt="2027-01-15T08:00:00"), Code.FIELD_INVALID),
        (document(ROW, exportedAt="9999-01-15T08:00:00Z"), Code.FIELD_INVALID),
        (document(ROW, rows={}), Code.FIELD_INVALID),
        (document(*[ROW] * (MOST_ROWS + 1)), Code.FIELD_TOO_MANY),
        (document(ROW, more="x" * MOST_DOCUMENT_BYTES), Code.TOO_LARGE),
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_a_document_that_cannot_be_read_is_refused(data: bytes, code: Code) -> None:
    with pytest.raises(ShoalError) as refused:
        read_measurements(data)
    assert refused.value.code is code


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(ROW)), inner, max_size=4),
        max_leaves=12,
    ),
    st.sampled_from(sorted(ROW)),
)
def test_whatever_stands_in_a_row_is_a_figure_that_can_be_or_is_left_out(value: object, field: str) -> None:
    found = read_measurements(document(ROW, {**ROW, "model": model(7), field: value}))
    assert len(found.rows) + found.left_out == 2
    learnt = RegionResiduals(found.rows).correction(model(7), BOARD, residual(1.0).mix)
    assert learnt is not None
    assert all(math.isfinite(each) and each > 0 for each in numbers(learnt))
