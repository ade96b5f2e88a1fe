"""Events as the operator API streams them, of a region or of a federation."""

from collections.abc import AsyncIterator
from typing import Final

from shoal.coordinator.api import views
from shoal.coordinator.controllers.events import EventLog
from shoal.v1 import operator_pb2

EVENTS_MOST: Final = 10_000


async def events(log: EventLog, request: operator_pb2.EventsRequest) -> AsyncIterator[operator_pb2.Event]:
    """Those after `request.after`; for ever where it follows."""
    if request.follow:
        async for event in log.follow(request.after):
            yield views.event_view(event)
        return
    for event in await log.past(request.after, min(request.limit or EVENTS_MOST, EVENTS_MOST)):
        yield views.event_view(event)


async def newest(log: EventLog) -> list[operator_pb2.Event]:
    return [views.event_view(event) for event in await log.past(0, EVENTS_MOST)]
