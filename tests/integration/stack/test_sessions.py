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

from harness.clients.oip import GrpcClient, InferenceError, Tensor, step_request
from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack, documents, policy
from harness.models import speech
from harness.report import record
from harness.wait import wait_until
from shoal.coordinator.clock import CoordinatorClock
from shoal.v1 import operator_pb2

NAME = speech.NAME
EQUAL = 1e-5
AGAIN_S = 0.2
"""After a refusal."""
POLICY = """  require: {where: "node.name in ['plain-cpu', 'edge-npu']"}
  migration: {shift: {steps: [50%, 100%], hold: 1s}}
"""


@dataclass
class Streams:
    """One session for each speaker, on a thread of their own, until `stop`. heard: answers by speaker. failed: what was
    refused or lost; a stream that was told to begin anew does, and its answers count from there."""

    stack: DevStack
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
            2 * WAIT_TIMEOUT_S,
            f"{more} more steps of each stream; {self.failed[:3]}",
        )

    def wait_for_failures(self) -> None:
        wait_until(lambda: len(self.failed) >= self.speakers, WAIT_TIMEOUT_S, "every stream to be told")

    async def _run(self) -> None:
        files = self.stack.client_files
        client = GrpcClient(self.stack.port("gateway", "data"), files.authority.read_bytes(), files)
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
                answer = await client.send(
                    step_request(NAME, inputs, sequence, start=not heard), timeout=WAIT_TIMEOUT_S
                )
            except InferenceError as error:
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


def reference_outputs(speaker: int, steps: int) -> list[float]:
    """What the model says of the same speech in one place, from the first step on."""
    session = onnxruntime.InferenceSession(str(speech.DETECTOR))
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
        worst = max(worst, float(np.max(np.abs(np.array(heard) - np.array(reference_outputs(speaker, len(heard)))))))
    return worst


@pytest.fixture(scope="module")
def streaming(stack: DevStack) -> Iterator[DevStack]:
    stack.push(speech.DETECTOR.read_bytes(), "vad")
    stack.apply(documents(policy("streams", POLICY), speech.WORKLOAD))
    stack.wait_serving(NAME)
    yield stack
    stack.delete_workloads(NAME)


def move(stack: DevStack) -> operator_pb2.MigrationView:
    """To the other node, done."""
    (placed,) = stack.wait_serving(NAME)
    return stack.migrate(NAME, {"plain-cpu": "edge-npu", "edge-npu": "plain-cpu"}[placed.node])


@pytest.mark.parametrize("speakers", [6, pytest.param(50, marks=pytest.mark.long)])
def test_speech_streams_go_on_through_a_live_move(streaming: DevStack, speakers: int) -> None:
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
def test_a_worker_killed_while_streams_go_on_replays_their_steps_once(streaming: DevStack) -> None:
    with Streams(streaming, 6, begins=2000) as streams:
        streams.wait_for(5)
        for _ in range(3):
            (placed,) = streaming.wait_serving(NAME)
            pid, _ = streaming.workers()[placed.assignment.id]
            os.kill(pid, signal.SIGKILL)
            streams.wait_for(10)
    assert streams.failed == []
    worst, steps = drift(streams), sum(map(len, streams.heard))
    assert worst <= EQUAL, worst
    record("SESSIONS", "P", 3, killed="worker", steps=steps, lost=0, worst=worst)


@pytest.mark.long
def test_an_agent_killed_whole_loses_its_sessions_and_their_clients_are_told(streaming: DevStack) -> None:
    (placed,) = streaming.wait_serving(NAME)
    with Streams(streaming, 6, begins=3000) as streams:
        streams.wait_for(5)
        streaming.kill(placed.node)
        streams.wait_for_failures()
        streaming.control.break_member(placed.node, "resume")
        streams.wait_for(10)
    assert {"SESSION_LOST"} <= set(streams.failed) <= {"SESSION_LOST", "REPLICA_UNREACHABLE", "MODEL_NOT_READY"}
    assert drift(streams) <= EQUAL  # from where each began anew
    streaming.wait_serving(NAME)
    record("SESSIONS", "P", 1, killed="agent", told=sorted(set(streams.failed)))


AWAY_S = 20.0
"""Twice the default `partition.lost_after`."""


@pytest.mark.parametrize("hurt", ["pause", "kill"])
def test_f06_sessions_go_on_when_the_coordinator_was_away(streaming: DevStack, hurt: str) -> None:
    """Longer than a lease lasts: no other node can have been given the sessions meanwhile, and none is lost."""
    streaming.wait_serving(NAME)
    with Streams(streaming, 3, begins=4000 if hurt == "pause" else 5000) as streams:
        streams.wait_for(5)
        clock = CoordinatorClock()
        streaming.control.break_member("coordinator", hurt)
        began = clock.now()
        wait_until(lambda: clock.now() - began >= AWAY_S, 2 * AWAY_S, "the coordinator to have been away long enough")
        streaming.control.break_member("coordinator", "resume")
        streams.wait_for(5)
    assert streams.failed == []
    worst, steps = drift(streams), sum(map(len, streams.heard))
    assert worst <= EQUAL, worst
    record("F06", "P", 1, sessions=3, coordinator=hurt, away_s=AWAY_S, steps=steps, lost=0, worst=worst)


@pytest.mark.long
def test_sessions_of_a_node_that_is_cut_off_wait_for_its_lease(streaming: DevStack) -> None:
    """Longer than a step waits: it is told why, and the session goes on once the coordinator is back."""
    streaming.wait_serving(NAME)
    with Streams(streaming, 3, begins=6000) as streams:
        streams.wait_for(5)
        streaming.control.break_member("coordinator", "pause")
        streams.wait_for_failures()
        streaming.control.break_member("coordinator", "resume")
        streams.wait_for(5)
    assert set(streams.failed) == {"LEASE_ENDED"}, set(streams.failed)
    assert drift(streams) <= EQUAL
    record("SESSIONS", "P", 1, cut_off="until the lease ended", told=sorted(set(streams.failed)))
