"""Finds the replica that has a session, at a front that does not have it.

The front remembers the replica that answered last. If that one says that the session moved, the search follows. A front
that knows nothing of a session tries the replicas in the order of preference for a new one; the first is nearly always
right.
"""

from collections import OrderedDict
from typing import Final

from shoal.agent.core import routing
from shoal.agent.core.routing import AttemptFault
from shoal.agent.core.sequences import SequenceKey, SessionStep, lost_session_refusal
from shoal.agent.dataplane.upstream import AttemptFailed
from shoal.types.backoff import delay
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.migration import Handover
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Elapsed, Seconds

MAX_SESSIONS: Final = 65_536
"""Sessions whose replica is remembered; beyond it the least recently used are forgotten and searched for again."""
UNREACHABLE_RETRY_S: Final = Seconds(10.0)
"""How long a replica that does not answer is retried for a session that it has."""
MAX_MOVES: Final = 8


class SessionAffinity:
    """The replica that answered each session last."""

    def __init__(self) -> None:
        self._at: OrderedDict[SequenceKey, Endpoint] = OrderedDict()

    def get(self, key: SequenceKey) -> Endpoint | None:
        if key in self._at:
            self._at.move_to_end(key)
        return self._at.get(key)

    def put(self, key: SequenceKey, endpoint: Endpoint) -> None:
        self._at[key] = endpoint
        self._at.move_to_end(key)
        if len(self._at) > MAX_SESSIONS:
            self._at.popitem(last=False)

    def drop(self, key: SequenceKey) -> None:
        self._at.pop(key, None)


class SessionSearch:
    """The search for one step: which replica to try next, until one answers or none is left."""

    def __init__(self, affinity: SessionAffinity, key: SequenceKey, step: SessionStep, now: Elapsed) -> None:
        self._affinity = affinity
        self._key = key
        self._step = step
        self._give_up_at = now + UNREACHABLE_RETRY_S
        self._moves = 0
        self._moved_to: set[str] = set()
        """Replicas that a move was followed to."""
        self._lost_at: set[str] = set()
        """Those of them that did not have the session then. A replica that still names one of them has it no more than
        that one."""
        self._misses = 0
        self._is_known_place = False
        """Whether the replica tried last is where the session was, as far as this front knows."""
        self.tried: frozenset[str] = frozenset()
        self.failure: ShoalError | None = None

    def next_endpoint(self, route: Route, here: str | Handover | None, first: Endpoint | Refusal) -> Endpoint | Refusal:
        """The next replica to try, or a refusal when none is left.

        `here` is what this front itself knows of the session. `first` is where a new session would begin, of the
        replicas not tried yet.
        """
        self._is_known_place = True
        if isinstance(here, str) and here not in self.tried:
            return _local(here)
        pin = self._affinity.get(self._key) or (_endpoint_of(here, route) if isinstance(here, Handover) else None)
        usable = pin is not None and not (self._step.start and _by_name(pin.assignment, route) is None)
        if pin is not None and usable and pin.assignment not in self.tried:
            return pin
        self._is_known_place = False
        if self._step.start or (isinstance(first, Endpoint) and not self.tried):
            return first
        others = sorted(
            (each for each in route.endpoints if each.assignment not in self.tried and not each.region),
            key=lambda each: -each.weight,
        )
        return (
            others[0]
            if others
            else lost_session_refusal(f"no replica of {route.workload} has session {self._key.sequence!r:.80}")
        )

    def on_failure(self, error: ShoalError, at: Endpoint, route: Route, now: Elapsed) -> Seconds:
        """Seconds to wait before the next attempt. Raises `error` where another attempt cannot help."""
        if error.code is Code.SESSION_MOVED:
            return self._follow_move(error, at, route, now)
        if error.code is Code.SESSION_LOST:
            if at.assignment in self._moved_to:
                self._lost_at.add(at.assignment)
            self._miss(at)
            if self.failure is not None and self.failure.code is not Code.SESSION_STEP:
                self.failure = None  # `next_endpoint` reports that no replica has it
            return Seconds(0.0)
        if error.code is Code.SESSION_STEP and not (self._is_known_place or self._step.start):
            return self._try_elsewhere(error, at)  # that replica may have an old session of the same name
        if error.code is Code.LEASE_ENDED:
            if self._step.start:
                return self._try_elsewhere(error, at)
            self._affinity.drop(self._key)
        if routing.fault_of(error.code) is not AttemptFault.REPLICA or at.kind is EndpointKind.LOCAL:
            raise error
        if self._step.start and not _may_have_run(error):
            return self._try_elsewhere(error, at)
        self.failure = error
        if _by_name(at.assignment, route) is None:
            self._miss(at)  # the region removed the replica
            self.failure = None
            return Seconds(0.0)
        if now >= self._give_up_at:
            if self._step.start:
                self._affinity.drop(self._key)
            raise error
        if self._step.start:
            self._affinity.put(self._key, at)  # else the session could begin at two replicas
        self._misses += 1
        return delay(self._key.sequence, self._misses - 1, base_s=0.05, cap_s=0.5)

    def on_answer(self, at: Endpoint) -> None:
        if self._step.end:
            self._affinity.drop(self._key)
        elif at.kind is not EndpointKind.LOCAL:
            self._affinity.put(self._key, at)

    def _follow_move(self, error: ShoalError, at: Endpoint, route: Route, now: Elapsed) -> Seconds:
        """Continue at the replica that the session moved to.

        Until that replica is in the route here, the one that reported the move is tried again.
        """
        if self._moves >= MAX_MOVES or error.refusal.asked in self._lost_at:
            self._miss(at)
            return Seconds(0.0)
        moved = _by_name(error.refusal.asked, route)
        if moved is not None:
            self._moves += 1
            self._moved_to.add(moved.assignment)
            self._affinity.put(self._key, moved)
            self.tried -= {moved.assignment}
            return Seconds(0.0)
        if now >= self._give_up_at:
            self._affinity.drop(self._key)
            found = f"the session is at {error.refusal.asked:.80}, which is not listed here yet"
            raise refuse(Code.MODEL_NOT_READY, found, "a replica of the route", "send the step again") from error
        if at.kind is not EndpointKind.LOCAL:
            self._affinity.put(self._key, at)
        return Seconds(0.1)

    def _try_elsewhere(self, error: ShoalError, at: Endpoint) -> Seconds:
        """Try another replica; `error` is reported if no other does better."""
        self._miss(at)
        self.failure = error
        return Seconds(0.0)

    def _miss(self, at: Endpoint) -> None:
        self._affinity.drop(self._key)
        self.tried |= {at.assignment}


def local_endpoint(here: str | Handover | None, first: Endpoint | Refusal) -> Endpoint:
    """Where this front runs a step that another front forwarded here. It never forwards the step again.

    The parameters are as in `SessionSearch.next_endpoint`.
    """
    if isinstance(here, str):
        return _local(here)
    return first if isinstance(first, Endpoint) and first.kind is EndpointKind.LOCAL else _local("")


def _may_have_run(error: ShoalError) -> bool:
    """Whether it is unknown if the step ran: it was sent and no answer arrived."""
    return error.code is Code.REPLICA_UNREACHABLE and isinstance(error, AttemptFailed) and error.was_sent


def _local(assignment: str) -> Endpoint:
    return Endpoint(assignment, "", EndpointKind.LOCAL, "", 1.0, EndpointState.READY)


def _by_name(assignment: str, route: Route) -> Endpoint | None:
    return next((each for each in route.endpoints if each.assignment == assignment), None)


def _endpoint_of(to: Handover, route: Route) -> Endpoint:
    known = _by_name(to.assignment, route)
    return known or Endpoint(to.assignment, to.node, EndpointKind.AGENT, to.address, 1.0, EndpointState.READY)
