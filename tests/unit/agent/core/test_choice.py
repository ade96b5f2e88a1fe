"""When to leave gRPC for MQTT, and when to come back."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.core.choice import Carrier, Choice, Timing, ended, looked
from shoal.types.units import Elapsed, Seconds

TIMING = Timing(holds_s=Seconds(60.0), strikes=2, first_look_s=Seconds(10.0), most_s=Seconds(100.0))
FRESH = Choice("edge-1", TIMING)
NOW = Elapsed(1000.0)
GRPC, MQTT = Carrier.GRPC, Carrier.MQTT


def on_mqtt() -> Choice:
    once = ended(FRESH, GRPC, Seconds(0.0), NOW)
    return ended(once, GRPC, Seconds(0.0), NOW)


def wait(choice: Choice) -> float:
    assert choice.look_at is not None
    return choice.look_at - NOW


def test_grpc_comes_first() -> None:
    assert FRESH.carrier is GRPC


def test_one_failure_is_tried_again_two_are_not() -> None:
    once = ended(FRESH, GRPC, Seconds(0.0), NOW)
    assert (once.carrier, once.look_at) == (GRPC, None)
    twice = ended(once, GRPC, Seconds(0.0), NOW)
    assert twice.carrier is MQTT
    assert 5.0 <= wait(twice) <= 10.0


def test_sessions_that_are_cut_young_count_as_failures() -> None:
    cut = ended(FRESH, GRPC, Seconds(3.0), NOW)
    assert ended(cut, GRPC, Seconds(59.9), NOW).carrier is MQTT


def test_a_session_that_held_begins_anew() -> None:
    held = ended(ended(FRESH, GRPC, Seconds(3.0), NOW), GRPC, Seconds(60.0), NOW)
    assert held == FRESH
    assert ended(held, GRPC, Seconds(3.0), NOW).carrier is GRPC


def test_mqtt_stays_while_it_works() -> None:
    choice = on_mqtt()
    assert ended(choice, MQTT, Seconds(0.5), NOW) == choice


def test_where_neither_works_they_take_turns() -> None:
    choice, turns = on_mqtt(), []
    for _ in range(6):
        choice = ended(choice, choice.carrier, Seconds(0.0), NOW)
        turns.append(choice.carrier)
    assert turns == [GRPC, MQTT] * 3


def test_a_look_that_fails_waits_longer_for_the_next() -> None:
    choice = on_mqtt()
    waits = []
    for _ in range(8):
        choice = looked(choice, False, NOW)
        waits.append(wait(choice))
    assert choice.carrier is MQTT
    assert waits[1] > waits[0]
    assert max(waits) <= TIMING.most_s


def test_it_returns_once_grpc_is_reachable_and_leaves_again_at_the_first_cut() -> None:
    back = looked(on_mqtt(), True, NOW)
    assert (back.carrier, back.look_at) == (GRPC, None)
    assert ended(back, MQTT, Seconds(500.0), NOW) == back, "the session that was ended for it says nothing of gRPC"
    again = ended(back, GRPC, Seconds(5.0), NOW)
    assert again.carrier is MQTT
    assert again.looks == 2
    assert wait(again) > 10.0 / 2 * 1.5
    assert ended(back, GRPC, Seconds(60.0), NOW) == FRESH


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
            choice = ended(choice, what, Seconds(lasted), NOW)
        elif choice.carrier is MQTT:
            choice = looked(choice, bool(what), NOW)
        assert (choice.look_at is not None) is (choice.carrier is MQTT)
        assert choice.strikes <= TIMING.strikes
        if choice.look_at is not None:
            assert 0.0 < choice.look_at - NOW <= TIMING.most_s


@given(st.text("abc", min_size=1, max_size=5))
def test_a_fleet_does_not_look_together(name: str) -> None:
    mine = replace(on_mqtt(), node=name)
    theirs = replace(on_mqtt(), node=f"{name}x")
    assert looked(mine, False, NOW).look_at != looked(theirs, False, NOW).look_at
