"""What an operator asks of a coordinator or a node when something is wrong: its log, versions, flags and metrics."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.controllers.region import Region
from shoal.types.codes import Code, refuse
from shoal.v1 import operator_pb2
from shoal.wire.identity import identity_of_context


class Diagnosed(Protocol):
    """This process."""

    def versions(self) -> Mapping[str, str]: ...
    def flags(self) -> Mapping[str, str]:
        """Without a secret."""
        ...

    def metrics(self) -> str: ...
    def log(self, lines: int, *, follow: bool) -> AsyncIterator[tuple[str, ...]]: ...


async def logs(
    region: Region | None, own: Diagnosed, audit: AuditTrail, request: operator_pb2.LogsRequest, context: Any
) -> AsyncIterator[operator_pb2.LogsReply]:
    """region: None for a coordinator that has no nodes. Raises ShoalError(NODE_UNKNOWN | NODE_LOST | ..)."""
    await audit.note(identity_of_context(context).uri, "Logs", request.node or "coordinator", "")
    if request.node:
        if region is None:
            raise refuse(
                Code.NODE_UNKNOWN,
                f"a federation, which has no node {request.node:.64}",
                "a region's coordinator",
                "use the context of its region: --context, or --region",
            )
        region.fleet.check_connected(request.node)
        pages = region.logs.read(request.node, request.lines, follow=request.follow)
    else:
        pages = own.log(request.lines, follow=request.follow)
    async for lines in pages:
        yield operator_pb2.LogsReply(lines=lines)


def diagnostics(own: Diagnosed) -> operator_pb2.GetDiagnosticsReply:
    return operator_pb2.GetDiagnosticsReply(versions=own.versions(), config=own.flags(), metrics=own.metrics())
