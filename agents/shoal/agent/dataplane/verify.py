"""The target's side of a verification: the same inputs to the new replica and to what it takes over from.

Each input goes to the new one first: what takes a worker down shall not take down the one that serves. Numbers are
compared in the worker; here is only who is asked for what, and how fast: in between there is room for those who are
served. What answers in another region is asked as any client of the
workload asks it, through a gateway of this region: inputs go where its requests may go, and nowhere else.
"""

import hashlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from shoal.agent.core import verification
from shoal.agent.core.verification import Compared
from shoal.agent.dataplane.forward import CONNECT_TIMEOUT_S, Errand, Peers
from shoal.agent.dataplane.witness import Captures
from shoal.agent.frames import ConnectionLost, FrameClient
from shoal.agent.ports import Clock, LocalWorker
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError
from shoal.types.migration import Against, Drift, InputsFrom, Verdict, Verification
from shoal.types.route import Endpoint, EndpointKind, EndpointState
from shoal.types.units import Seconds
from shoal.v1 import witness_pb2
from shoal.wire import nouns

ANSWER_S: Final = Seconds(30.0)
REST_S: Final = Seconds(0.05)
"""After each comparison, or as long as that took: all at once they would be a burst of load on what serves."""
REFUSED_AT_MOST: Final = 3
"""For each input that was answered: inputs that are made up may be none that the model takes."""
_ORIGIN: Final = "verification"
_ABOUT_THE_INPUT: Final = frozenset(
    {Code.INVALID_ARGUMENT, Code.TOO_LARGE, Code.RUNTIME_FAILED, Code.OUT_OF_MEMORY, Code.UNIMPLEMENTED}
)


class Verifier:
    """peers: the ways to other fronts of the region. captures: what replicas of this node have been asked."""

    def __init__(self, peers: Peers, captures: Captures, clock: Clock) -> None:
        self._peers = peers
        self._captures = captures
        self._clock = clock

    async def verify(self, worker: LocalWorker, asked: Verification, pack: str) -> Verdict:
        """Raises ShoalError where there is no verdict to be had, or not yet."""
        client = await FrameClient.connect(worker.socket, worker.nonce, timeout=CONNECT_TIMEOUT_S)
        try:
            return await _Trial(client, worker, asked, pack, self._peers, self._captures, self._clock).run()
        finally:
            await client.close()


class _Trial:
    """One attempt."""

    def __init__(
        self,
        client: FrameClient,
        worker: LocalWorker,
        asked: Verification,
        pack: str,
        peers: Peers,
        captures: Captures,
        clock: Clock,
    ) -> None:
        self._client = client
        self._worker = worker
        self._asked = asked
        self._pack = pack
        self._peers = peers
        self._captures = captures
        self._clock = clock
        kind = EndpointKind.GATEWAY if asked.agreement else EndpointKind.AGENT
        self._source = Endpoint(asked.source, asked.source_node, kind, asked.source_address, 1.0, EndpointState.READY)
        self._refused = ""
        """Why what it is compared with does not answer something that the new one did."""
        self._tolerances = [nouns.to_wire(each) for each in asked.tolerances]

    async def run(self) -> Verdict:
        asked, used = self._asked, InputsFrom.GENERATED
        given = await self._given()
        if len(given) >= asked.samples:
            used = asked.inputs  # else the verdict says that some were made up
        digest, compared, drawn = hashlib.sha256(), list[Compared](), 0
        while len(compared) < asked.samples and drawn < REFUSED_AT_MOST * max(asked.samples, 1):
            if given:
                sample = given.popleft()
            elif asked.against is Against.REFERENCE:
                break
            else:
                sample, drawn = await self._generated(drawn), drawn + 1
            began = self._clock.now()
            one = await self._compare(sample)
            await self._clock.sleep(Seconds(max(REST_S, self._clock.now() - began)))
            if one is not None:
                compared.append(one)
                digest.update(hashlib.sha256(sample.request).digest())
        if self._refused and not compared:
            compared.append(Compared((), f"it answers what the other refuses: {self._refused}", 0))
        return verification.judge(asked, used, compared, digest.hexdigest())

    async def _given(self) -> deque[witness_pb2.Sample]:
        """Inputs that need not be made up, as many as are asked for at most."""
        asked = self._asked
        if self._pack:
            return deque([sample async for sample in self._packed()])
        if asked.inputs is not InputsFrom.CAPTURED or asked.against is not Against.SOURCE:
            return deque()
        if asked.agreement:
            own = self._captures.newest(self._worker.assignment, asked.samples)
            return deque(witness_pb2.Sample(request=each) for each in own)
        request = witness_pb2.CapturedRequest(
            migration=asked.migration, assignment=asked.source, count=asked.samples
        ).SerializeToString()
        reply = await self._peers.witness(self._source, "Captured", request, ANSWER_S)
        requests = witness_pb2.CapturedReply.FromString(reply).requests
        return deque(witness_pb2.Sample(request=each) for each in requests[: asked.samples])

    async def _packed(self) -> AsyncIterator[witness_pb2.Sample]:
        """Of the pack. Its answers are what counts against a reference, and do not against a source."""
        referring = self._asked.against is Against.REFERENCE
        for index in range(self._asked.samples):
            header: dict[str, str | int] = {"index": index, "path": self._pack, "digest": self._asked.pack}
            found = witness_pb2.Sample.FromString(await self._call("packed", b"", header))
            if not found.request or (referring and not found.response):
                return
            yield found if referring else witness_pb2.Sample(request=found.request)

    async def _generated(self, index: int) -> witness_pb2.Sample:
        """The same for the same migration, so that an attempt can be repeated."""
        seed = int.from_bytes(hashlib.sha256(self._asked.migration.encode()).digest()[:8], "big")
        request = await self._call("draw", b"", {"index": index, "seed": seed})
        return witness_pb2.Sample(request=request)

    async def _compare(self, sample: witness_pb2.Sample) -> Compared | None:
        """None where what it is compared with does not answer this input either."""
        got, why = b"", ""
        try:
            got = await self._call("answer", sample.request)
        except ConnectionLost:
            raise
        except ShoalError as error:
            if error.code not in _ABOUT_THE_INPUT:
                raise
            why = error.refusal.found
        try:
            expected = sample.response or await self._of_source(sample.request)
        except ShoalError as error:
            if error.code not in _ABOUT_THE_INPUT:
                raise
            self._refused = error.refusal.found if got else self._refused
            return None
        if not got:
            return Compared((), f"it refuses what the other answers: {why}", 0)
        answers = witness_pb2.Answers(expected=expected, got=got, tolerances=self._tolerances)
        found = witness_pb2.Compared.FromString(await self._call("compare", answers.SerializeToString()))
        drifts = tuple(nouns.from_wire(Drift, each) for each in found.drifts)
        return Compared(drifts, found.fault, found.elements)

    async def _of_source(self, request: bytes) -> bytes:
        if self._asked.agreement:
            return await self._of_region(request)
        asked = witness_pb2.AnswerRequest(
            migration=self._asked.migration, assignment=self._asked.source, request=request
        ).SerializeToString()
        reply = await self._peers.witness(self._source, "Answer", asked, ANSWER_S)
        return witness_pb2.AnswerReply.FromString(reply).response

    async def _of_region(self, request: bytes) -> bytes:
        """Of whoever serves the workload under the agreement."""
        key, asked = self._worker.workload, oip.ModelInferRequest.FromString(request)
        asked.model_name = key.name
        errand = Errand(key.tenant, _ORIGIN, f"{_ORIGIN}-{self._asked.migration}", ANSWER_S)
        return await self._peers.infer(self._source, asked.SerializeToString(), errand)

    async def _call(self, kind: str, payload: bytes, header: dict[str, str | int] | None = None) -> bytes:
        named = {**(header or {}), "assignment": self._worker.assignment, "deadline_s": ANSWER_S}
        return (await self._client.call(kind, payload, header=named, timeout=ANSWER_S)).payload
