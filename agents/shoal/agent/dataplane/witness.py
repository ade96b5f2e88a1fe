"""The source's side of a verification: what a replica here answers, and what it was asked, for whoever takes over.

Only the agent that the region named as a verifier of that very replica gets an answer: any other node of the region is
refused, so that none reads what others sent. Captured requests are kept in memory alone, as many as the workload
consents to, and are forgotten with the replica or the consent.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from shoal.agent.dataplane.auth import agent_of
from shoal.agent.dataplane.forward import Errand, Workers
from shoal.agent.dataplane.request import invalid
from shoal.agent.dataplane.transport import Call
from shoal.agent.ports import Witness
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, refuse
from shoal.types.units import Seconds, Wall
from shoal.v1 import witness_pb2
from shoal.wire.identity import Identity

KEPT_BYTES: Final = 16 * 2**20
"""Of one replica's captured requests; the oldest go first, and one that is larger is not kept."""
ANSWER_S: Final = Seconds(30.0)
"""At most, for one answer to a verifier."""
_ORIGIN: Final = "verification"

M = TypeVar("M", bound=Message)


class Captures:
    """The newest requests that each replica answered, where that is consented to."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[bytes]] = {}
        self._bytes: dict[str, int] = {}

    def configure(self, consent: Mapping[str, int]) -> None:
        """How many for each assignment; of the others everything is forgotten."""
        before = self._kept
        self._kept = {name: deque(before.get(name, ()), maxlen=most) for name, most in consent.items() if most > 0}
        self._bytes = {name: sum(map(len, kept)) for name, kept in self._kept.items()}

    def note(self, assignment: str, request: bytes) -> None:
        kept = self._kept.get(assignment)
        if kept is None or len(request) > KEPT_BYTES:
            return
        if len(kept) == kept.maxlen:
            self._drop(assignment, kept)
        kept.append(request)
        self._bytes[assignment] += len(request)
        while self._bytes[assignment] > KEPT_BYTES:
            self._drop(assignment, kept)

    def newest(self, assignment: str, count: int) -> tuple[bytes, ...]:
        """Tensors alone: no name of a request, of a client or of a session."""
        kept = self._kept.get(assignment, ())
        return tuple(_tensors(request) for request in tuple(kept)[-count:]) if count > 0 else ()

    def _drop(self, assignment: str, kept: deque[bytes]) -> None:
        self._bytes[assignment] -= len(kept.popleft())


class Witnesses:
    """Answers `shoal.v1.Witness`. dates_at: the moment at which who calls must be valid."""

    def __init__(self, region: str, workers: Workers, dates_at: Callable[[], Wall]) -> None:
        self._region = region
        self._workers = workers
        self._dates_at = dates_at
        self._witnesses: Mapping[str, Witness] = {}
        self._revoked: frozenset[str] = frozenset()
        self.captures = Captures()

    def configure(self, witnesses: Iterable[Witness], revoked: Iterable[str]) -> None:
        self._witnesses = {each.assignment: each for each in witnesses}
        self._revoked = frozenset(revoked)
        self.captures.configure({each.assignment: each.capture for each in self._witnesses.values()})

    def admit(self, call: Call) -> None:
        """Returns if this caller may ask at all: an agent of this region. Raises ShoalError."""
        self._agent(call)

    async def captured(self, call: Call, message: bytes) -> bytes:
        """A CapturedRequest to a CapturedReply, both serialized. Raises ShoalError."""
        asked = _parse(witness_pb2.CapturedRequest, message)
        self._named(call, asked.migration, asked.assignment)
        requests = self.captures.newest(asked.assignment, asked.count)
        return witness_pb2.CapturedReply(requests=requests).SerializeToString()

    async def answer(self, call: Call, message: bytes) -> bytes:
        """An AnswerRequest to an AnswerReply, both serialized. Raises ShoalError: also what the worker refused."""
        asked = _parse(witness_pb2.AnswerRequest, message)
        verifier = self._named(call, asked.migration, asked.assignment)
        left = ANSWER_S if call.left_s is None else Seconds(min(call.left_s, ANSWER_S))
        errand = Errand("", _ORIGIN, f"{verifier.name}-{asked.migration}", left)
        response = await self._workers.answer(asked.assignment, asked.request, errand)
        return witness_pb2.AnswerReply(response=response).SerializeToString()

    def _agent(self, call: Call) -> Identity:
        return agent_of(call, self._region, self._revoked, self._dates_at())

    def _named(self, call: Call, migration: str, assignment: str) -> Identity:
        """Raises ShoalError(ROLE_DENIED) also where there is no such replica: who may not ask learns nothing."""
        identity = self._agent(call)
        witness = self._witnesses.get(assignment)
        named = witness.verifiers if witness is not None else ()
        if not any(each.migration == migration and each.node == identity.name for each in named):
            raise refuse(
                Code.ROLE_DENIED,
                f"{identity.uri}, which no move of {assignment!r:.80} names",
                "a verifier that the region named to this node",
                "it is tried again: this node may not have been told yet",
            )
        return identity


def _parse(kind: type[M], message: bytes) -> M:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise invalid(f"bytes that are no {kind.__name__}", "a message of shoal.v1.Witness") from error


def _tensors(request: bytes) -> bytes:
    asked = oip.ModelInferRequest.FromString(request)
    plain = oip.ModelInferRequest(raw_input_contents=asked.raw_input_contents)
    for given in asked.inputs:
        tensor = plain.inputs.add(name=given.name, datatype=given.datatype, shape=given.shape)
        if given.HasField("contents"):
            tensor.contents.CopyFrom(given.contents)
    return plain.SerializeToString()
