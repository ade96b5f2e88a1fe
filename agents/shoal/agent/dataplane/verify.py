"""The target's side of a verification: the same inputs go to the new replica and to the one that it replaces.

Each input goes to the new replica first, so that an input that crashes a worker does not crash the serving one. The
worker compares the numbers. This module decides who answers which input and how fast, with pauses that leave room for
clients' requests. A source in another region is called through a gateway of this region, as any client calls it. So
inputs go only where the workload's requests may go.
"""

import hashlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from shoal.agent.core import verification
from shoal.agent.core.verification import InputComparison
from shoal.agent.dataplane.upstream import CONNECT_TIMEOUT_S, CallContext, PeerClients
from shoal.agent.dataplane.verification_source import RequestCaptures
from shoal.agent.frames import ConnectionLost, FrameClient
from shoal.agent.ports import AgentClock, LocalWorker, ReferenceRecording
from shoal.host.memory import trim
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError
from shoal.types.migration import LEAST_SAMPLES, PACK_BYTES, Against, Drift, InputsFrom, Verdict, Verification
from shoal.types.route import Endpoint, EndpointKind, EndpointState
from shoal.types.units import Seconds
from shoal.v1 import witness_pb2
from shoal.wire import nouns

Taken = TypeVar("Taken")

ANSWER_S: Final = Seconds(30.0)
PAUSE_S: Final = Seconds(0.05)
"""Shortest pause after each comparison; it lasts as long as the comparison took if that is longer. All comparisons at
once would be a burst of load on the serving replica."""
MAX_REFUSALS_PER_INPUT: Final = 3
"""Generated inputs tried for each input to answer, because the model may not accept a generated one."""
PACK_HEADERS: Final = 2**16
"""Most bytes by which a pack is larger than its arrays."""
_ORIGIN: Final = "verification"
_ABOUT_THE_INPUT: Final = frozenset(
    {Code.INVALID_ARGUMENT, Code.TOO_LARGE, Code.RUNTIME_FAILED, Code.OUT_OF_MEMORY, Code.UNIMPLEMENTED}
)


class ReplicaVerifier:
    """Verifies replicas of this node.

    `peers` are the connections to other fronts of the region; `captures` are captured requests of this node's replicas.
    """

    def __init__(self, peers: PeerClients, captures: RequestCaptures, clock: AgentClock) -> None:
        self._peers = peers
        self._captures = captures
        self._clock = clock

    async def verify(self, worker: LocalWorker, asked: Verification, pack: str) -> Verdict:
        """Raises ShoalError where there is no verdict, or not yet."""
        async with self._trial(worker, asked, pack) as trial:
            return await trial.run()

    async def record(self, worker: LocalWorker, asked: Verification, pack: str) -> ReferenceRecording:
        """Raises ShoalError where the recording failed for now."""
        async with self._trial(worker, asked, pack) as trial:
            return await trial.record()

    @asynccontextmanager
    async def _trial(self, worker: LocalWorker, asked: Verification, pack: str) -> "AsyncIterator[_Trial]":
        client = await FrameClient.connect(worker.socket, worker.nonce, timeout=CONNECT_TIMEOUT_S)
        try:
            yield _Trial(client, worker, asked, pack, self._peers, self._captures, self._clock)
        finally:
            await client.close()
            trim()  # of the tensors compared: a front that then reads no message would keep 15 MiB of them


class _Trial:
    """One attempt to verify or record."""

    def __init__(
        self,
        client: FrameClient,
        worker: LocalWorker,
        asked: Verification,
        pack: str,
        peers: PeerClients,
        captures: RequestCaptures,
        clock: AgentClock,
    ) -> None:
        self._client = client
        self._worker = worker
        self._verification = asked
        self._pack = pack
        self._peers = peers
        self._captures = captures
        self._clock = clock
        kind = EndpointKind.GATEWAY if asked.agreement else EndpointKind.AGENT
        self._source = Endpoint(asked.source, asked.source_node, kind, asked.source_address, 1.0, EndpointState.READY)
        self._last_refusal = ""
        """Why the source refused an input that the replica answered; when recording, why the replica refused one."""
        self._max_samples = asked.samples
        self._tolerances = [nouns.to_wire(each) for each in asked.tolerances]

    async def run(self) -> Verdict:
        used, compared, inputs_sha256 = await self._for_each_input(self._compare)
        if self._last_refusal and not compared:
            compared.append(InputComparison((), f"it answers what the other refuses: {self._last_refusal}", 0))
        return verification.verdict_of(self._verification, used, compared, inputs_sha256)

    async def record(self) -> ReferenceRecording:
        """Record the replica's answers as a reference. The verdict only says that there is one, or why there is
        none."""
        used, taken, inputs_sha256 = await self._for_each_input(self._answer_sample)
        content, why = b"", ""
        if self._max_samples < LEAST_SAMPLES:
            why = f"{LEAST_SAMPLES} inputs with their answers take more than {PACK_BYTES} bytes"
        elif len(taken) < self._max_samples:
            why = f"{len(taken)} inputs of {self._max_samples} were answered: {self._last_refusal}"
        else:
            try:
                content = await self._call("record", witness_pb2.Recorded(samples=taken).SerializeToString())
            except ShoalError as error:
                if error.code is not Code.MODEL_INVALID:
                    raise
                why = error.refusal.found
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}" if content else ""
        return ReferenceRecording(
            verification.recording_verdict(self._verification, used, len(taken), inputs_sha256, digest, why), content
        )

    async def _for_each_input(
        self, take: Callable[[witness_pb2.Sample], Awaitable[Taken | None]]
    ) -> tuple[InputsFrom, list[Taken], str]:
        """(where the inputs came from, results of `take` other than None, SHA-256 of their inputs)."""
        asked, used = self._verification, InputsFrom.GENERATED
        given = await self._available_inputs()
        if len(given) >= asked.samples:
            used = asked.inputs  # else the verdict says that some were generated
        digest, taken, drawn = hashlib.sha256(), list[Taken](), 0
        while len(taken) < self._max_samples and drawn < MAX_REFUSALS_PER_INPUT * max(asked.samples, 1):
            if given:
                sample = given.popleft()
            elif asked.against is Against.REFERENCE and asked.recording is None:
                break
            else:
                sample, drawn = await self._generate_input(drawn), drawn + 1
            began = self._clock.now()
            one = await take(sample)
            await self._clock.sleep(Seconds(max(PAUSE_S, self._clock.now() - began)))
            if one is not None:
                taken.append(one)
                digest.update(hashlib.sha256(sample.request).digest())
        return used, taken, digest.hexdigest()

    async def _available_inputs(self) -> deque[witness_pb2.Sample]:
        """Inputs that need not be generated, at most as many as requested."""
        asked = self._verification
        if self._pack:
            return deque([sample async for sample in self._pack_inputs()])
        if asked.inputs is not InputsFrom.CAPTURED or asked.against is not Against.SOURCE:
            return deque()
        if asked.agreement:
            own = self._captures.newest(self._worker.assignment, asked.samples)
            return deque(witness_pb2.Sample(request=each) for each in own)
        request = witness_pb2.CapturedRequest(
            migration=asked.migration, assignment=asked.source, count=asked.samples
        ).SerializeToString()
        reply = await self._peers.call_verification_source(self._source, "Captured", request, ANSWER_S)
        requests = witness_pb2.CapturedReply.FromString(reply).requests
        return deque(witness_pb2.Sample(request=each) for each in requests[: asked.samples])

    async def _pack_inputs(self) -> AsyncIterator[witness_pb2.Sample]:
        """Inputs of the pack. Its answers are used when comparing with a reference, not when comparing with a
        source."""
        referring = self._verification.against is Against.REFERENCE and self._verification.recording is None
        for index in range(self._verification.samples):
            header: dict[str, str | int] = {"index": index, "path": self._pack, "digest": self._verification.pack}
            found = witness_pb2.Sample.FromString(await self._call("packed", b"", header))
            if not found.request or (referring and not found.response):
                return
            yield found if referring else witness_pb2.Sample(request=found.request)

    async def _generate_input(self, index: int) -> witness_pb2.Sample:
        """An input that is the same for the same migration, so that an attempt can be repeated; for a reference, the
        same for the same model."""
        header: dict[str, str | int] = {"index": index}
        if self._verification.recording is None:
            migration = self._verification.migration.encode()
            header["seed"] = int.from_bytes(hashlib.sha256(migration).digest()[:8], "big")
        return witness_pb2.Sample(request=await self._call("draw", b"", header))

    async def _answer_sample(self, sample: witness_pb2.Sample) -> witness_pb2.Sample | None:
        """The sample with the replica's answer; None if the replica refuses the input."""
        response, why = await self._target_answer(sample.request)
        if not response:
            self._last_refusal = why
            return None
        self._max_samples = min(self._max_samples, (PACK_BYTES - PACK_HEADERS) // (len(sample.request) + len(response)))
        return witness_pb2.Sample(request=sample.request, response=response)

    async def _compare(self, sample: witness_pb2.Sample) -> InputComparison | None:
        """The comparison of both answers; None if the source refuses this input."""
        got, why = await self._target_answer(sample.request)
        try:
            expected = sample.response or await self._source_answer(sample.request)
        except ShoalError as error:
            if error.code not in _ABOUT_THE_INPUT:
                raise
            self._last_refusal = error.refusal.found if got else self._last_refusal
            return None
        if not got:
            return InputComparison((), f"it refuses what the other answers: {why}", 0)
        answers = witness_pb2.Answers(expected=expected, got=got, tolerances=self._tolerances)
        found = witness_pb2.Compared.FromString(await self._call("compare", answers.SerializeToString()))
        drifts = tuple(nouns.from_wire(Drift, each) for each in found.drifts)
        return InputComparison(drifts, found.fault, found.elements)

    async def _target_answer(self, request: bytes) -> tuple[bytes, str]:
        """(answer of the new replica, ""), or (empty, why it refuses this input)."""
        try:
            return await self._call("answer", request), ""
        except ConnectionLost:
            raise
        except ShoalError as error:
            if error.code not in _ABOUT_THE_INPUT:
                raise
            return b"", error.refusal.found

    async def _source_answer(self, request: bytes) -> bytes:
        if self._verification.agreement:
            return await self._region_answer(request)
        asked = witness_pb2.AnswerRequest(
            migration=self._verification.migration, assignment=self._verification.source, request=request
        ).SerializeToString()
        reply = await self._peers.call_verification_source(self._source, "Answer", asked, ANSWER_S)
        return witness_pb2.AnswerReply.FromString(reply).response

    async def _region_answer(self, request: bytes) -> bytes:
        """The answer of the region that serves the workload under the agreement."""
        key, asked = self._worker.workload, oip.ModelInferRequest.FromString(request)
        asked.model_name = key.name
        context = CallContext(
            key.tenant, _ORIGIN, f"{_ORIGIN}-{self._verification.migration}", ANSWER_S, workload=key.name
        )
        return await self._peers.infer(self._source, asked.SerializeToString(), context)

    async def _call(self, kind: str, payload: bytes, header: dict[str, str | int] | None = None) -> bytes:
        named = {**(header or {}), "assignment": self._worker.assignment, "deadline_s": ANSWER_S}
        return (await self._client.call(kind, payload, header=named, timeout=ANSWER_S)).payload
