"""Events as the operator API streams them, for a region or a federation."""

from collections.abc import AsyncIterator, Iterator
from typing import Final

from shoal.coordinator.api import views
from shoal.coordinator.controllers.log.events import EventLog
from shoal.v1 import operator_pb2

MAX_EVENTS: Final = 10_000


async def stream_events(log: EventLog, request: operator_pb2.EventsRequest) -> AsyncIterator[operator_pb2.Event]:
    """The newest `limit` events after `request.after`; if the request follows, then each new event."""
    after = request.after
    if request.limit or not request.follow:
        for event in await log.event_iterator(after, min(request.limit or MAX_EVENTS, MAX_EVENTS)):
            after = event.sequence
            yield views.event_view(event)
    if request.follow:
        async for event in log.follow(after):
            yield views.event_view(event)


async def newest_events(log: EventLog) -> Iterator[operator_pb2.Event]:
    """Each is made when it is taken, for `extend_in_slices`."""
    return (views.event_view(event) for event in await log.event_iterator(0, MAX_EVENTS))
