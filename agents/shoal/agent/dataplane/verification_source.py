"""The source's side of a verification: answers of a replica here, and its captured requests, for a verifier.

Only the agent that the region named as a verifier of that replica gets an answer. Every other node of the region is
refused, so that none can read what others sent. Captured requests are kept in memory only, at most as many as the
workload consents to. They are dropped with the replica or the consent.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from shoal.agent.dataplane.auth import agent_of
from shoal.agent.dataplane.forward_auth import ForwardAuth
from shoal.agent.dataplane.transport import InboundCall
from shoal.agent.dataplane.upstream import CallContext, WorkerClients
from shoal.agent.ports import VerificationSource
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, refuse
from shoal.types.identity import Identity
from shoal.types.units import Seconds, Wall
from shoal.v1 import witness_pb2
from shoal.wire.field_limits import CountLimits, parse

MAX_CAPTURE_BYTES: Final = 16 * 2**20
"""Bytes of one replica's captured requests. The oldest are dropped first, and a larger request is not kept."""
ANSWER_S: Final = Seconds(30.0)
"""Longest time for one answer to a verifier."""
LIMITS: Final = CountLimits(fields=256, repeated=64)
"""Limits for a verifier's messages, whose fields are all singular."""
_ORIGIN: Final = "verification"


class RequestCaptures:
    """The newest requests that each replica answered, where the workload consents."""

    def __init__(self) -> None:
        self._requests: dict[str, deque[bytes]] = {}
        self._bytes: dict[str, int] = {}

    def configure(self, consent: Mapping[str, int]) -> None:
        """Set how many to keep for each assignment; captures of all others are dropped."""
        before = self._requests
        self._requests = {name: deque(before.get(name, ()), maxlen=most) for name, most in consent.items() if most > 0}
        self._bytes = {name: sum(map(len, kept)) for name, kept in self._requests.items()}

    def note(self, assignment: str, request: bytes) -> None:
        kept = self._requests.get(assignment)
        if kept is None or len(request) > MAX_CAPTURE_BYTES:
            return
        if len(kept) == kept.maxlen:
            self._drop(assignment, kept)
        kept.append(request)
        self._bytes[assignment] += len(request)
        while self._bytes[assignment] > MAX_CAPTURE_BYTES:
            self._drop(assignment, kept)

    def newest(self, assignment: str, count: int) -> tuple[bytes, ...]:
        """The newest captured requests, tensors only: no id of a request, a client or a session."""
        kept = self._requests.get(assignment, ())
        return tuple(_tensors(request) for request in tuple(kept)[-count:]) if count > 0 else ()

    def _drop(self, assignment: str, kept: deque[bytes]) -> None:
        self._bytes[assignment] -= len(kept.popleft())


class VerificationSourceService:
    """Answers `shoal.v1.Witness`. `dates_at` gives the time at which a caller's certificate must be valid."""

    def __init__(
        self, region: str, workers: WorkerClients, dates_at: Callable[[], Wall], forward_auth: ForwardAuth | None = None
    ) -> None:
        """`forward_auth` lists the agents that may ask; None: all."""
        self._forward_auth = forward_auth
        self._region = region
        self._workers = workers
        self._dates_at = dates_at
        self._sources: Mapping[str, VerificationSource] = {}
        self._revoked: frozenset[str] = frozenset()
        self.captures = RequestCaptures()

    def configure(self, sources: Iterable[VerificationSource], revoked: Iterable[str]) -> None:
        self._sources = {each.assignment: each for each in sources}
        self._revoked = frozenset(revoked)
        self.captures.configure({each.assignment: each.capture for each in self._sources.values()})

    def admit(self, call: InboundCall) -> None:
        """Return if this caller may ask at all: an agent of this region. Raises ShoalError."""
        self._agent(call)

    async def read_captures(self, call: InboundCall, message: bytes) -> bytes:
        """Answer a CapturedRequest with a CapturedReply, both serialized. Raises ShoalError."""
        asked = parse(witness_pb2.CapturedRequest, message, LIMITS)
        self._check_verifier(call, "Captured", asked.migration, asked.assignment)
        requests = self.captures.newest(asked.assignment, asked.count)
        return witness_pb2.CapturedReply(requests=requests).SerializeToString()

    async def answer(self, call: InboundCall, message: bytes) -> bytes:
        """Answer an AnswerRequest with an AnswerReply, both serialized. Raises ShoalError, also what the worker
        refused."""
        asked = parse(witness_pb2.AnswerRequest, message, LIMITS)
        verifier = self._check_verifier(call, "Answer", asked.migration, asked.assignment)
        left = ANSWER_S if call.remaining_s is None else Seconds(min(call.remaining_s, ANSWER_S))
        context = CallContext("", _ORIGIN, f"{verifier.name}-{asked.migration}", left)
        response = await self._workers.answer(asked.assignment, asked.request, context)
        return witness_pb2.AnswerReply(response=response).SerializeToString()

    def _agent(self, call: InboundCall, method: str = "") -> Identity:
        return agent_of(call, self._region, self._revoked, self._dates_at(), self._forward_auth, method)

    def _check_verifier(self, call: InboundCall, method: str, migration: str, assignment: str) -> Identity:
        """Raises ShoalError(ROLE_DENIED), also if there is no such replica: an unauthorized caller must learn
        nothing."""
        identity = self._agent(call, method)
        witness = self._sources.get(assignment)
        named = witness.verifiers if witness is not None else ()
        if not any(each.migration == migration and each.node == identity.name for each in named):
            raise refuse(
                Code.ROLE_DENIED,
                f"{identity.uri}, which no move of {assignment!r:.80} names",
                "a verifier that the region named to this node",
                "it is tried again: this node may not have been told yet",
            )
        return identity


def _tensors(request: bytes) -> bytes:
    asked = oip.ModelInferRequest.FromString(request)
    plain = oip.ModelInferRequest(raw_input_contents=asked.raw_input_contents)
    for given in asked.inputs:
        tensor = plain.inputs.add(name=given.name, datatype=given.datatype, shape=given.shape)
        if given.HasField("contents"):
            tensor.contents.CopyFrom(given.contents)
    return plain.SerializeToString()
