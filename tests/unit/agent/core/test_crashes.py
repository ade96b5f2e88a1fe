"""Crash forensics: which request is blamed when workers crash, and which ones are cleared."""

import pytest

from shoal.agent.core.crashes import (
    BlockedRequests,
    Crash,
    CrashForensics,
    RequestsAtCrash,
    SuspectedRequests,
    is_second_crash,
    is_to_blame,
)
from shoal.types.units import Elapsed

NOW = Elapsed(100.0)


class Request:
    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.crash: Crash | None = None


def crash(forensics: CrashForensics, replica: str, *requests: Request) -> None:
    """All of `requests` are in flight at `replica` when it crashes, and fail one after the other, as the front has
    it."""
    for each in requests:
        forensics.on_attempt(replica, each)
    for each in requests:
        forensics.on_crash(replica, each, NOW)
        forensics.on_attempt_end(replica, each)
        forensics.add_suspect(each, NOW)
        if is_second_crash(each):
            forensics.block_if_to_blame(each, NOW)


@pytest.mark.parametrize(
    ("first", "second", "blamed"),
    [
        (frozenset(), frozenset(), True),
        (frozenset({b"x"}), frozenset({b"y"}), True),
        (frozenset({b"x"}), frozenset(), True),
        (frozenset({b"x", b"y"}), frozenset({b"x", b"y"}), False),
    ],
)
def test_a_request_is_blamed_only_if_nothing_else_explains_both_crashes(
    first: frozenset[bytes], second: frozenset[bytes], blamed: bool
) -> None:
    assert is_to_blame(first, second) is blamed


def test_a_request_that_crashes_two_workers_alone_is_blocked() -> None:
    forensics, poison = CrashForensics(), Request(b"poison")
    crash(forensics, "a", poison)
    assert forensics.is_suspect(poison, NOW)
    assert forensics.blocked_s(poison, NOW) is None
    crash(forensics, "b", poison)
    assert forensics.blocked_s(Request(b"poison"), NOW) is not None, "the same bytes are refused"
    assert forensics.blocked_s(Request(b"other"), NOW) is None


def test_all_that_fail_in_a_crash_know_the_same_requests_in_flight() -> None:
    forensics, first, second = CrashForensics(), Request(b"x"), Request(b"y")
    crash(forensics, "a", first, second)
    assert first.crash is not None
    assert second.crash is not None
    assert first.crash.in_flight is second.crash.in_flight
    assert first.crash.in_flight.others(b"x") == {b"y"}
    assert first.crash.in_flight.others(b"y") == {b"x"}


def test_equal_requests_in_flight_count_as_others() -> None:
    forensics, first, second = CrashForensics(), Request(b"x"), Request(b"x")
    crash(forensics, "a", first, second)
    crash(forensics, "b", first, second)
    assert is_second_crash(first)
    assert forensics.blocked_s(first, NOW) is None


class CountedDigest(bytes):
    """Counts how often any of them is put into a set or dict, or sought there."""

    uses = 0

    def __hash__(self) -> int:
        CountedDigest.uses += 1
        return super().__hash__()


def test_a_crash_of_many_requests_costs_each_of_them_and_each_later_answer_little() -> None:
    forensics, count = CrashForensics(), 1024
    requests = [Request(CountedDigest(n.to_bytes(32))) for n in range(count)]
    CountedDigest.uses = 0
    crash(forensics, "a", *requests)
    assert CountedDigest.uses < 16 * count
    for each in (Request(CountedDigest(b"elsewhere")), *requests[::64]):
        CountedDigest.uses = 0
        forensics.on_answer(each)
        assert 0 < CountedDigest.uses < 16, "what was in flight with it is not copied"
    assert not forensics.is_suspect(requests[64], NOW)
    assert forensics.is_suspect(requests[65], NOW)


def test_any_number_of_crashes_leaves_an_answer_cheap() -> None:
    forensics = CrashForensics()
    for n in range(1000):
        crash(forensics, "a", Request(n.to_bytes(32)))
    CountedDigest.uses = 0
    forensics.on_answer(Request(CountedDigest(b"elsewhere")))
    assert 0 < CountedDigest.uses < 16


def test_any_number_of_crashes_leaves_an_answer_what_it_explains() -> None:
    forensics, poison, bystander = CrashForensics(), Request(b"poison"), Request(b"bystander")
    crash(forensics, "a", poison, bystander)
    for n in range(256):
        crash(forensics, "other", Request(n.to_bytes(32)))
    forensics.on_answer(bystander)
    crash(forensics, "b", poison, bystander)
    assert forensics.blocked_s(poison, NOW) is not None, "its company of both crashes was answered in between"
    assert forensics.blocked_s(bystander, NOW) is None


def test_an_answer_between_two_failures_of_one_crash_changes_no_comparison() -> None:
    forensics, answered = CrashForensics(), Request(b"answered")
    requests = Request(b"x"), Request(b"y")
    crash(forensics, "a", *requests, answered)
    for each in (*requests, answered):
        forensics.on_attempt("b", each)
    for each in requests:
        forensics.on_crash("b", each, NOW)
        forensics.on_attempt_end("b", each)
        assert is_second_crash(each)
        forensics.block_if_to_blame(each, NOW)
        assert forensics.blocked_s(each, NOW) is None, "the same others were in flight at both"
        forensics.on_answer(Request(b"answered"))  # repeated elsewhere


def test_requests_that_crash_together_twice_are_not_blamed() -> None:
    forensics, first, second = CrashForensics(), Request(b"x"), Request(b"y")
    crash(forensics, "a", first, second)
    crash(forensics, "b", first, second)
    assert is_second_crash(first)
    assert is_second_crash(second)
    assert forensics.blocked_s(first, NOW) is None
    assert forensics.blocked_s(second, NOW) is None


def test_a_bystander_that_is_answered_leaves_the_blame_to_the_other() -> None:
    forensics, poison, bystander = CrashForensics(), Request(b"poison"), Request(b"bystander")
    crash(forensics, "a", poison, bystander)
    forensics.on_attempt("b", bystander)
    forensics.on_attempt_end("b", bystander)
    forensics.on_answer(bystander)
    assert not forensics.is_suspect(bystander, NOW)
    crash(forensics, "b", poison)
    assert forensics.blocked_s(poison, NOW) is not None
    assert forensics.blocked_s(bystander, NOW) is None


def test_a_request_at_another_replica_is_no_suspect() -> None:
    forensics, poison, elsewhere = CrashForensics(), Request(b"poison"), Request(b"elsewhere")
    forensics.on_attempt("b", elsewhere)
    crash(forensics, "a", poison)
    assert elsewhere.crash is None
    assert not forensics.is_suspect(elsewhere, NOW)


def test_a_new_attempt_forgets_the_crash_of_the_last_one_but_not_the_suspicion() -> None:
    forensics, request = CrashForensics(), Request(b"x")
    crash(forensics, "a", request)
    forensics.on_attempt("b", request)
    assert request.crash is None
    assert forensics.is_suspect(request, NOW)
    assert forensics.has_suspects
    forensics.on_answer(request)
    assert not forensics.has_suspects


def test_blocked_requests_are_forgotten_in_time_and_in_number() -> None:
    blocked = BlockedRequests(keep_s=10.0, size=3)
    for n in range(5):
        blocked.add(bytes([n]), NOW)
    assert len(blocked) == 3
    assert blocked.remaining_s(b"\x00", NOW) is None
    assert blocked.remaining_s(b"\x04", Elapsed(NOW + 4)) == pytest.approx(6.0)
    assert blocked.remaining_s(b"\x04", Elapsed(NOW + 10)) is None
    assert len(blocked) == 2


def test_a_suspect_stays_one_until_it_is_answered_or_its_time_is_over() -> None:
    suspects, in_flight = SuspectedRequests(keep_s=10.0, size=3), RequestsAtCrash([b"p", b"x", b"y"])
    assert suspects.in_flight_at_crash(b"p", NOW) is None
    suspects.add(b"p", in_flight, NOW)
    suspects.add(b"x", in_flight, NOW)
    suspects.clear(b"x")
    assert suspects.in_flight_at_crash(b"x", NOW) is None
    assert suspects.in_flight_at_crash(b"p", NOW) is in_flight
    assert in_flight.others(b"p") == {b"y"}, "x has been answered: it explains no crash"
    assert suspects.in_flight_at_crash(b"p", Elapsed(NOW + 10)) is None
    for n in range(5):
        suspects.add(bytes([n]), RequestsAtCrash([bytes([n])]), NOW)
    assert len(suspects) == 3


def test_a_crash_is_forgotten_when_its_suspects_are() -> None:
    suspects, in_flight = SuspectedRequests(keep_s=10.0), RequestsAtCrash([b"p", b"x"])
    suspects.add(b"p", in_flight, NOW)
    suspects.add(b"q", RequestsAtCrash([b"q"]), Elapsed(NOW + 5))
    assert suspects.in_flight_at_crash(b"q", Elapsed(NOW + 10)) is not None
    suspects.clear(b"x")
    assert in_flight.others(b"p") == {b"x"}, "nobody is suspected for it any more"


def test_all_crashes_are_forgotten_with_the_last_suspect() -> None:
    suspects, first, second = SuspectedRequests(), RequestsAtCrash([b"p", b"x"]), RequestsAtCrash([b"x"])
    suspects.add(b"p", first, NOW)
    suspects.add_crash(second, NOW)
    suspects.clear(b"p")
    suspects.add(b"q", RequestsAtCrash([b"q"]), NOW)
    suspects.clear(b"x")
    assert first.others(b"p") == second.others(b"p") == {b"x"}
