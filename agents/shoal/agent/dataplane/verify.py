"""The target's side of a verification: the same inputs to the new replica and to what it takes over from.

Each input goes to the new one first: what takes a worker down shall not take down the one that serves. Numbers are
compared in the worker; here is only who is asked for what, and how fast: in between there is room for those who are
served. What answers in another region is asked as any client of the
workload asks it, through a gateway of this region: inputs go where its requests may go, and nowhere else.
"""

import hashlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from shoal.agent.core import verification
from shoal.agent.core.verification import Compared
from shoal.agent.dataplane.forward import CONNECT_TIMEOUT_S, Errand, Peers
from shoal.agent.dataplane.witness import Captures
from shoal.agent.frames import ConnectionLost, FrameClient
from shoal.agent.ports import Clock, LocalWorker, Recorded
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError
from shoal.types.migration import LEAST_SAMPLES, Against, Drift, InputsFrom, Verdict, Verification
from shoal.types.route import Endpoint, EndpointKind, EndpointState
from shoal.types.units import Seconds
from shoal.v1 import witness_pb2
from shoal.wire import nouns
from shoal.wire.limits import PACK_BYTES

Taken = TypeVar("Taken")

ANSWER_S: Final = Seconds(30.0)
REST_S: Final = Seconds(0.05)
"""After each comparison, or as long as that took: all at once they would be a burst of load on what serves."""
REFUSED_AT_MOST: Final = 3
"""For each input that was answered: inputs that are made up may be none that the model takes."""
PACK_HEADERS: Final = 2**16
"""What a pack is larger than its arrays at the most."""
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
        async with self._trial(worker, asked, pack) as trial:
            return await trial.run()

    async def record(self, worker: LocalWorker, asked: Verification, pack: str) -> Recorded:
        """Raises ShoalError where that came to nothing yet."""
        async with self._trial(worker, asked, pack) as trial:
            return await trial.record()

    @asynccontextmanager
    async def _trial(self, worker: LocalWorker, asked: Verification, pack: str) -> "AsyncIterator[_Trial]":
        client = await FrameClient.connect(worker.socket, worker.nonce, timeout=CONNECT_TIMEOUT_S)
        try:
            yield _Trial(client, worker, asked, pack, self._peers, self._captures, self._clock)
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
        self._most = asked.samples
        self._tolerances = [nouns.to_wire(each) for each in asked.tolerances]

    async def run(self) -> Verdict:
        used, compared, inputs_sha256 = await self._over_inputs(self._compare)
        if self._refused and not compared:
            compared.append(Compared((), f"it answers what the other refuses: {self._refused}", 0))
        return verification.judge(self._asked, used, compared, inputs_sha256)

    async def record(self) -> Recorded:
        """What it answers, as a reference. No verdict but that there is one, or why there is none."""
        used, taken, inputs_sha256 = await self._over_inputs(self._answered)
        content, why = b"", ""
        if self._most < LEAST_SAMPLES:
            why = f"{LEAST_SAMPLES} inputs with their answers take more than {PACK_BYTES} bytes"
        elif len(taken) < self._most:
            why = f"{len(taken)} inputs of {self._most} were answered: {self._refused}"
        else:
            try:
                content = await self._call("record", witness_pb2.Recorded(samples=taken).SerializeToString())
            except ShoalError as error:
                if error.code is not Code.MODEL_INVALID:
                    raise
                why = error.refusal.found
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}" if content else ""
        return Recorded(verification.recorded(self._asked, used, len(taken), inputs_sha256, digest, why), content)

    async def _over_inputs(
        self, take: Callable[[witness_pb2.Sample], Awaitable[Taken | None]]
    ) -> tuple[InputsFrom, list[Taken], str]:
        """(where the inputs came from, what `take` made of those that count, their SHA-256)."""
        asked, used = self._asked, InputsFrom.GENERATED
        given = await self._given()
        if len(given) >= asked.samples:
            used = asked.inputs  # else the verdict says that some were made up
        digest, taken, drawn = hashlib.sha256(), list[Taken](), 0
        while len(taken) < self._most and drawn < REFUSED_AT_MOST * max(asked.samples, 1):
            if given:
                sample = given.popleft()
            elif asked.against is Against.REFERENCE and asked.recording is None:
                break
            else:
                sample, drawn = await self._generated(drawn), drawn + 1
            began = self._clock.now()
            one = await take(sample)
            await self._clock.sleep(Seconds(max(REST_S, self._clock.now() - began)))
            if one is not None:
                taken.append(one)
                digest.update(hashlib.sha256(sample.request).digest())
        return used, taken, digest.hexdigest()

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
        referring = self._asked.against is Against.REFERENCE and self._asked.recording is None
        for index in range(self._asked.samples):
            header: dict[str, str | int] = {"index": index, "path": self._pack, "digest": self._asked.pack}
            found = witness_pb2.Sample.FromString(await self._call("packed", b"", header))
            if not found.request or (referring and not found.response):
                return
            yield found if referring else witness_pb2.Sample(request=found.request)

    async def _generated(self, index: int) -> witness_pb2.Sample:
        """The same for the same migration, so that an attempt can be repeated; of a reference, for the same model."""
        header: dict[str, str | int] = {"index": index}
        if self._asked.recording is None:
            migration = self._asked.migration.encode()
            header["seed"] = int.from_bytes(hashlib.sha256(migration).digest()[:8], "big")
        return witness_pb2.Sample(request=await self._call("draw", b"", header))

    async def _answered(self, sample: witness_pb2.Sample) -> witness_pb2.Sample | None:
        """With its answer; None where it refuses this input."""
        response, why = await self._of_target(sample.request)
        if not response:
            self._refused = why
            return None
        self._most = min(self._most, (PACK_BYTES - PACK_HEADERS) // (len(sample.request) + len(response)))
        return witness_pb2.Sample(request=sample.request, response=response)

    async def _compare(self, sample: witness_pb2.Sample) -> Compared | None:
        """None where what it is compared with does not answer this input either."""
        got, why = await self._of_target(sample.request)
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

    async def _of_target(self, request: bytes) -> tuple[bytes, str]:
        """What it answers; where it refuses this input nothing, and why."""
        try:
            return await self._call("answer", request), ""
        except ConnectionLost:
            raise
        except ShoalError as error:
            if error.code not in _ABOUT_THE_INPUT:
                raise
            return b"", error.refusal.found

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
