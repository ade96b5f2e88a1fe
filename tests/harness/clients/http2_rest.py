"""A client of the REST form over HTTP/2, on the library `h2`."""

import asyncio
import ssl

from h2.connection import ConnectionState, H2Connection
from h2.events import DataReceived, Event, ResponseReceived, StreamEnded, StreamReset

from harness.clients.oip import NOTHING, Metadata, Response, RestClient

WINDOW = 2**20


class Http2RestClient(RestClient):
    """As `RestClient`. `exchange` and `request_bytes` are HTTP/1.1 all the same."""

    def context(self) -> ssl.SSLContext:
        context = super().context()
        context.set_alpn_protocols(["h2", "http/1.1"])
        return context

    async def request(
        self, method: str, path: str, body: bytes = b"", extra_metadata: Metadata = NOTHING, timeout: float = 20.0
    ) -> Response:
        said = {**self.default_metadata, **extra_metadata, "content-length": str(len(body))}
        if self.bearer:
            said["authorization"] = f"Bearer {self.bearer}"
        head = {":method": method, ":scheme": "https", ":authority": "localhost", ":path": path, **said}
        async with asyncio.timeout(timeout):
            reader, writer = await self.connect()
            try:
                assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
                return await _exchange(reader, writer, tuple(head.items()), body)
            finally:
                writer.close()


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: tuple[tuple[str, str], ...], body: bytes
) -> Response:
    """Raises EOFError if the server hangs up or resets the stream."""
    http = H2Connection()
    http.initiate_connection()
    http.increment_flow_control_window(WINDOW)
    http.send_headers(1, head, end_stream=not body)
    found, headers, left = bytearray(), dict[str, str](), memoryview(body)
    pending, events = bytearray(), list[Event]()
    while True:
        while left and (size := min(len(left), http.local_flow_control_window(1), http.max_outbound_frame_size)):
            http.send_data(1, bytes(left[:size]), end_stream=size == len(left))
            left = left[size:]
        writer.write(http.data_to_send())
        data = await reader.read(2**16)
        if not data:
            raise EOFError("closed without a response")
        pending += data
        while len(pending) >= 9 and len(pending) >= (size := 9 + int.from_bytes(pending[:3], "big")):
            events += http.receive_data(bytes(pending[:size]))
            del pending[:size]
            if http.state_machine.state is ConnectionState.CLOSED:
                # The library takes nothing after a GOAWAY, though the server still answers what is inside.
                http.state_machine.state = ConnectionState.CLIENT_OPEN
        for event in events:
            match event:
                case ResponseReceived():
                    headers = {bytes(name).decode(): bytes(value).decode() for name, value in event.headers}
                case DataReceived():
                    found += event.data
                    if event.flow_controlled_length:
                        http.acknowledge_received_data(event.flow_controlled_length, 1)
                case StreamReset() if not headers:
                    raise EOFError(f"reset: {event.error_code}")
                case StreamEnded():
                    return Response(int(headers.pop(":status")), headers, bytes(found))
        events.clear()
