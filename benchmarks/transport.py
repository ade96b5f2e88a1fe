"""The gRPC transport of Shoal's ports against others, alone: each server answers a request with its own bytes.

`python benchmarks/transport.py` needs h2load (Debian's nghttp2-client). Peers: grpc.aio (grpcio) and grpclib (on
`h2`). Each server runs behind TLS on core 0, h2load on core 1; each round covers all cases, so that what is compared is
measured interleaved. Beside them the protocol alone, in memory: `shoal.http2` and `h2` take the same bytes of a client
and answer each of its requests. Prints requests a second and CPU time of the server, medians of the rounds, and ratios
to grpcio.
"""

import argparse
import asyncio
import json
import os
import re
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _machine import machine_line

from shoal.host.connections import Connections
from shoal.host.grpc_server import GrpcServer, GrpcServerLimits, ServerCall, ServerMethod
from shoal.host.tls_listener import TlsListener
from shoal.http2 import frames
from shoal.http2.connection import Http2Connection, Side, Stream
from shoal.http2.grpc_messages import RESPONSE_HEAD, TRAILERS_OK, frame_message
from shoal.http2.header_blocks import HeaderList

PATH = "/bench.Echo/Answer"
MAX_BYTES = 2**24
CASES = {"100 B": (100, 16), "100 B, one at a time": (100, 1), "100 KB": (100_000, 4), "1 MB": (1_000_000, 4)}
"""Bytes of a request and of its answer, and requests in flight on one connection."""
IN_MEMORY_REQUESTS = 5_000
SECONDS = 2.0
"""Least time of a case in a round; the first round finds how many requests that takes."""


async def serve_shoal(certificate: Path, key: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])

    async def answer(call: ServerCall) -> bytes | None:
        return await call.read(MAX_BYTES)

    connections = Connections(100, 100)
    server = GrpcServer(lambda _: ServerMethod(answer), GrpcServerLimits(256, MAX_BYTES, 10.0, 2.0, 30.0), connections)
    listener = TlsListener(connections, lambda: context, {"h2": server.session}, handshake_s=10.0)
    print(await listener.start("127.0.0.1", 0, backlog=100), flush=True)
    await asyncio.Event().wait()


async def serve_grpcio(certificate: Path, key: Path) -> None:
    import grpc
    import grpc.aio

    async def answer(request: bytes, _context: Any) -> bytes:
        return request

    class Every(grpc.GenericRpcHandler):  # type: ignore[type-arg] # generic in its stubs only
        def service(self, handler_call_details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(answer)

    sizes = (("grpc.max_receive_message_length", MAX_BYTES), ("grpc.max_send_message_length", MAX_BYTES))
    server = grpc.aio.server(options=sizes)
    server.add_generic_rpc_handlers((Every(),))
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


async def serve_grpclib(certificate: Path, key: Path) -> None:
    from grpclib.const import Cardinality, Handler
    from grpclib.encoding.base import CodecBase
    from grpclib.server import Server

    class Bytes(CodecBase):
        @property
        def __content_subtype__(self) -> str:
            return "proto"

        def encode(self, message: Any, message_type: Any) -> bytes:
            return bytes(message)

        def decode(self, data: bytes, message_type: Any) -> Any:
            return data

    class Echo:
        async def answer(self, stream: Any) -> None:
            await stream.send_message(await stream.recv_message())

        def __mapping__(self) -> Any:
            return {PATH: Handler(self.answer, Cardinality.UNARY_UNARY, bytes, bytes)}

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])
    server = Server([Echo()], codec=Bytes())
    await server.start("127.0.0.1", 0, ssl=context)
    listening: Any = server._server
    print(listening.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


SERVERS = {"shoal": serve_shoal, "grpcio": serve_grpcio, "grpclib": serve_grpclib}


@contextmanager
def running(name: str, certificate: Path, key: Path) -> Iterator[tuple[int, int]]:
    """(port, pid) of a server on core 0."""
    command = [sys.executable, __file__, "--serve", name, str(certificate), str(key)]
    with subprocess.Popen(["taskset", "-c", "0", *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline()), process.pid
        finally:
            process.kill()


def load(port: int, body: Path, requests: int, in_flight: int) -> float:
    """Requests a second. Raises RuntimeError unless every request was answered."""
    fields = ("content-type: application/grpc", "te: trailers")
    found = subprocess.run(
        ["taskset", "-c", "1", "h2load", "-t", "1", "-c", "1", "-m", str(in_flight), "-n", str(requests),
         f"--data={body}", *(part for each in fields for part in ("-H", each)), f"https://127.0.0.1:{port}{PATH}"],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    if f" {requests} succeeded" not in found:
        raise RuntimeError(found[-600:])
    rate = re.search(r"finished in .*?, ([\d.]+) req/s", found)
    assert rate is not None
    return float(rate[1])


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(names: list[str], rounds: int, folder: Path) -> dict[str, dict[str, tuple[float, float]]]:
    """By case and server: requests a second and CPU microseconds a request, medians."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    seen: dict[tuple[str, str], list[tuple[float, float]]] = {}
    counts: dict[tuple[str, str], int] = {}
    servers = {name: running(name, certificate, key) for name in names}
    try:
        at = {name: server.__enter__() for name, server in servers.items()}
        for _ in range(rounds + 1):
            for case, (size, in_flight) in CASES.items():
                body = folder / f"{size}.bin"
                body.write_bytes(frame_message(bytes(size)))
                for name, (port, pid) in at.items():
                    count = counts.get((case, name), 50)
                    before = cpu_s(pid)
                    rate = load(port, body, count, in_flight)
                    if (case, name) in counts:
                        seen.setdefault((case, name), []).append((rate, (cpu_s(pid) - before) / count * 1e6))
                    counts[case, name] = max(50, int(rate * SECONDS))
    finally:
        for server in servers.values():
            server.__exit__(None, None, None)
    return {
        case: {
            name: (
                statistics.median(rate for rate, _ in seen[case, name]),
                statistics.median(used for _, used in seen[case, name]),
            )
            for name in names
        }
        for case in CASES
    }


class _Answers:
    """Answers each request of `shoal.http2` with 100 bytes."""

    def __init__(self) -> None:
        self.connection = Http2Connection(Side.SERVER, self)

    def on_headers(self, stream: Stream, headers: HeaderList, *, is_end: bool) -> None: ...

    def on_data(self, stream: Stream, data: memoryview, *, is_end: bool) -> None:
        if is_end:
            stream.is_remote_open = False
            self.connection.respond(stream, RESPONSE_HEAD, (bytes(data),), TRAILERS_OK)

    def on_closed(self, stream: Stream, error: Any) -> None: ...

    def on_sent(self, stream: Stream) -> None: ...

    def on_pong(self, payload: bytes) -> None: ...

    def on_goaway(self, last_stream: int, error: int) -> None: ...


def requests_of(
    path: str, metadata: tuple[tuple[str, str], ...], message: bytes, count: int, frame_bytes: int = 2**14
) -> list[bytes]:
    """The bytes of a client, request by request, as grpc's clients send them: fields in the dynamic table."""
    from hpack import Encoder

    encoder = Encoder()
    fields = (
        (":method", "POST"), (":scheme", "https"), (":path", path), (":authority", "localhost"), ("te", "trailers"),
        ("content-type", "application/grpc"), ("user-agent", "grpc-python/1.81.1"), *metadata,
    )  # fmt: skip
    body = frame_message(message)
    pieces = [body[at : at + frame_bytes] for at in range(0, len(body), frame_bytes)]
    requests = []
    for number in range(1, 2 * count, 2):
        parts = [frames.headers(number, encoder.encode(fields), 2**14, end_stream=False)]
        for piece in pieces:
            flags = frames.END_STREAM if piece is pieces[-1] else 0
            parts += (frames.head(len(piece), frames.DATA, flags, number), piece)
        requests.append(b"".join(parts))
    return requests


def requests_of_a_client() -> list[bytes]:
    return requests_of(PATH, (("authorization", "Bearer secret"),), bytes(100), IN_MEMORY_REQUESTS)


def in_memory_shoal(requests: list[bytes]) -> None:
    server = _Answers().connection
    server.receive(frames.PREFACE + frames.settings(()), 0.0)
    for number, each in enumerate(requests):
        if number % 500 == 0:
            server.receive(frames.window_update(0, 500 * 105), 0.0)
        server.receive(each, 0.0)
        assert server.take_output()


def in_memory_h2(requests: list[bytes]) -> None:
    from h2.config import H2Configuration
    from h2.connection import H2Connection
    from h2.events import DataReceived, StreamEnded

    server = H2Connection(H2Configuration(client_side=False))
    server.initiate_connection()
    server.receive_data(frames.PREFACE + frames.settings(()))
    for number, each in enumerate(requests):
        if number % 500 == 0:
            server.receive_data(frames.window_update(0, 500 * 105))
        body = b""
        for event in server.receive_data(each):
            if isinstance(event, DataReceived):
                body = event.data
                server.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamEnded):
                stream = event.stream_id
                server.send_headers(stream, ((":status", "200"), ("content-type", "application/grpc")))
                server.send_data(stream, body)
                server.send_headers(stream, (("grpc-status", "0"),), end_stream=True)
        assert server.data_to_send()


def in_memory(rounds: int) -> dict[str, float]:
    """Microseconds a request of the protocol alone, by library; medians."""
    of: dict[str, Callable[[list[bytes]], None]] = {"shoal.http2": in_memory_shoal, "h2": in_memory_h2}
    requests = requests_of_a_client()
    seen: dict[str, list[float]] = {name: [] for name in of}
    for _ in range(rounds):
        for name, run in of.items():
            began = time.process_time()
            run(requests)
            seen[name].append((time.process_time() - began) / len(requests) * 1e6)
    return {name: statistics.median(times) for name, times in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        name, certificate, key = options.serve
        asyncio.run(SERVERS[name](Path(certificate), Path(key)))
        return
    print(machine_line())
    with tempfile.TemporaryDirectory() as folder:
        found = measure(list(SERVERS), options.rounds, Path(folder))
    for case, by_name in found.items():
        for name, (rate, used) in by_name.items():
            ratio = rate / by_name["grpcio"][0]
            print(f"{case:<22} {name:<8} {rate:>9,.0f} requests/s {used:>8,.0f} us of CPU {ratio:>6.2f} of grpcio")
    alone = in_memory(options.rounds)
    for name, microseconds in alone.items():
        print(f"protocol in memory     {name:<12} {microseconds:>6.1f} us a request")
    ratios = {case: round(by_name["shoal"][0] / by_name["grpcio"][0], 2) for case, by_name in found.items()}
    print(json.dumps({"vs_grpcio": ratios, "in_memory_us": {name: round(us, 1) for name, us in alone.items()}}))


if __name__ == "__main__":
    main()
