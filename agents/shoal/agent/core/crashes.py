"""Crash forensics of a front: which requests were in flight when a worker crashed, and which one is to blame.

A request becomes a suspect at its first crash and is cleared when it is answered. At its second crash it is blamed,
unless the same other requests were in flight at both. A request that is to blame is refused for a while.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from shoal.types.codes import Code, Refusal
from shoal.types.units import Elapsed, Seconds

_T = TypeVar("_T")

CRASH_REFUSAL: Final = Refusal(
    Code.REQUEST_CRASHED_WORKER,
    "two workers ended, or could not end a run, while they had this request",
    "a request that its model survives",
    "change the input; the same bytes are refused for a while",
)


class _DigestCache(Generic[_T]):
    """A bounded map from a request's digest to a value that expires; the oldest entries are evicted first."""

    def __init__(self, keep_s: float = 60.0, size: int = 1024) -> None:
        self._keep_s = keep_s
        self._size = size
        self._known: dict[bytes, tuple[Elapsed, _T]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def drop_expired(self, now: Elapsed) -> None:
        """Entries expire in the order in which they were put."""
        while self._known and now >= next(iter(self._known.values()))[0]:
            del self._known[next(iter(self._known))]

    def _put(self, digest: bytes, what: _T, now: Elapsed) -> None:
        self._known.pop(digest, None)
        self._known[digest] = Elapsed(now + self._keep_s), what
        while len(self._known) > self._size:
            del self._known[next(iter(self._known))]

    def _get(self, digest: bytes, now: Elapsed) -> tuple[Elapsed, _T] | None:
        found = self._known.get(digest)
        if found is not None and now >= found[0]:
            del self._known[digest]
            return None
        return found


class BlockedRequests(_DigestCache[None]):
    """Requests that crashed two workers; they are refused until their entry expires."""

    def add(self, digest: bytes, now: Elapsed) -> None:
        self._put(digest, None, now)

    def remaining_s(self, digest: bytes, now: Elapsed) -> Seconds | None:
        """Seconds for which it is still refused; None when it is not."""
        found = self._get(digest, now)
        return None if found is None else Seconds(found[0] - now)


class RequestsAtCrash:
    """Digests of the requests that were in flight at one crash, less those answered since.

    One object for all of them: they may be thousands, and each answer changes it.
    """

    __slots__ = ("_digests", "_repeated")

    def __init__(self, digests: Iterable[bytes]) -> None:
        counts = Counter(digests)
        self._digests = set(counts)
        self._repeated = {digest for digest, count in counts.items() if count > 1}
        """Those of several requests, which were in flight with each other."""

    @property
    def digests(self) -> AbstractSet[bytes]:
        return self._digests

    def others(self, digest: bytes) -> AbstractSet[bytes]:
        """Digests of the requests that were in flight with one of this digest."""
        return self._digests if digest in self._repeated else self._digests - {digest}

    def discard(self, digest: bytes) -> None:
        """Requests of this digest were answered: they explain no crash."""
        self._digests.discard(digest)
        self._repeated.discard(digest)


class SuspectedRequests(_DigestCache[RequestsAtCrash]):
    """Requests that were in flight at a crash, until they are answered. A client that sends one again does not reset
    it."""

    def __init__(self, keep_s: float = 60.0, size: int = 1024) -> None:
        super().__init__(keep_s, size)
        self._crashes: dict[RequestsAtCrash, Elapsed] = {}
        """When each crash is forgotten: the next one first, and all with the last suspect."""
        self._crashes_of: defaultdict[bytes, set[RequestsAtCrash]] = defaultdict(set)
        """By digest of a request in flight at them, so that an answer costs little after any number."""

    def add(self, digest: bytes, in_flight: RequestsAtCrash, now: Elapsed) -> None:
        """`in_flight` are the requests that were in flight at the crash, with this one."""
        self._put(digest, in_flight, now)
        self.add_crash(in_flight, now)

    def add_crash(self, in_flight: RequestsAtCrash, now: Elapsed) -> None:
        """What is answered from now on is taken from `in_flight`, the requests in flight at a crash."""
        if self._crashes.pop(in_flight, None) is None:
            for digest in in_flight.digests:
                self._crashes_of[digest].add(in_flight)
        self._crashes[in_flight] = Elapsed(now + self._keep_s)
        while len(self._crashes) > self._size:
            self._forget_oldest_crash()

    def drop_expired(self, now: Elapsed) -> None:
        super().drop_expired(now)
        while self._crashes and now >= next(iter(self._crashes.values())):
            self._forget_oldest_crash()
        self._forget_crashes_without_suspects()

    def in_flight_at_crash(self, digest: bytes, now: Elapsed) -> RequestsAtCrash | None:
        self.drop_expired(now)
        found = self._get(digest, now)
        return None if found is None else found[1]

    def clear(self, digest: bytes) -> None:
        """The request was answered, so it did not cause the crash, and explains none."""
        self._known.pop(digest, None)
        for each in self._crashes_of.pop(digest, ()):
            each.discard(digest)
        self._forget_crashes_without_suspects()

    def _forget_oldest_crash(self) -> None:
        oldest = next(iter(self._crashes))
        del self._crashes[oldest]
        for digest in oldest.digests:
            crashes = self._crashes_of[digest]
            crashes.discard(oldest)
            if not crashes:
                del self._crashes_of[digest]

    def _forget_crashes_without_suspects(self) -> None:
        if not self._known:
            self._crashes.clear()
            self._crashes_of.clear()


class RequestInFlight(Protocol):
    """A request inside the front, as far as crashes concern it."""

    crash: "Crash | None"
    """The crash in its latest attempt; None without one."""

    @property
    def digest(self) -> bytes:
        """Digest of what the model sees: the same for a repeated request."""
        ...


@dataclass(frozen=True, slots=True)
class Crash:
    """A crash of the replica that had a request, as one of the requests in flight there sees it."""

    # The requests that were in flight there, with itself: one object for all of them.
    in_flight: RequestsAtCrash
    # Those in flight at an earlier crash, with itself; None at its first crash.
    prior: RequestsAtCrash | None


class CrashForensics:
    """The requests in flight at each replica, the suspects, and the blocked requests of one front."""

    def __init__(self) -> None:
        self._in_flight: defaultdict[str, set[RequestInFlight]] = defaultdict(set)
        self._suspects = SuspectedRequests()
        self._blocked = BlockedRequests()

    @property
    def has_suspects(self) -> bool:
        return bool(self._suspects)

    def is_aware(self, now: Elapsed) -> bool:
        """Whether some request is suspected or blocked."""
        if not self._suspects and not self._blocked:
            return False
        self._suspects.drop_expired(now)
        self._blocked.drop_expired(now)
        return bool(self._suspects) or bool(self._blocked)

    def on_attempt(self, replica: str, request: RequestInFlight) -> None:
        """The request goes to `replica`."""
        request.crash = None
        self._in_flight[replica].add(request)

    def on_crash(self, replica: str, request: RequestInFlight, now: Elapsed) -> None:
        """The request failed because `replica` crashed.

        The first request to fail records the crash for all that are in flight there; later, some of them have left.
        """
        if request.crash is None:
            requests = tuple(self._in_flight[replica])
            in_flight = RequestsAtCrash([each.digest for each in requests])
            for each in requests:
                each.crash = Crash(in_flight, self._prior_crash(each, now))
            if self._suspects:  # an answer between two of these failures must change this crash as it does earlier ones
                self._suspects.add_crash(in_flight, now)

    def on_attempt_end(self, replica: str, request: RequestInFlight) -> None:
        """The attempt ended, with whatever outcome."""
        self._in_flight[replica].discard(request)
        if not self._in_flight[replica]:
            del self._in_flight[replica]

    def on_answer(self, request: RequestInFlight) -> None:
        """The request was answered, so it is no suspect."""
        if self._suspects:
            self._suspects.clear(request.digest)

    def add_suspect(self, request: RequestInFlight, now: Elapsed) -> None:
        """Suspect a request if its attempt ended in its first crash."""
        if request.crash is not None and request.crash.prior is None:
            self._suspects.add(request.digest, request.crash.in_flight, now)

    def is_suspect(self, request: RequestInFlight, now: Elapsed) -> bool:
        return self._prior_crash(request, now) is not None

    def block_if_to_blame(self, request: RequestInFlight, now: Elapsed) -> None:
        """Block a request after a second crash, if that shows that it is to blame."""
        crash = request.crash
        if crash is None or crash.prior is None:
            return
        if is_to_blame(crash.prior.others(request.digest), crash.in_flight.others(request.digest)):
            self.block(request, now)

    def block(self, request: RequestInFlight, now: Elapsed) -> None:
        self._blocked.add(request.digest, now)

    def blocked_s(self, request: RequestInFlight, now: Elapsed) -> Seconds | None:
        """Seconds for which the request is still refused; None if it is not."""
        return self._blocked.remaining_s(request.digest, now) if self._blocked else None

    def _prior_crash(self, request: RequestInFlight, now: Elapsed) -> RequestsAtCrash | None:
        """The requests in flight with the same request at an earlier crash, in any attempt; None without one. Without
        suspects no digest is computed."""
        return self._suspects.in_flight_at_crash(request.digest, now) if self._suspects else None


def is_second_crash(request: RequestInFlight) -> bool:
    """Whether the request's latest attempt ended in a crash that is not its first."""
    return request.crash is not None and request.crash.prior is not None


def is_to_blame(prior: AbstractSet[bytes], colocated: AbstractSet[bytes]) -> bool:
    """Whether a request is to blame for two crashes: only if the others in flight differ, or there were none.

    `prior` and `colocated` are the digests of the others in flight at the first and the second crash.
    """
    return prior != colocated or not colocated
