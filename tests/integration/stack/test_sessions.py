"""Streams of synthesised speech through a stateful model, while it moves and while what runs it is killed."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnxruntime
import pytest

from harness import speech
from harness.crafted import file_in
from harness.oip import Failed, GrpcClient, Tensor, step_request
from harness.report import record
from harness.stack import PATIENCE_S, Stack, documents, policy
from harness.wait import wait_until
from shoal.v1 import operator_pb2

pytestmark = pytest.mark.alone

NAME = "vad"
EQUAL = 1e-5
AGAIN_S = 0.2
"""After a refusal."""
WORKLOAD = f"""apiVersion: shoal/v1
kind: Workload
metadata: {{name: {NAME}}}
spec:
  model: {{source: vad}}
  policy: streams
  session: {{state: {{state: stateN}}}}
  capture: {{consent: true}}
"""
POLICY = """  require: {where: "node.name in ['plain-cpu', 'edge-npu']"}
  migration: {shift: {steps: [50%, 100%], hold: 1s}}
"""
MODEL = file_in("silero_vad", "data/silero_vad_openvino_16k.onnx")
"""Of silero-vad's wheel: for 16 kHz alone, with fixed shapes. (The other names no length of a step.)"""


@dataclass
class Streams:
    """One session for each speaker, on a thread of their own, until `stop`. heard: answers by speaker. failed: what was
    refused or lost; a stream that was told to begin anew does, and its answers count from there."""

    stack: Stack
    speakers: int
    begins: int = 0
    steps: int = 0
    """For each; 0: until `stop`."""
    heard: list[list[float]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> "Streams":
        self.heard = [[] for _ in range(self.speakers)]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="streams")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        assert self._thread is not None
        self._thread.join()

    def wait_for(self, more: int) -> None:
        """Until each has had so many more answers."""
        wanted = [len(one) + more for one in self.heard]
        wait_until(
            lambda: all(len(one) >= count for one, count in zip(self.heard, wanted, strict=True)),
            2 * PATIENCE_S,
            f"{more} more steps of each stream; {self.failed[:3]}",
        )

    def wait_for_failures(self) -> None:
        wait_until(lambda: len(self.failed) >= self.speakers, PATIENCE_S, "every stream to be told")

    async def _run(self) -> None:
        files = self.stack.client_files
        client = GrpcClient(self.stack.port("gateway", "grpc"), files.authority.read_bytes(), files)
        async with asyncio.TaskGroup() as group:
            for speaker in range(self.speakers):
                group.create_task(self._speak(client, speaker))
        await client.close()

    async def _speak(self, client: GrpcClient, speaker: int) -> None:
        frames, heard, sequence = speech.frames(speaker), self.heard[speaker], self.begins + speaker + 1
        while not self._stopping.is_set() and not (self.steps and len(heard) >= self.steps):
            frame = frames[len(heard) % len(frames)]
            inputs = (Tensor("input", "FP32", (1, len(frame)), frame.tobytes()),)
            try:
                answer = await client.send(step_request(NAME, inputs, sequence, start=not heard), timeout=PATIENCE_S)
            except Failed as error:
                self.failed.append(error.code or str(error.status))
                heard.clear()  # the remedy of SESSION_LOST: begin it anew
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(AGAIN_S):
                        await asyncio.Event().wait()
                continue
            (output,) = answer.outputs
            heard.append(float(np.frombuffer(output.raw, np.float32)[0]))
        if heard:
            frame = frames[len(heard) % len(frames)]
            inputs = (Tensor("input", "FP32", (1, len(frame)), frame.tobytes()),)
            await client.send(step_request(NAME, inputs, sequence, end=True))


def unmoved(speaker: int, steps: int) -> list[float]:
    """What the model says of the same speech in one place, from the first step on."""
    session = onnxruntime.InferenceSession(str(MODEL))
    state, said, frames = np.zeros((2, 1, 128), np.float32), [], speech.frames(speaker)
    for step in range(steps):
        feeds = {"input": frames[step % len(frames)][None], "state": state}
        probability, state = (np.asarray(each) for each in session.run(None, feeds))
        said.append(float(probability[0, 0]))
    return said


def drift(streams: Streams) -> float:
    """The greatest difference of any answer from the unmoved run."""
    worst = 0.0
    for speaker, heard in enumerate(streams.heard):
        worst = max(worst, float(np.max(np.abs(np.array(heard) - np.array(unmoved(speaker, len(heard)))))))
    return worst


@pytest.fixture(scope="module")
def streaming(stack: Stack) -> Iterator[Stack]:
    stack.push(MODEL.read_bytes(), "vad")
    stack.apply(documents(policy("streams", POLICY), WORKLOAD))
    stack.serves(NAME)
    yield stack
    stack.forget(NAME)


def move(stack: Stack) -> operator_pb2.MigrationView:
    """To the other node, done."""
    (placed,) = stack.serves(NAME)
    return stack.moved(NAME, {"plain-cpu": "edge-npu", "edge-npu": "plain-cpu"}[placed.node])


@pytest.mark.parametrize("speakers", [6, pytest.param(50, marks=pytest.mark.long)])
def test_speech_streams_go_on_through_a_live_move(streaming: Stack, speakers: int) -> None:
    with Streams(streaming, speakers, begins=1000) as streams:
        streams.wait_for(10)
        done = move(streaming)
        assert (done.stage, done.verdict.passed) == ("done", True), (str(done)[-700:], streams.failed)
        streams.wait_for(10)
    assert streams.failed == [], done
    worst, steps = drift(streams), sum(map(len, streams.heard))
    assert worst <= EQUAL, worst
    record("SESSIONS", "P", 1, sessions=speakers, steps=steps, lost=0, worst=worst, moved=done.id)
    print(f"{speakers} sessions, {steps} steps, lost 0, worst difference {worst:.2e}")


@pytest.mark.long
def test_a_worker_killed_while_streams_go_on_replays_their_steps_once(streaming: Stack) -> None:
    with Streams(streaming, 6, begins=2000) as streams:
        streams.wait_for(5)
        for _ in range(3):
            (placed,) = streaming.serves(NAME)
            pid, _ = streaming.workers()[placed.assignment.id]
            os.kill(pid, signal.SIGKILL)
            streams.wait_for(10)
    assert streams.failed == []
    worst, steps = drift(streams), sum(map(len, streams.heard))
    assert worst <= EQUAL, worst
    record("SESSIONS", "P", 3, killed="worker", steps=steps, lost=0, worst=worst)


@pytest.mark.long
def test_an_agent_killed_whole_loses_its_sessions_and_their_clients_are_told(streaming: Stack) -> None:
    (placed,) = streaming.serves(NAME)
    with Streams(streaming, 6, begins=3000) as streams:
        streams.wait_for(5)
        streaming.kill(placed.node)
        streams.wait_for_failures()
        streaming.control.hurt(placed.node, "resume")
        streams.wait_for(10)
    assert {"SESSION_LOST"} <= set(streams.failed) <= {"SESSION_LOST", "REPLICA_UNREACHABLE", "MODEL_NOT_READY"}
    assert drift(streams) <= EQUAL  # from where each began anew
    streaming.serves(NAME)
    record("SESSIONS", "P", 1, killed="agent", told=sorted(set(streams.failed)))


@pytest.mark.long
def test_a_node_that_is_cut_off_stops_its_sessions_when_its_lease_ends(streaming: Stack) -> None:
    """Its coordinator is stopped: nobody extends the lease, and another node may be given what it has."""
    (placed,) = streaming.serves(NAME)
    with Streams(streaming, 3, begins=4000) as streams:
        streams.wait_for(5)
        streaming.control.hurt("coordinator", "pause")
        streams.wait_for_failures()
        streaming.control.hurt("coordinator", "resume")
        streams.wait_for(5)
    assert set(streams.failed) <= {"LEASE_ENDED", "SESSION_LOST"}, set(streams.failed)
    assert "LEASE_ENDED" in streams.failed
    assert drift(streams) <= EQUAL
    assert placed.node in {"plain-cpu", "edge-npu"}
    record("SESSIONS", "P", 1, cut_off="until the lease ended", told=sorted(set(streams.failed)))
