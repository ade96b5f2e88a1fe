"""Crash forensics: which request is blamed when workers crash, and which ones are cleared."""

import pytest

from shoal.agent.core.crashes import (
    BlockedRequests,
    Crash,
    CrashForensics,
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
        (None, frozenset(), False),
        (frozenset(), frozenset(), True),
        (frozenset({b"x"}), frozenset({b"y"}), True),
        (frozenset({b"x"}), frozenset(), True),
        (frozenset({b"x", b"y"}), frozenset({b"x", b"y"}), False),
    ],
)
def test_a_request_is_blamed_only_if_nothing_else_explains_both_crashes(
    first: frozenset[bytes] | None, second: frozenset[bytes], blamed: bool
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
    assert set(first.crash.in_flight) == set(second.crash.in_flight) == {first, second}


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
    suspects = SuspectedRequests(keep_s=10.0, size=3)
    assert suspects.colocated_at_crash(b"p", NOW) is None
    suspects.add(b"p", frozenset({b"x", b"y"}), NOW)
    suspects.add(b"x", frozenset({b"p", b"y"}), NOW)
    suspects.clear(b"x")
    assert suspects.colocated_at_crash(b"x", NOW) is None
    assert suspects.colocated_at_crash(b"p", NOW) == frozenset({b"y"}), "x has been answered: it explains no crash"
    assert suspects.colocated_at_crash(b"p", Elapsed(NOW + 10)) is None
    for n in range(5):
        suspects.add(bytes([n]), frozenset(), NOW)
    assert len(suspects) == 3
