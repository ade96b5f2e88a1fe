"""A48: links are used once and soon, sessions end, and neither can be guessed, hoarded or kept beyond a bound."""

import pytest

from shoal.coordinator.api.dashboard.sessions import (
    LINK_S,
    LINKS_MOST,
    PER_CALLER_MOST,
    SESSION_S,
    SESSIONS_MOST,
    Logins,
)
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.units import Elapsed, Wall

START = Elapsed(100.0)


def identity(name: str = "ada") -> Identity:
    return Identity("eu", Role.OPERATOR, name, Wall(0.0), Wall(1e9), "7")


def after(seconds: float) -> Elapsed:
    return Elapsed(START + seconds)


def is_refused(logins: Logins, session: str, now: Elapsed = START) -> bool:
    try:
        logins.identity_of(session, now)
    except ShoalError as error:
        return error.code is Code.UNAUTHENTICATED
    return False


def open_session(logins: Logins, session: str, name: str = "ada") -> None:
    logins.add_link(f"link-{session}", identity(name), START)
    logins.redeem(f"link-{session}", session, START)


def test_a_link_opens_one_session_as_who_asked_for_it() -> None:
    logins = Logins()
    logins.add_link("link", identity(), START)
    assert logins.redeem("link", "session", START) == identity()
    assert logins.identity_of("session", START) == identity()
    with pytest.raises(ShoalError, match="used") as refused:
        logins.redeem("link", "other", START)
    assert refused.value.code is Code.UNAUTHENTICATED
    assert is_refused(logins, "other")


@pytest.mark.parametrize(("waited", "opens"), [(LINK_S - 1, True), (LINK_S, False)])
def test_a_link_is_good_for_two_minutes(waited: float, opens: bool) -> None:
    logins = Logins()
    logins.add_link("link", identity(), START)
    if opens:
        logins.redeem("link", "session", after(waited))
    else:
        with pytest.raises(ShoalError):
            logins.redeem("link", "session", after(waited))
    assert is_refused(logins, "session", after(waited)) is not opens


def test_a_session_ends_by_itself_and_by_logging_out() -> None:
    logins = Logins()
    open_session(logins, "one")
    open_session(logins, "two")
    logins.end("two")
    assert is_refused(logins, "two")
    assert not is_refused(logins, "one", after(SESSION_S - 1))
    assert is_refused(logins, "one", after(SESSION_S))


@pytest.mark.parametrize("guess", ["", "link", "session ", "Session", "\ud800", "x" * 10_000])
def test_what_is_no_session_is_refused(guess: str) -> None:
    logins = Logins()
    open_session(logins, "session")
    logins.add_link("link", identity(), START)
    assert is_refused(logins, guess)


def test_one_caller_displaces_only_its_own() -> None:
    logins = Logins()
    open_session(logins, "of-bob", "bob")
    for number in range(PER_CALLER_MOST + 1):
        open_session(logins, f"of-ada-{number}")
    assert is_refused(logins, "of-ada-0"), "the oldest made room"
    assert not is_refused(logins, "of-ada-1")
    assert not is_refused(logins, "of-bob")


def test_links_and_sessions_are_bounded() -> None:
    logins = Logins()
    callers = [f"op-{number}" for number in range(SESSIONS_MOST + 1)]
    for name in callers:
        open_session(logins, name, name)
    assert is_refused(logins, callers[0])
    assert sum(not is_refused(logins, name) for name in callers) == SESSIONS_MOST
    for number in range(LINKS_MOST + 1):
        logins.add_link(f"l{number}", identity(f"op-{number}"), START)
    with pytest.raises(ShoalError):
        logins.redeem("l0", "s", START)
    logins.redeem(f"l{LINKS_MOST}", "s", START)
