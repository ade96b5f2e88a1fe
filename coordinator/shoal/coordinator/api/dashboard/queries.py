"""What the page may ask beside its live tables: the operator API's own read-only calls, with their rules and replies.

Each query is one method of `shoal.v1.Operator` that viewers may call. Its request is made of a few short parameters, so
a stranger's bytes are never parsed as a message.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from google.protobuf.message import Message

from shoal.coordinator.api.authorise import RULES
from shoal.coordinator.api.dashboard import candidates
from shoal.coordinator.api.dashboard.parameters import Parameters, is_set
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.v1 import nouns_pb2, operator_pb2

PLAN_BYTES: Final = 256 * 2**10
"""Most bytes of documents in one plan preview; `shoal plan` takes more."""


class ReadMethods(Protocol):
    """Methods of the operator API. actor: who calls, where that makes a difference; a context that is None is not
    read."""

    async def get(self, request: operator_pb2.GetRequest, actor: str) -> operator_pb2.GetReply: ...
    async def explain(self, request: operator_pb2.ExplainRequest, actor: str) -> operator_pb2.ExplainReply: ...
    async def can_move(self, request: operator_pb2.CanMoveRequest, actor: str) -> operator_pb2.CanMoveReply: ...
    async def plan(self, request: operator_pb2.PlanRequest, actor: str) -> operator_pb2.PlanReply: ...
    async def History(self, request: operator_pb2.HistoryRequest, context: Any) -> operator_pb2.HistoryReply: ...
    async def Trace(self, request: operator_pb2.TraceRequest, context: Any) -> operator_pb2.TraceReply: ...
    async def Timeline(self, request: operator_pb2.TimelineRequest, context: Any) -> operator_pb2.TimelineReply: ...
    async def GetFederation(
        self, request: operator_pb2.GetFederationRequest, context: Any
    ) -> operator_pb2.GetFederationReply: ...


@dataclass(frozen=True, slots=True)
class Query:
    """One path below `/api/v1/`."""

    # Method of the operator API whose rule holds.
    method: str
    # Names of the parameters that it takes.
    takes: tuple[str, ...]
    # Calls it: parameters, body, caller.
    call: Callable[[ReadMethods, Parameters, str, Identity], Coroutine[Any, Any, Message]]
    # True: the body is documents.
    has_body: bool = False
    # Shortens the reply, on the dashboard's own thread; returns what to say of that beside the reply's fields. None: it
    # goes as it is.
    shorten: Callable[[Any, Parameters], Mapping[str, int]] | None = None

    def __post_init__(self) -> None:
        assert Role.VIEWER in RULES[self.method], f"{self.method} is not for reading alone"


def _method(name: str) -> str:
    return f"/shoal.v1.Operator/{name}"


def _key(given: Parameters) -> nouns_pb2.WorkloadKey:
    return nouns_pb2.WorkloadKey(tenant=given.get("tenant", ""), name=given.get("name", ""))


def _timeline(given: Parameters) -> operator_pb2.TimelineRequest:
    return operator_pb2.TimelineRequest(
        workload=_key(given) if given.get("name") else None, coarse=is_set(given, "coarse")
    )


QUERIES: Final[Mapping[str, Query]] = {
    "get": Query(
        _method("Get"),
        ("kind", "name", "tenant"),
        lambda api, given, body, caller: api.get(operator_pb2.GetRequest(**given), caller.uri),
    ),
    "explain": Query(
        _method("Explain"),
        ("name", "tenant", "most", "brief"),
        lambda api, given, body, caller: api.explain(operator_pb2.ExplainRequest(workload=_key(given)), caller.uri),
        shorten=candidates.shorten,
    ),
    "history": Query(
        _method("History"),
        ("name", "tenant"),
        lambda api, given, body, caller: api.History(operator_pb2.HistoryRequest(workload=_key(given)), None),
    ),
    "can-move": Query(
        _method("CanMove"),
        ("name", "tenant", "to"),
        lambda api, given, body, caller: api.can_move(operator_pb2.CanMoveRequest(**given), caller.uri),
    ),
    "trace": Query(
        _method("Trace"), ("id",), lambda api, given, body, caller: api.Trace(operator_pb2.TraceRequest(**given), None)
    ),
    "timeline": Query(
        _method("Timeline"),
        ("name", "tenant", "coarse"),
        lambda api, given, body, caller: api.Timeline(_timeline(given), None),
    ),
    "federation": Query(
        _method("GetFederation"),
        (),
        lambda api, given, body, caller: api.GetFederation(operator_pb2.GetFederationRequest(), None),
    ),
    "plan": Query(
        _method("Plan"),
        (),
        lambda api, given, body, caller: api.plan(
            operator_pb2.PlanRequest(documents=[operator_pb2.Document(name="pasted", text=body)]), caller.uri
        ),
        has_body=True,
    ),
}
"""By path."""
