"""Of a desired set with many routes, the store has a digest, by which a start knows them again."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders import agent_values
from shoal.coordinator import codec
from shoal.coordinator.controllers.workloads.desired_sets import (
    DESIRED,
    DIGESTS,
    FEW,
    LARGE,
    MOST_LEFT,
    DesiredSetRecords,
)
from shoal.coordinator.core.workloads.model import DesiredContent
from shoal.coordinator.ports import StoreRecord
from shoal.types.assignment import DesiredSet, Forwarding, Front, Version
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey

MANY = set(range(4 * FEW))


class Records:
    """What a store has of them."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def load(self, records: DesiredSetRecords) -> dict[str, DesiredSet]:
        found = [StoreRecord(key, value, 1) for key, value in sorted(self.values.items())]
        sets, digests, left = (
            [each for each in found if each.key.startswith(under)] for under in (DESIRED, DIGESTS, LARGE)
        )
        return records.load(sets, digests, left)

    def restart(self, decided: DesiredSet) -> tuple[DesiredSetRecords, DesiredSet | None]:
        """After a start and a first step that decides this of the set's node: the set as the region has it then; None:
        it is another."""
        records = DesiredSetRecords()
        sets = self.load(records)
        known = sets[decided.node]
        if decided.node not in records.incomplete:
            return records, known
        completed = records.find_complete(sets, {decided.node: content_of(decided)})
        records.adopt(completed, ())
        return records, completed.get(decided.node)


def content_of(desired: DesiredSet) -> DesiredContent:
    return DesiredContent(desired.assignments, desired.routes, forwarding=desired.forwarding)


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
def test_a_start_knows_the_set_again_as_it_was_written_last(
    steps: list[tuple[set[int], bool, bool, bool]],
) -> None:
    """Each step changes some routes, and perhaps the forwarding; some commits fail, and some steps follow a restart."""
    store, records, numbers = Records(), DesiredSetRecords(), MANY
    routes, stored = {number: route(number, 1) for number in range(4 * FEW + 1)}, desired_set(numbers, 1)
    store.values |= records.write(stored)
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
        store.values |= writes
        stored = one
        again, found = store.restart(replace(stored, version=Version("h", 1, 99)))
        assert found == stored
        records = again if restarts else records


@pytest.mark.parametrize(
    "other",
    [
        desired_set(MANY, 1, {number: route(number, 1 + (number == 5)) for number in MANY}),
        desired_set(MANY - {7}, 1),
        desired_set(MANY | {999}, 1),
        desired_set(set(), 1),
        desired_set(MANY, 1, forwarding=Forwarding((Front("n1", "key"),))),
        desired_set(MANY, 1, forwarding=Forwarding((Front("n2", "key"),), ("shop",))),
    ],
    ids=("another route", "one less", "one more", "none", "no entry", "another front"),
)
def test_a_start_takes_nothing_else_for_what_was_sent(other: DesiredSet) -> None:
    store, records = Records(), DesiredSetRecords()
    one = desired_set(MANY, 1, forwarding=Forwarding((Front("n1", "key"),), ("shop",)))
    store.values |= records.write(one)
    again, found = store.restart(other)
    assert found is None
    assert {*again.incomplete} == {"gw"}, "until another set is written"
    new = replace(other, version=Version("h", 1, 2))
    store.values |= again.write(new, one.version)
    assert again.incomplete, "until that is stored"
    again.adopt(("gw",), ())
    assert not again.incomplete
    assert store.restart(new)[1] == new


def test_routes_that_the_same_step_decides_otherwise_are_not_those_of_a_set_that_was_written_since() -> None:
    """An older coordinator wrote it, which leaves the digest of the set before."""
    store = Records()
    store.values |= DesiredSetRecords().write(desired_set(MANY, 1))
    whole = desired_set(MANY - {1}, 2)
    store.values["desired/gw"] = codec.dump(whole)
    records = DesiredSetRecords()
    assert store.load(records) == {"gw": whole}
    assert not records.incomplete


def test_a_write_is_small_whatever_changed() -> None:
    store, records, forwarding = Records(), DesiredSetRecords(), Forwarding((Front("n1", "key"),))
    one = desired_set(set(range(3000)), 1, forwarding=forwarding)
    numbers, store.values = set(range(3000)), dict(records.write(one))
    for generation, count in enumerate((100, 3000, 200, 1500), 2):
        others = set(range(0, 3 * count, 3))
        two = desired_set(others, generation, forwarding=forwarding)
        writes = records.write(two, one.version, {key_of(number) for number in numbers ^ others})
        assert {*writes} == {"desired/gw", "set-digests/gw"}
        assert sum(map(len, writes.values())) < 2000
        store.values |= writes
        assert store.restart(two)[1] == two
        numbers, one = others, two


def test_gateways_have_the_digest_of_their_own_routes() -> None:
    """They share what was computed of routes that are the same."""
    store, records = Records(), DesiredSetRecords()
    sets = {
        name: replace(desired_set(MANY, 1, {each: route(each, 1 + (each == own)) for each in MANY}), node=name)
        for own, name in enumerate(("gw-0", "gw-1", "gw-2"))
    }
    for one in sets.values():
        store.values |= records.write(one)
    again = DesiredSetRecords()
    loaded = store.load(again)
    assert again.find_complete(loaded, {name: content_of(one) for name, one in sets.items()}) == sets


def test_a_set_with_few_routes_is_one_record() -> None:
    store, records = Records(), DesiredSetRecords()
    for generation, count in enumerate((2 * FEW, 3, 2 * FEW), 1):
        one = desired_set(set(range(count)), generation)
        store.values |= records.write(one)
        left = records.obsolete_keys({"gw": one})
        assert left == (("set-digests/gw",) if count == 3 else ())
        assert left == records.obsolete_keys({"gw": one}), "until it is deleted"
        for key in left:
            del store.values[key]
        records.adopt((), left)
        assert store.restart(one)[1] == one
        assert (len(store.values) == 1) == (count == 3)


def test_a_set_of_a_node_that_asks_for_routes_is_one_record() -> None:
    """Up to its next report, what it subscribes to is read from there, by an older coordinator too."""
    store, records = Records(), DesiredSetRecords()
    store.values |= records.write(desired_set(MANY, 1))
    one = replace(desired_set(MANY, 2), routes_on_demand=True)
    assert records.write(one) == {"desired/gw": codec.dump(one)}
    assert records.obsolete_keys({"gw": one}) == records.parts("gw") == ("set-digests/gw",)


def test_a_digest_is_kept_until_its_set_has_its_routes() -> None:
    store = Records()
    store.values |= DesiredSetRecords().write(desired_set(MANY, 1))
    records = DesiredSetRecords()
    assert not records.obsolete_keys(store.load(records))


def test_records_that_nobody_needs_are_deleted_some_at_a_time() -> None:
    """Of nodes that an older coordinator removed, and of earlier versions."""
    store, kept = Records(), replace(desired_set(MANY, 1), node="kept")
    for one in (desired_set(MANY, 1), replace(kept, node="other"), kept):
        store.values |= DesiredSetRecords().write(one)
    del store.values["desired/gw"], store.values["desired/other"]
    store.values |= {f"{LARGE}kept/routes/{at}": b"{}" for at in range(2 * MOST_LEFT)} | {f"{LARGE}kept": b"{}"}
    records = DesiredSetRecords()
    sets = store.load(records)
    assert sets.keys() == {"kept"}
    new = {"new": replace(kept, node="new")}
    store.values |= records.write(new["new"])
    turns = 0
    while keys := records.obsolete_keys(new, sets):
        assert len(keys) <= MOST_LEFT
        assert keys == records.obsolete_keys(new, sets), "until they are deleted"
        for key in keys:
            del store.values[key]
        records.adopt((), keys)
        turns += 1
    assert turns == 3
    assert {*store.values} == {"desired/kept", "desired/new", "set-digests/kept", "set-digests/new"}
