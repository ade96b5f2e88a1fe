"""grpc.health.v1 on the data ports, for authorized callers: whether the front is ready, once or at each change."""

from collections.abc import Awaitable, Callable
from typing import Final

from shoal.agent.dataplane.transport import InboundCall, InferenceService
from shoal.host.event_wait import wait_or_timeout
from shoal.inference import health_pb2
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, refuse

SERVICE: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
SERVED_SERVICES: Final = frozenset({oip.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name, SERVICE})
"""Service names that can be checked; the empty name stands for the whole front."""
RECHECK_S: Final = 10.0
"""Seconds between two checks whether a watch's certificate or token has expired, which no event reports."""

Response = health_pb2.HealthCheckResponse


def check(service: InferenceService, call: InboundCall, asked: str) -> Response:
    """Raises ShoalError(NOT_FOUND), and the refusal of an unauthorized caller."""
    is_ready = service.server_ready(call)
    if asked and asked not in SERVED_SERVICES:
        raise refuse(Code.NOT_FOUND, f"service {asked!r:.80}", " or ".join(sorted(SERVED_SERVICES)), "leave it out")
    return _response(is_ready)


async def watch(
    service: InferenceService, call: InboundCall, asked: str, send: Callable[[Response], Awaitable[None]]
) -> None:
    """Send the status now and at each change, until cancelled.

    The status of an unknown service is SERVICE_UNKNOWN, as in that protocol. Raises ShoalError as soon as the caller is
    no longer authorized, and what `send` raises.
    """
    is_known = not asked or asked in SERVED_SERVICES
    sent: Response | None = None
    while True:
        change = service.change  # taken before the check, so that no later change is missed
        is_ready = service.server_ready(call)
        now = _response(is_ready) if is_known else Response(status=Response.SERVICE_UNKNOWN)
        if now != sent:
            await send(now)
            sent = now
        await wait_or_timeout(change, RECHECK_S)


def _response(is_ready: bool) -> Response:
    return Response(status=Response.SERVING if is_ready else Response.NOT_SERVING)
