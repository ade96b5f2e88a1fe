"""When to leave gRPC for MQTT, and when to come back."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.core.carrier_selection import Carrier, CarrierSelection, CarrierTiming, record_call, record_recheck
from shoal.types.units import Elapsed, Seconds

TIMING = CarrierTiming(
    stable_s=Seconds(60.0), strike_limit=2, first_recheck_s=Seconds(10.0), max_recheck_s=Seconds(100.0)
)
FRESH = CarrierSelection("edge-1", TIMING)
NOW = Elapsed(1000.0)
GRPC, MQTT = Carrier.GRPC, Carrier.MQTT


def on_mqtt() -> CarrierSelection:
    once = record_call(FRESH, GRPC, Seconds(0.0), NOW)
    return record_call(once, GRPC, Seconds(0.0), NOW)


def wait(choice: CarrierSelection) -> float:
    assert choice.recheck_at is not None
    return choice.recheck_at - NOW


def test_grpc_comes_first() -> None:
    assert FRESH.carrier is GRPC


def test_one_failure_is_tried_again_two_are_not() -> None:
    once = record_call(FRESH, GRPC, Seconds(0.0), NOW)
    assert (once.carrier, once.recheck_at) == (GRPC, None)
    twice = record_call(once, GRPC, Seconds(0.0), NOW)
    assert twice.carrier is MQTT
    assert 5.0 <= wait(twice) <= 10.0


def test_sessions_that_are_cut_young_count_as_failures() -> None:
    cut = record_call(FRESH, GRPC, Seconds(3.0), NOW)
    assert record_call(cut, GRPC, Seconds(59.9), NOW).carrier is MQTT


def test_a_session_that_held_begins_anew() -> None:
    held = record_call(record_call(FRESH, GRPC, Seconds(3.0), NOW), GRPC, Seconds(60.0), NOW)
    assert held == FRESH
    assert record_call(held, GRPC, Seconds(3.0), NOW).carrier is GRPC


def test_mqtt_stays_while_it_works() -> None:
    choice = on_mqtt()
    assert record_call(choice, MQTT, Seconds(0.5), NOW) == choice


def test_where_neither_works_they_take_turns() -> None:
    choice, turns = on_mqtt(), []
    for _ in range(6):
        choice = record_call(choice, choice.carrier, Seconds(0.0), NOW)
        turns.append(choice.carrier)
    assert turns == [GRPC, MQTT] * 3


def test_a_look_that_fails_waits_longer_for_the_next() -> None:
    choice = on_mqtt()
    waits = []
    for _ in range(8):
        choice = record_recheck(choice, False, NOW)
        waits.append(wait(choice))
    assert choice.carrier is MQTT
    assert waits[1] > waits[0]
    assert max(waits) <= TIMING.max_recheck_s


def test_it_returns_once_grpc_is_reachable_and_leaves_again_at_the_first_cut() -> None:
    back = record_recheck(on_mqtt(), True, NOW)
    assert (back.carrier, back.recheck_at) == (GRPC, None)
    assert record_call(back, MQTT, Seconds(500.0), NOW) == back, (
        "the session that was ended for it says nothing of gRPC"
    )
    again = record_call(back, GRPC, Seconds(5.0), NOW)
    assert again.carrier is MQTT
    assert again.rechecks == 2
    assert wait(again) > 10.0 / 2 * 1.5
    assert record_call(back, GRPC, Seconds(60.0), NOW) == FRESH


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("ended"), st.sampled_from(Carrier), st.floats(0.0, 200.0)),
            st.tuples(st.just("looked"), st.booleans(), st.just(0.0)),
        ),
        max_size=60,
    )
)
def test_it_always_has_a_carrier_and_on_mqtt_a_time_to_look(events: list[tuple[str, object, float]]) -> None:
    choice = FRESH
    for kind, what, lasted in events:
        if kind == "ended" and isinstance(what, Carrier):
            choice = record_call(choice, what, Seconds(lasted), NOW)
        elif choice.carrier is MQTT:
            choice = record_recheck(choice, bool(what), NOW)
        assert (choice.recheck_at is not None) is (choice.carrier is MQTT)
        assert choice.strikes <= TIMING.strike_limit
        if choice.recheck_at is not None:
            assert 0.0 < choice.recheck_at - NOW <= TIMING.max_recheck_s


@given(st.text("abc", min_size=1, max_size=5))
def test_a_fleet_does_not_look_together(name: str) -> None:
    mine = replace(on_mqtt(), node=name)
    theirs = replace(on_mqtt(), node=f"{name}x")
    assert record_recheck(mine, False, NOW).recheck_at != record_recheck(theirs, False, NOW).recheck_at
