"""The REST transport without sockets: bytes in, whole responses out."""

import asyncio
from typing import Any

import h11

from harness.fakes.inference import EchoingService
from shoal.agent.dataplane.byte_stream import ByteStream
from shoal.agent.dataplane.http1 import Http1Server
from shoal.agent.dataplane.ingress_admission import IngressAdmission
from shoal.agent.dataplane.rest import ClientIdentity, RestMethods
from shoal.host.connections import Connections
from shoal.types.codes import Code

OK = "OK"
HUNG_UP = "closed"
"""Without an answer: to half a request, nothing can be said."""


class _Transport(asyncio.Transport):
    """As much of a TLS transport as the server uses."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def get_extra_info(self, name: str, default: Any = None) -> "_Transport":
        return self

    def getpeercert(self, *, binary_form: bool) -> None:
        return None

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True


class Rest:
    """Takes one connection's bytes at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def take(self, data: bytes) -> str:
        """How the last request of the connection was answered; raises AssertionError for an answer that is none."""
        return self._loop.run_until_complete(self._take(data))

    async def _take(self, data: bytes) -> str:
        intake, connections, transport = IngressAdmission(), Connections(1, 1), _Transport()
        place = connections.add("", transport.abort)
        assert place is not None
        server = Http1Server(RestMethods(EchoingService(), intake), connections, lambda _: ClientIdentity())
        connection = server.protocol(place)
        connection.connection_made(transport)
        connection.data_received(data)
        (task,) = server.tasks
        await _settled(task, connection)
        was_closed = transport.is_closed
        connection.connection_lost(None)
        await asyncio.wait((task,))
        if not task.cancelled():
            task.result()
        assert not intake.places.usage, "what a connection held is free when it has ended"
        # what follows the answer to a HEAD cannot be told from its body by who has not sent the request
        return HUNG_UP if b"HEAD" in data else _last_answer(bytes(transport.sent), was_closed)


async def _settled(task: asyncio.Task[None], connection: ByteStream) -> None:
    """Return when the task has ended, or waits for bytes."""
    while not (task.done() or connection.is_waiting):
        await asyncio.wait((task,), timeout=0)  # a round of the loop


def _last_answer(sent: bytes, was_closed: bool) -> str:
    """was_closed: by the server, which ends the body of an answer to HTTP/1.0 whose length it did not know."""
    found = HUNG_UP
    while sent:
        http = h11.Connection(h11.CLIENT)
        http.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
        http.send(h11.EndOfMessage())
        http.receive_data(sent)
        if was_closed:
            http.receive_data(b"")
        found, sent = _one_answer(http)
    return found


def _one_answer(http: h11.Connection) -> tuple[str, bytes]:
    found, is_asked_to_continue = HUNG_UP, False
    while True:
        event = http.next_event()
        if isinstance(event, h11.Response):
            headers = dict(event.headers)
            found = OK if event.status_code < 400 else Code(headers.get(b"shoal-code", b"").decode())
            is_asked_to_continue = False
        elif isinstance(event, h11.EndOfMessage):
            return found, bytes(http.trailing_data[0])
        elif isinstance(event, h11.InformationalResponse):
            is_asked_to_continue = True
        elif is_asked_to_continue:
            return HUNG_UP, b""  # its body never came
        elif not isinstance(event, h11.Data):
            raise AssertionError(f"half an answer: {event}")
