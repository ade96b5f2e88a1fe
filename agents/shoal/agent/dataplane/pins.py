"""Where a session is asked for by a front that does not have it.

Whoever began it is remembered; where that says it went elsewhere, it is asked there. A front that knows nothing of a
session asks every replica in the order in which one would be chosen for it: the first is nearly always right.
"""

from collections import OrderedDict
from typing import Final

from shoal.agent.core import routing
from shoal.agent.core.backoff import delay
from shoal.agent.core.routing import Fault
from shoal.agent.core.sequences import Key, Step, lost
from shoal.agent.dataplane.forward import AttemptFailed
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.migration import Handover
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Elapsed, Seconds

MOST: Final = 65_536
"""Sessions whose place is remembered; of more, those longest unused are asked for anew."""
UNREACHED_S: Final = Seconds(10.0)
"""For so long a replica that does not answer is asked again for a session that it has."""
MOVES: Final = 8


class Pins:
    """The replica that each session met last."""

    def __init__(self) -> None:
        self._at: OrderedDict[Key, Endpoint] = OrderedDict()

    def get(self, key: Key) -> Endpoint | None:
        if key in self._at:
            self._at.move_to_end(key)
        return self._at.get(key)

    def put(self, key: Key, endpoint: Endpoint) -> None:
        self._at[key] = endpoint
        self._at.move_to_end(key)
        if len(self._at) > MOST:
            self._at.popitem(last=False)

    def drop(self, key: Key) -> None:
        self._at.pop(key, None)


class Search:
    """For one step of a session: where it is asked next, until it is answered or no place is left."""

    def __init__(self, pins: Pins, key: Key, step: Step, now: Elapsed) -> None:
        self._pins = pins
        self._key = key
        self._step = step
        self._give_up_at = now + UNREACHED_S
        self._moves = 0
        self._misses = 0
        self._known = False
        """Whether the place asked last is where the session was, as far as is known here."""
        self.tried: frozenset[str] = frozenset()
        self.failure: ShoalError | None = None

    def place(self, route: Route, here: str | Handover | None, first: Endpoint | Refusal) -> Endpoint | Refusal:
        """here: what this very front knows of the session. first: of the replicas that were not tried, where a new one
        would begin."""
        self._known = True
        if isinstance(here, str) and here not in self.tried:
            return _local(here)
        pin = self._pins.get(self._key) or (_endpoint(here, route) if isinstance(here, Handover) else None)
        usable = pin is not None and not (self._step.start and _by_name(pin.assignment, route) is None)
        if pin is not None and usable and pin.assignment not in self.tried:
            return pin
        self._known = False
        if self._step.start or (isinstance(first, Endpoint) and not self.tried):
            return first
        others = sorted(
            (each for each in route.endpoints if each.assignment not in self.tried and not each.region),
            key=lambda each: -each.weight,
        )
        return others[0] if others else lost(f"no replica of {route.workload} has session {self._key.sequence!r:.80}")

    def failed(self, error: ShoalError, at: Endpoint, route: Route, now: Elapsed) -> Seconds:
        """How long to wait before the next place is asked. Raises `error` where nothing else can come of it."""
        if error.code is Code.SESSION_MOVED and self._moves < MOVES:
            return self._moved(error, at, route, now)
        if error.code is Code.SESSION_LOST:
            self._miss(at)
            if self.failure is not None and self.failure.code is not Code.SESSION_STEP:
                self.failure = None  # that nobody has it says `place`
            return Seconds(0.0)
        if error.code is Code.SESSION_STEP and not (self._known or self._step.start):
            return self._elsewhere(error, at)  # it may have one of that name that nobody remembers
        if error.code is Code.LEASE_ENDED:
            if self._step.start:
                return self._elsewhere(error, at)
            self._pins.drop(self._key)
        if routing.fault_of(error.code) is not Fault.REPLICA or at.kind is EndpointKind.LOCAL:
            raise error
        if self._step.start and not _may_have_run(error):
            return self._elsewhere(error, at)
        self.failure = error
        if _by_name(at.assignment, route) is None:
            self._miss(at)  # the region has given it up
            self.failure = None
            return Seconds(0.0)
        if now >= self._give_up_at:
            if self._step.start:
                self._pins.drop(self._key)
            raise error
        if self._step.start:
            self._pins.put(self._key, at)  # else it would begin at two
        self._misses += 1
        return delay(self._key.sequence, self._misses - 1, base_s=0.05, cap_s=0.5)

    def answered(self, at: Endpoint) -> None:
        if self._step.end:
            self._pins.drop(self._key)
        elif at.kind is not EndpointKind.LOCAL:
            self._pins.put(self._key, at)

    def _moved(self, error: ShoalError, at: Endpoint, route: Route, now: Elapsed) -> Seconds:
        """On to the replica that it went to. Until that is listed here, whoever said so is asked again."""
        moved = _by_name(error.refusal.asked, route)
        if moved is not None:
            self._moves += 1
            self._pins.put(self._key, moved)
            self.tried -= {moved.assignment}
            return Seconds(0.0)
        if now >= self._give_up_at:
            self._pins.drop(self._key)
            found = f"the session is at {error.refusal.asked:.80}, which is not listed here yet"
            raise refuse(Code.MODEL_NOT_READY, found, "a replica of the route", "send the step again") from error
        if at.kind is not EndpointKind.LOCAL:
            self._pins.put(self._key, at)
        return Seconds(0.1)

    def _elsewhere(self, error: ShoalError, at: Endpoint) -> Seconds:
        """`error` is told if no other place is better."""
        self._miss(at)
        self.failure = error
        return Seconds(0.0)

    def _miss(self, at: Endpoint) -> None:
        self._pins.drop(self._key)
        self.tried |= {at.assignment}


def at_home(here: str | Handover | None, first: Endpoint | Refusal) -> Endpoint:
    """Where a step is taken that another front sent here: by this one, whatever comes of it. As `Search.place`."""
    if isinstance(here, str):
        return _local(here)
    return first if isinstance(first, Endpoint) and first.kind is EndpointKind.LOCAL else _local("")


def _may_have_run(error: ShoalError) -> bool:
    """Whether nobody knows: it was sent, and nothing was heard."""
    return error.code is Code.REPLICA_UNREACHABLE and isinstance(error, AttemptFailed) and error.sent


def _local(assignment: str) -> Endpoint:
    return Endpoint(assignment, "", EndpointKind.LOCAL, "", 1.0, EndpointState.READY)


def _by_name(assignment: str, route: Route) -> Endpoint | None:
    return next((each for each in route.endpoints if each.assignment == assignment), None)


def _endpoint(to: Handover, route: Route) -> Endpoint:
    known = _by_name(to.assignment, route)
    return known or Endpoint(to.assignment, to.node, EndpointKind.AGENT, to.address, 1.0, EndpointState.READY)
