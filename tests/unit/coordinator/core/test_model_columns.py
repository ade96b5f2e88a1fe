"""What columns know of one model on every device."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.core.placement.columns import NONE, _Model


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.sets(st.integers(0, 39)), st.integers(1, 40))
def test_devices_without_a_measurement_are_taken_over_together_as_one_by_one(
    classes: list[int], measured: set[int], most: int
) -> None:
    """measured: rows where it was. most: rows that are looked at together."""
    rows = range(len(classes))
    alone, together = _Model(len(rows), rows), _Model(len(rows), rows)
    for row in rows:
        alone.put(row, (classes[row], (row,) if row in measured else ()))
    for start in range(0, len(rows), most):
        part = [*rows[start : start + most]]
        for row in part:
            if row in measured:
                together.put(row, (classes[row], (row,)))
        plain = [row for row in part if row not in measured]
        if plain:
            together.put_unmeasured(np.array(plain, dtype=np.int64), np.array([classes[row] for row in plain]))
    assert not together.unknown
    assert together.changes == alone.changes == len(rows)
    assert together.version == alone.version
    for key, kind in alone.ids.items():
        other = together.ids[key]
        assert together.counts[other] == alone.counts[kind]
        assert np.array_equal(together.kinds == other, alone.kinds == kind)
        assert together.kinds[together.row_of(other)] == other
    assert not np.any(together.kinds == NONE)
