"""Lanes: messages of one node wait for that node only, and whoever is gone leaves room."""

import pytest

from shoal.coordinator.core.link import lanes as module
from shoal.coordinator.core.link.lanes import (
    MAX_CONCURRENT_HELLOS,
    MAX_WAITING,
    Lane,
    LaneReady,
    Lanes,
    MessageDropped,
    PauseLane,
)
from shoal.coordinator.core.rate_limit import MESSAGE_BURST, MESSAGES_PER_S
from shoal.types.topics import Channel
from shoal.types.units import Elapsed, Seconds

NOW = Elapsed(100.0)
NOTICE_S = Seconds(1.0)


def put(lanes: Lanes, node: str, channel: Channel = Channel.STATUS, payload: bytes = b"", now: Elapsed = NOW) -> Lane:
    """The lane that is ready for it."""
    (ready,) = lanes.put(node, channel, payload, now)
    assert isinstance(ready, LaneReady)
    return ready.lane


def read_all(lanes: Lanes, lane: Lane) -> list[bytes]:
    found = []
    while (taken := lanes.take(lane, NOW)) is not None:
        assert not isinstance(taken, PauseLane)
        found.append(taken[1])
        lanes.on_handled(lane)
    return found


def test_a_lane_is_ready_once_and_read_in_order() -> None:
    lanes = Lanes()
    lane = put(lanes, "a", payload=b"0")
    assert lanes.put("a", Channel.STATUS, b"1", NOW) == ()
    assert read_all(lanes, lane) == [b"0", b"1"]
    assert put(lanes, "a", payload=b"2") is lane


def test_a_flood_drops_the_oldest_messages_of_its_node_only() -> None:
    lanes = Lanes()
    other = put(lanes, "b", payload=b"other")
    lane = put(lanes, "a", payload=b"0")
    effects = [lanes.put("a", Channel.STATUS, str(number).encode(), NOW) for number in range(1, MAX_WAITING + 2)]
    assert effects == [()] * (MAX_WAITING - 1) + [(MessageDropped("flood"),)] * 2
    assert read_all(lanes, lane) == [str(number).encode() for number in range(2, MAX_WAITING + 2)]
    assert read_all(lanes, other) == [b"other"]


def test_a_node_beyond_its_pace_waits() -> None:
    lanes = Lanes()
    for _ in range(MESSAGE_BURST):
        lane = put(lanes, "a")
        read_all(lanes, lane)
    lane = put(lanes, "a", payload=b"late")
    pause = lanes.take(lane, NOW)
    assert isinstance(pause, PauseLane)
    assert pause.seconds == 1.0 / MESSAGES_PER_S
    assert lanes.take(lane, Elapsed(NOW + 2 * pause.seconds)) == (Channel.STATUS, b"late")


def test_hellos_beyond_the_bound_wait_for_their_turn_and_delay_no_status() -> None:
    lanes = Lanes()
    busy = [put(lanes, f"n-{number}", Channel.HELLO) for number in range(MAX_CONCURRENT_HELLOS)]
    for lane in busy:
        assert lanes.take(lane, NOW) == (Channel.HELLO, b"")
    first, second = (put(lanes, name, Channel.HELLO) for name in ("first", "second"))
    assert lanes.take(first, NOW) is lanes.take(second, NOW) is None
    assert lanes.put("first", Channel.STATUS, b"behind it", NOW) == (), "it is not read twice"
    assert read_all(lanes, put(lanes, "other", payload=b"status")) == [b"status"]
    assert lanes.on_handled(busy[0]) == (LaneReady(first),)
    assert lanes.on_handled(busy[0]) == ()
    assert lanes.take(first, NOW) == (Channel.HELLO, b"")
    assert lanes.on_handled(busy[1]) == (LaneReady(second),)
    assert lanes.on_handled(first) == ()
    assert lanes.take(first, NOW) == (Channel.STATUS, b"behind it")


def test_a_turn_whose_hello_a_flood_pushed_out_is_passed_on() -> None:
    lanes = Lanes()
    busy = [put(lanes, f"n-{number}", Channel.HELLO) for number in range(MAX_CONCURRENT_HELLOS)]
    for lane in busy:
        lanes.take(lane, NOW)
    first, second = (put(lanes, name, Channel.HELLO) for name in ("first", "second"))
    assert lanes.take(first, NOW) is lanes.take(second, NOW) is None
    for _ in range(MAX_WAITING):
        lanes.put("first", Channel.STATUS, b"", NOW)
    assert lanes.on_handled(busy[0]) == (LaneReady(first),)
    assert lanes.take(first, NOW) == (Channel.STATUS, b"")
    assert lanes.on_handled(first) == (LaneReady(second),)


def test_a_node_that_was_told_that_its_session_is_over_leaves_room_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its lane stays while the notice limits a further one, and counts until then only."""
    monkeypatch.setattr(module, "MAX_LANES", 1)
    lanes = Lanes()
    lane = put(lanes, "former")
    read_all(lanes, lane)
    assert lanes.may_notify_stale(lane, NOW, NOTICE_S)
    assert not lanes.may_notify_stale(lane, Elapsed(NOW + 0.9), NOTICE_S)
    lanes.remove(lane)
    assert lanes.is_current(lane), "else each message of it would be answered"
    lanes.remove_idle(Elapsed(NOW + 0.9), (), NOTICE_S)
    assert lanes.put("other", Channel.STATUS, b"", NOW) == (MessageDropped("lanes"),)
    lanes.remove_idle(Elapsed(NOW + 1.0), (), NOTICE_S)
    assert len(lanes) == 0
    put(lanes, "other")


def test_lanes_that_are_read_or_have_a_session_stay() -> None:
    lanes = Lanes()
    reading, open_lane, idle = (put(lanes, name) for name in ("reading", "open", "idle"))
    read_all(lanes, open_lane)
    read_all(lanes, idle)
    lanes.remove(reading)
    lanes.remove_idle(Elapsed(NOW + 99.0), {"open"}, NOTICE_S)
    assert [lanes.is_current(lane) for lane in (reading, open_lane, idle)] == [True, True, False]
