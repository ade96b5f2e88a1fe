"""How calls and requests end: what is counted, traced and logged of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from shoal.agent.dataplane.in_flight import InFlightRequest
from shoal.agent.dataplane.metering import RequestMeter
from shoal.agent.ports import AgentClock
from shoal.types.codes import Code, ShoalError
from shoal.types.units import Seconds

MAX_LOGGED_REFUSALS: Final = 20
"""Refused requests logged per second; more are only counted."""

_log = structlog.get_logger(__name__)


class RequestOutcomes:
    """Records the outcomes of one front in its meter."""

    def __init__(self, meter: RequestMeter, clock: AgentClock) -> None:
        self._meter = meter
        self._clock = clock
        # The second in which the last refusal was logged, and the refusals in it.
        self._logged: tuple[int, int] = (0, 0)

    def record_refused_call(self, request: str, error: ShoalError) -> None:
        """A call was refused before it became a request. `request` is its id."""
        self._meter.codes[error.code] += 1
        self.log_refusal(request, "", error)

    @contextmanager
    def recording(self, request: str) -> Iterator[None]:
        """Record what is refused inside, before it became a request. `request` is its id."""
        try:
            yield
        except ShoalError as error:
            self.record_refused_call(request, error)
            raise

    def record(self, flight: InFlightRequest, code: Code | None) -> Seconds:
        """A request ended. `code` is of the refusal that it ended with; None when it was answered. Returns the seconds
        that it took."""
        now = self._clock.now()
        seconds = Seconds(now - flight.arrived_at)
        if code is not None:
            self._meter.codes[code] += 1
        caller = flight.caller
        if flight.trace is not None:
            flight.trace.end(caller, str(flight.key), flight.id, flight.attempts, code)
        if not caller.is_ingress:
            return seconds
        if code is not None:
            self._meter.record_failure(
                *(flight.key, caller.origin, flight.attempts, code),
                caller_deadline=flight.has_caller_deadline,
                is_too_early=flight.is_too_early,
            )
        else:
            self._meter.record_answer(flight.key, caller.origin, flight.attempts, seconds, now)
        if caller.region:
            self._meter.record_traffic(caller.agreement, caller.region, code or seconds)
        return seconds

    def log_refusal(self, request: str, workload: str, error: ShoalError) -> None:
        """Log at most MAX_LOGGED_REFUSALS a second. `workload` is empty where none is known."""
        second = int(self._clock.now())
        count = self._logged[1] + 1 if self._logged[0] == second else 1
        self._logged = (second, count)
        if count <= MAX_LOGGED_REFUSALS:
            _log.info("request_refused", request=request, workload=workload, code=error.code, error=str(error))
