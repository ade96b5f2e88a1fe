"""The attempts of one request: which replica is next, and what follows from a failure."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from shoal.agent.core import routing
from shoal.agent.core.crashes import is_second_crash
from shoal.agent.core.request_router import RequestRouter, RoutedRequest
from shoal.agent.core.routing import AdmissionRefusal, AttemptFault, AttemptHistory, RetryDecision
from shoal.types.codes import Code, Refusal
from shoal.types.route import Endpoint, Route
from shoal.types.units import Elapsed, Seconds

DEADLINE_REFUSAL: Final = Refusal(
    Code.DEADLINE_EXCEEDED, "the request's time is over", "an answer before its deadline", "allow more"
)
_NO_HISTORY: Final = AttemptHistory()
NO_REPLICA_RETRY_S: Final = Seconds(1.0)
"""When a caller may retry that was refused for want of a replica."""


class RequestAttempts:
    """Where one request is sent, one replica after the other, along the route that it found when it came in.

    It is no step of a session: its workload keeps no state, though the request may name a sequence, which says where it
    is sent first.
    """

    def __init__(self, router: RequestRouter, route: Route, request: RoutedRequest, seed: int) -> None:
        """`seed` draws among replicas; it is another number for each request."""
        self._router = router
        self._route = route
        self._request = request
        self._seed = seed
        self._history = _NO_HISTORY

    @property
    def route(self) -> Route:
        return self._route

    def next_endpoint(self, now: Elapsed, is_connecting: Callable[[Endpoint], bool]) -> Endpoint | AdmissionRefusal:
        """The replica to try next, or why there is none. The caller hears of the last failure if there was one."""
        picked = self._router.choose_connected(
            self._route, self._history.tried, self._request.session, now, self._seed, is_connecting
        )
        if isinstance(picked, Refusal):
            return AdmissionRefusal(picked, NO_REPLICA_RETRY_S)
        if self._request.expires_at <= now:
            return AdmissionRefusal(DEADLINE_REFUSAL)
        return picked

    def on_failure(self, endpoint: Endpoint, code: Code, now: Elapsed) -> RetryDecision:
        """What to do after the attempt at `endpoint` failed. After BLOCK the request is refused for a while, if it is
        to blame for the crashes.

        A crash that is the second for the front that forwarded the request is left to that front.
        """
        history = replace(self._history, has_crashed=is_second_crash(self._request))
        fault = routing.fault_of(code)
        decision = routing.decide_retry(fault, history)
        if fault is AttemptFault.CRASH and decision is RetryDecision.RETRY and self._request.has_crashed_elsewhere:
            decision = RetryDecision.RETURN_ERROR
        match decision:
            case RetryDecision.BLOCK:
                self._router.block_if_to_blame(self._request, now)
            case RetryDecision.RETRY:
                self._history = replace(history, tried=history.tried | {endpoint.assignment})
            case RetryDecision.RETURN_ERROR:
                pass
        return decision
