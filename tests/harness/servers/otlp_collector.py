"""The part of an OpenTelemetry collector that Shoal needs: it receives spans over OTLP and keeps them."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from harness.crypto.pki import CertificateFiles


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """refuse: statuses for the next calls, one each."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.calls: list[trace_service_pb2.ExportTraceServiceRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.refuse: list[grpc.StatusCode] = []
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._lock:
            if self.refuse:
                context.abort(self.refuse.pop(0), "as the test wants")
            self.calls.append(request)
            self.metadata.append({str(key): str(value) for key, value in context.invocation_metadata()})
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, trace: str = "") -> list[tuple[str, Span]]:
        """(service and instance that sent it, span) of that trace; empty: of all traces."""
        with self._lock:
            calls = tuple(self.calls)
        return [
            ("/".join(_values(group.resource.attributes)), span)
            for call in calls
            for group in call.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
            if span.trace_id.hex() == trace or not trace
        ]


def _values(attributes: Any) -> list[str]:
    told = {each.key: each.value.string_value for each in attributes}
    return [told[key] for key in ("service.name", "service.namespace", "service.instance.id")]


@contextmanager
def collector(files: CertificateFiles | None = None) -> Iterator[OtlpReceiver]:
    """files: with which it proves itself, None for a port without TLS."""
    server, found = grpc.server(ThreadPoolExecutor(2)), OtlpReceiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)  # type: ignore[no-untyped-call]
    if files is None:
        found.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    else:
        certificate, key, _ = files.read()
        port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([(key, certificate)]))
        found.endpoint = f"https://localhost:{port}"
    server.start()
    try:
        yield found
    finally:
        server.stop(0).wait()
