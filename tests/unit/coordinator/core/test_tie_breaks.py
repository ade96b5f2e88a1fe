"""What decides between places that are equally good: the seed and names alone."""

from collections import Counter
from itertools import pairwise

import numpy as np

from shoal.coordinator.core.placement.rank import place_number, tie_breaks, tie_breaks_of, variant_number

PLACES = [(f"node-{number}", device) for number in range(500) for device in ("cpu0", "gpu0")]


def test_many_places_at_once_are_in_the_order_of_each_by_itself() -> None:
    numbers = np.array([place_number(*place) for place in PLACES], dtype=np.uint64) ^ np.uint64(variant_number("fp16"))
    found = tie_breaks(7, "shop/ocr", numbers).tolist()
    assert found == tie_breaks_of(7, "shop/ocr", [(*place, "fp16") for place in PLACES])
    assert found == [each for place in PLACES for each in tie_breaks_of(7, "shop/ocr", [(*place, "fp16")])]
    assert len({*found}) == len(PLACES)


def test_the_seed_and_every_name_count() -> None:
    cases = [
        *((0, "w", "a", "cpu0", "m"), (1, "w", "a", "cpu0", "m"), (0, "v", "a", "cpu0", "m")),
        *((0, "w", "b", "cpu0", "m"), (0, "w", "a", "cpu1", "m"), (0, "w", "a", "cpu0", "n")),
    ]
    assert len(
        {tie_breaks_of(seed, name, [(node, device, model)])[0] for seed, name, node, device, model in cases}
    ) == len(cases)


def test_workloads_are_spread_evenly_over_equal_places() -> None:
    """Of 10,000 workloads each of ten places is the first choice of 1,000, within five standard deviations (30)."""
    numbers = np.array([place_number(f"node-{at}", "cpu0") for at in range(10)], dtype=np.uint64)
    firsts = Counter(int(tie_breaks(0, f"t/w{at}", numbers).argmin()) for at in range(10_000))
    assert len(firsts) == 10
    assert all(850 <= count <= 1150 for count in firsts.values()), firsts


def test_the_order_of_two_places_for_one_workload_tells_nothing_of_another() -> None:
    """Whichever of two comes first for one of neighbouring names does so for the next in half of the cases."""
    a, b = (np.uint64(place_number(node, "cpu0")) for node in ("node-1", "node-2"))
    pair = np.array([a, b], dtype=np.uint64)
    order = [bool(np.diff(tie_breaks(0, f"t/w{at}", pair).astype(np.float64))[0] > 0) for at in range(10_001)]
    same = sum(one == other for one, other in pairwise(order))
    assert 4750 <= same <= 5250
