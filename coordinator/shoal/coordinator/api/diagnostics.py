"""Diagnostics of a coordinator or a node for an operator: log, versions, flags and metrics."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.types.codes import Code, refuse
from shoal.v1 import operator_pb2
from shoal.wire.certificates import identity_of_context


class ProcessDiagnostics(Protocol):
    """What this process reports about itself."""

    def versions(self) -> Mapping[str, str]: ...
    def flags(self) -> Mapping[str, str]:
        """Command-line options, without secrets."""
        ...

    def metrics(self) -> str: ...
    def log(self, lines: int, *, follow: bool) -> AsyncIterator[tuple[str, ...]]: ...


class AddressableProcess(ProcessDiagnostics, Protocol):
    """Also where operators reach this process, and where they, joiners and renewing nodes reach any coordinator of the
    region, or replica of the federation. The latter are separated by commas."""

    @property
    def link_address(self) -> str: ...
    @property
    def link_addresses(self) -> str: ...
    @property
    def enrol_addresses(self) -> str: ...


async def stream_logs(
    region: RegionalCoordinator | None,
    process: ProcessDiagnostics,
    audit: AuditTrail,
    request: operator_pb2.LogsRequest,
    context: Any,
) -> AsyncIterator[operator_pb2.LogsReply]:
    """region: None for a coordinator without nodes. Raises ShoalError(NODE_UNKNOWN | NODE_LOST | ..)."""
    await audit.note(identity_of_context(context).uri, "Logs", request.node or "coordinator", "")
    if request.node:
        if region is None:
            raise refuse(
                Code.NODE_UNKNOWN,
                f"a federation, which has no node {request.node:.64}",
                "a region's coordinator",
                "use the context of its region: --context, or --region",
            )
        region.fleet.check_connection(request.node)
        pages = region.logs.read(request.node, request.lines, follow=request.follow)
    else:
        pages = process.log(request.lines, follow=request.follow)
    async for lines in pages:
        yield operator_pb2.LogsReply(lines=lines)


def diagnostics(process: ProcessDiagnostics) -> operator_pb2.GetDiagnosticsReply:
    return operator_pb2.GetDiagnosticsReply(
        versions=process.versions(), config=process.flags(), metrics=process.metrics()
    )
