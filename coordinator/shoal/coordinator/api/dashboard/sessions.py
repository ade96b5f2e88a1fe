"""One-time links and the browser sessions that they open. Pure: values, secrets and `now` come from outside.

Both live in the leading coordinator's memory: a restart or an election ends them, and `shoal dashboard` makes another.
Only SHA-256 of each secret is kept. A session carries the identity of the certificate that asked for its link, so it
ends with that certificate.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.identity import Identity
from shoal.types.units import Elapsed, Seconds

LINK_S: Final = Seconds(120.0)
"""A link opens a session within this time, once."""
SESSION_S: Final = Seconds(12 * 3600.0)
LINKS_MOST: Final = 64
SESSIONS_MOST: Final = 256
PER_CALLER_MOST: Final = 16
"""Links, and sessions, of one identity; the oldest ends for a newer one."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What one secret stands for."""

    # Whose certificate asked for it.
    identity: Identity
    # It counts for nothing from then on.
    until: Elapsed


class Logins:
    """Open links and sessions, by the digest of their secrets, oldest first."""

    def __init__(self) -> None:
        self._links: dict[str, Grant] = {}
        self._sessions: dict[str, Grant] = {}

    def add_link(self, secret: str, identity: Identity, now: Elapsed) -> None:
        _add(self._links, secret, Grant(identity, Elapsed(now + LINK_S)), LINKS_MOST)

    def redeem(self, link: str, session: str, now: Elapsed) -> Identity:
        """Opens `session` for a link's secret, which is used up. Raises ShoalError(UNAUTHENTICATED)."""
        grant = self._links.pop(_digest(link), None)
        if grant is None or grant.until <= now:
            raise refuse(
                Code.UNAUTHENTICATED,
                "a link that was used, is too old, or was never made",
                f"one of `shoal dashboard`, within {LINK_S:g}s, once",
                "run `shoal dashboard` again",
            )
        _add(self._sessions, session, Grant(grant.identity, Elapsed(now + SESSION_S)), SESSIONS_MOST)
        return grant.identity

    def identity_of(self, session: str, now: Elapsed) -> Identity:
        """Raises ShoalError(UNAUTHENTICATED)."""
        grant = self._sessions.get(_digest(session))
        if grant is None or grant.until <= now:
            raise no_login()
        return grant.identity

    def end(self, session: str) -> None:
        self._sessions.pop(_digest(session), None)


def no_login() -> ShoalError:
    return refuse(
        Code.UNAUTHENTICATED,
        "no session, or one that has ended",
        "a one-time link, or a client certificate of an operator or viewer",
        "run `shoal dashboard`",
    )


def _add(grants: dict[str, Grant], secret: str, grant: Grant, most: int) -> None:
    own = [digest for digest, each in grants.items() if each.identity.uri == grant.identity.uri]
    for digest in own[: max(0, len(own) + 1 - PER_CALLER_MOST)]:
        del grants[digest]
    while len(grants) >= most:
        del grants[next(iter(grants))]
    grants[_digest(secret)] = grant


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()
