"""A desired set with many routes is several records, of which a write replaces those that changed."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders import agent_values
from shoal.coordinator import codec
from shoal.coordinator.controllers.workloads.desired_sets import (
    BLOCK,
    BLOCKS,
    DESIRED,
    FEW,
    LARGE,
    MOST_OWNERLESS,
    SIZE,
    DesiredSetRecords,
    RouteBlock,
    SetWrites,
)
from shoal.coordinator.ports import StoreRecord
from shoal.types.assignment import DesiredSet, Forwarding, Front, Version
from shoal.types.codes import ShoalError
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey

MANY = set(range(4 * FEW))


class Records:
    """What a store has of them."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def commit(self, writes: SetWrites) -> None:
        self.values |= writes.puts
        for key in writes.deletes:
            self.values.pop(key, None)

    def load(self, records: DesiredSetRecords) -> dict[str, DesiredSet]:
        found = [StoreRecord(key, value, 1) for key, value in sorted(self.values.items())]
        return records.load(
            [each for each in found if each.key.startswith(DESIRED)],
            [each for each in found if each.key.startswith(LARGE)],
        )


def route(number: int, generation: int) -> Route:
    endpoint = Endpoint(f"a-{number}", "n1", EndpointKind.AGENT, "n1:9000", 1.0, EndpointState.READY)
    return Route(key_of(number), generation, (endpoint,) * (number % 3))


def key_of(number: int) -> WorkloadKey:
    return WorkloadKey("shop", f"w-{number:04}")


def desired_set(
    numbers: set[int], generation: int, routes: dict[int, Route] | None = None, forwarding: Forwarding | None = None
) -> DesiredSet:
    known = {number: route(number, 1) for number in numbers} if routes is None else routes
    return DesiredSet(
        "gw", Version("h", 1, generation), (agent_values.assignment("a-1"),),
        tuple(known[number] for number in sorted(numbers)), (), (), Seconds(1.0), forwarding=forwarding,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 4 * FEW), max_size=200), st.booleans(), st.booleans(), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_the_store_has_the_set_as_it_was_written_last(steps: list[tuple[set[int], bool, bool, bool]]) -> None:
    """Each step changes some routes, and perhaps the forwarding; some commits fail, and some steps follow a restart."""
    store, records, numbers = Records(), DesiredSetRecords(), MANY
    routes, stored = {number: route(number, 1) for number in range(4 * FEW + 1)}, desired_set(numbers, 1)
    store.commit(records.write(stored))
    for at, (others, is_regrouped, is_stored, restarts) in enumerate(steps):
        was, known = numbers, dict(routes)
        numbers = numbers ^ others
        routes = routes | {number: route(number, at + 2) for number in others}
        forwarding = Forwarding((Front("n1", f"key-{at}"),)) if is_regrouped else stored.forwarding
        one = desired_set(numbers, stored.version.generation + 1, routes, forwarding)
        writes = records.write(one, stored.version, {key_of(number) for number in others})
        if not is_stored:
            numbers, routes = was, known
            continue
        store.commit(writes)
        stored = one
        records = DesiredSetRecords() if restarts else records
        assert store.load(records if restarts else DesiredSetRecords()) == {"gw": stored}
    parts = {key for key in store.values if key.startswith(LARGE)}
    assert parts <= {*records.parts("gw")}, "what may be stored is deleted with the node"


def test_a_write_has_what_changed_alone() -> None:
    store, records = Records(), DesiredSetRecords()
    one = desired_set(MANY, 1, forwarding=Forwarding((Front("n1", "key"),)))
    whole = records.write(one)
    store.commit(whole)
    routes = {number: route(number, 1) for number in MANY} | {5: route(5, 2)}
    two = desired_set(MANY, 2, routes, one.forwarding)
    writes = records.write(two, one.version, {key_of(5)})
    assert {*writes.puts} == {"desired/gw", "large-sets/gw", "large-sets/gw/routes/0"}
    assert sum(map(len, writes.puts.values())) < sum(map(len, whole.puts.values())) / 2


def test_after_a_restart_a_write_has_what_changed_alone() -> None:
    store = Records()
    store.commit(DesiredSetRecords().write(desired_set(MANY, 1)))
    records = DesiredSetRecords()
    found = store.load(records)["gw"]
    writes = records.write(desired_set(MANY - {SIZE + 1}, 2), found.version, {key_of(SIZE + 1)})
    assert {*writes.puts} == {"desired/gw", "large-sets/gw", "large-sets/gw/routes/1"}


def test_records_that_an_older_coordinator_left_are_of_no_set() -> None:
    store, records = Records(), DesiredSetRecords()
    store.commit(records.write(desired_set(MANY, 1)))
    whole = desired_set({1, 2, *range(100, 180)}, 2)
    store.values["desired/gw"] = codec.dump(whole)
    records = DesiredSetRecords()
    assert store.load(records) == {"gw": whole}
    few = desired_set({1, 2}, 3)
    store.commit(records.write(few, whole.version, {key_of(100)}))
    assert {*store.values} == {"desired/gw"}
    assert store.load(DesiredSetRecords()) == {"gw": few}


def test_a_set_with_few_routes_is_one_record() -> None:
    store, records = Records(), DesiredSetRecords()
    for generation, count in enumerate((2 * FEW, 3, 2 * FEW), 1):
        one = desired_set(set(range(count)), generation)
        store.commit(records.write(one))
        assert store.load(DesiredSetRecords()) == {"gw": one}
        assert (len(store.values) == 1) == (count == 3)


def test_a_set_with_routes_on_demand_is_one_record() -> None:
    """Up to its node's next report, what it subscribes to is read from there, by an older coordinator too."""
    one = replace(desired_set(MANY, 1), routes_on_demand=True)
    assert DesiredSetRecords().write(one).puts == {"desired/gw": codec.dump(one)}


def test_what_a_node_may_forward_to_is_written_as_any_value() -> None:
    fronts = (Front("n1", "key-1"), Front("n2", ""), Front("n3", "key-3", (key_of(1), key_of(2))))
    records = DesiredSetRecords()
    for forwarding in (Forwarding(fronts, ("*",)), Forwarding(fronts[1:], ("shop", 'a"b')), Forwarding()):
        writes = records.write(desired_set(MANY, 1, forwarding=forwarding))
        assert writes.puts["large-sets/gw/forwarding"] == codec.dump(forwarding)


def test_routes_that_stay_are_written_as_any_value() -> None:
    store, records = Records(), DesiredSetRecords()
    routes = {number: route(number, 1) for number in MANY}
    before: Version | None = None
    for generation, number in enumerate((5, 5, 6, 30), start=1):
        routes = routes | {number: route(number, generation + 1)}
        one = desired_set(MANY, generation, routes)
        writes = records.write(one, before, {key_of(number)} if before is not None else None)
        store.commit(writes)
        before = one.version
        place = {key_of(each): routes[each] for each in MANY}
        for key, text in writes.puts.items():
            if BLOCK in key:
                found = codec.load(RouteBlock, text).routes
                assert text == codec.dump(RouteBlock(tuple(place[each.workload] for each in found)))


def test_records_are_deleted_once() -> None:
    store, records = Records(), DesiredSetRecords()
    one = desired_set(MANY, 1)
    store.commit(records.write(one))
    few = desired_set({1, 2}, 2)
    lost = records.write(few, one.version, set())
    assert records.write(few, one.version, set()).deletes == lost.deletes, "the first was not stored"
    store.commit(lost)
    assert {*store.values} == {"desired/gw"}
    assert not records.write(desired_set({1, 2}, 3), few.version, set()).deletes
    assert not records.parts("gw")


def test_a_large_set_is_few_records_whatever_becomes_of_it() -> None:
    """A store takes 128 writes in one transaction, of all gateways together."""
    store, records, numbers = Records(), DesiredSetRecords(), set(range(3000))
    one = desired_set(numbers, 1, forwarding=Forwarding((Front("n1", "key"),)))
    whole = records.write(one)
    assert len(whole.puts) <= BLOCKS + 3
    store.commit(whole)
    for generation, count in enumerate((100, 3000, 200, 1500), 2):
        others = set(range(0, 3 * count, 3))
        two = replace(desired_set(others, generation), forwarding=one.forwarding)
        writes = records.write(two, one.version, {key_of(number) for number in numbers ^ others})
        assert len(writes.puts) + len(writes.deletes) <= 128
        store.commit(writes)
        assert store.load(DesiredSetRecords()) == {"gw": two}
        numbers, one = others, two
    last = replace(desired_set(numbers, 9), forwarding=one.forwarding)
    assert len(records.write(last, one.version, {key_of(0)}).puts) == 3, "its first block alone"


def test_a_set_of_a_node_that_asks_for_routes_is_one_record() -> None:
    """An older coordinator takes from it what the node subscribes to."""
    store, records = Records(), DesiredSetRecords()
    store.commit(records.write(desired_set(MANY, 1)))
    one = replace(desired_set(MANY, 2), routes_on_demand=True)
    store.commit(records.write(one))
    assert store.values == {"desired/gw": codec.dump(one)}


def test_records_of_a_node_that_an_older_coordinator_removed_are_deleted_some_at_a_time() -> None:
    store, kept = Records(), replace(desired_set(MANY, 1), node="kept")
    for one in (desired_set(set(range(3000)), 1), replace(kept, node="other"), kept):
        store.commit(DesiredSetRecords().write(one))
    del store.values["desired/gw"], store.values["desired/other"]
    records = DesiredSetRecords()
    sets = store.load(records)
    assert sets.keys() == {"kept"}
    new = {"new": replace(kept, node="new")}
    store.commit(records.write(new["new"]))
    turns = 0
    while keys := records.ownerless(sets, new):
        assert len(keys) <= MOST_OWNERLESS
        assert keys == records.ownerless(sets, new), "until they are deleted"
        store.commit(SetWrites({}, keys))
        records.drop(keys)
        turns += 1
    assert turns == 2
    assert store.load(DesiredSetRecords()) == sets | new
    assert not any(key.startswith((LARGE + "gw", LARGE + "other")) for key in store.values)


@pytest.mark.parametrize("rest", ["/routes/x", "/routes/", "/routes/-1", "/routes/1_0", "/routes/²", "/route/1", "/x"])
def test_a_record_that_is_none_of_a_set_is_refused(rest: str) -> None:
    store = Records()
    store.commit(DesiredSetRecords().write(desired_set(MANY, 1)))
    store.values[f"{LARGE}gw{rest}"] = store.values[f"{LARGE}gw/routes/0"]
    with pytest.raises(ShoalError, match="STATE_CORRUPT"):
        store.load(DesiredSetRecords())


def test_a_record_without_routes_is_refused() -> None:
    store = Records()
    store.commit(DesiredSetRecords().write(desired_set(MANY, 1)))
    store.values[f"{LARGE}gw/routes/0"] = codec.dump(RouteBlock(()))
    with pytest.raises(ShoalError, match="STATE_CORRUPT"):
        store.load(DesiredSetRecords())
