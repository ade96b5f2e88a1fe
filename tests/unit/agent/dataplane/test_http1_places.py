"""The place of a connection over HTTP/1.1 is given back, however it ends."""

import asyncio
from typing import Any, cast

import pytest

from harness.fakes.wire import Wire
from shoal.agent.dataplane.http1 import Http1Server
from shoal.agent.dataplane.rest import ClientIdentity, RestMethods
from shoal.host.connections import Connections

WITHIN_S = 10.0


async def test_a_client_whom_nobody_could_identify_leaves_no_place_behind() -> None:
    """An address whose share is full of such places is refused until the process ends."""

    def fail(_: object) -> ClientIdentity:
        raise OSError(24, "too many open files")

    connections = Connections(1, 1)
    place = connections.add("127.0.0.1", lambda: None)
    assert place is not None
    server = Http1Server(cast(RestMethods, None), connections, cast(Any, fail))
    connection = server.protocol(place)
    with pytest.raises(OSError):
        connection.connection_made(Wire())
    assert len(server.tasks) == 1
    connection.connection_lost(None)
    await asyncio.wait(server.tasks, timeout=WITHIN_S)
    assert len(connections) == 0
