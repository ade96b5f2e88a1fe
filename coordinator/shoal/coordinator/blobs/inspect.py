"""Reads a stranger's model in a process of its own, which holds nothing worth taking and may die of it.

The child gets the open file as its standard input and nothing else: no path, no environment, no descriptor of ours. It
limits itself (memory, CPU time, no file written, few descriptors, a deadline of its own should we die) before it reads
the first byte, takes itself off the network where the kernel allows an unprivileged network namespace (in many
containers it does not; the child opens no socket either way), and answers with one message on a pipe.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from shoal.coordinator.blobs.directory import Opened
from shoal.coordinator.blobs.inspect_child import PACK, PROFILE, REFUSAL, Errand, Tensors
from shoal.coordinator.blobs.thread import to_its_end
from shoal.coordinator.core.graph import RULES, Rules
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.migration import LEAST_SAMPLES, PackRef
from shoal.types.profile import ModelProfile
from shoal.types.units import Bytes, Seconds, show_bytes, show_seconds
from shoal.v1 import nouns_pb2
from shoal.wire import nouns
from shoal.wire.limits import PACK_BYTES


@dataclass(frozen=True, slots=True)
class InspectionLimits:
    """memory_bytes: address space of the child beyond four times the file (its bytes, parsed, and copies of tensors).

    cpu_s: processor time. deadline_s: wall clock, start of the process included. answer_bytes: of its message.
    """

    memory_bytes: Bytes = Bytes(2**30)
    cpu_s: Seconds = Seconds(30.0)
    deadline_s: Seconds = Seconds(60.0)
    answer_bytes: Bytes = Bytes(4 * 2**20)
    at_once: int = 2
    rules: Rules = RULES


class ChildInspector:
    """`ports.Inspector` by a child process for each model, at most `at_once` at a time."""

    def __init__(self, limits: InspectionLimits | None = None) -> None:
        self._limits = limits or InspectionLimits()
        self._turn = asyncio.Semaphore(self._limits.at_once)

    async def inspect(self, path: str, digest: str) -> ModelProfile:
        """The profile of the file whose bytes have this digest; the descriptor that is hashed is the one that is read.

        Raises ShoalError(MODEL_UNKNOWN | MODEL_PATH | MODEL_TOO_LARGE | MODEL_DIGEST | MODEL_ARCHIVE | MODEL_INVALID |
        CUSTOM_OP_DENIED) and nothing else but CancelledError.
        """
        most = self._limits.rules.max_size_bytes
        answer = await self._read(path, digest, most, "a model in one protobuf file ends below 2 GiB: quantise it")
        return _understood(answer, digest)

    async def inspect_pack(self, path: str, digest: str, model: ModelProfile) -> PackRef:
        """As `inspect`, of samples for a model with these inputs and outputs."""
        asked = Tensors(model.inputs, model.outputs)
        answer = await self._read(path, digest, PACK_BYTES, "fewer or smaller samples", asked)
        return _counted(answer, digest)

    async def _read(self, path: str, digest: str, most: int, remedy: str, samples_of: Tensors | None = None) -> bytes:
        """What the child answers."""
        file = Opened()
        try:
            await to_its_end(file.read, Path(path))
            size = os.fstat(file.descriptor).st_size
            if size > most:
                raise refuse(Code.MODEL_TOO_LARGE, f"{size} bytes", f"at most {most} in one file", remedy)
            async with self._turn:
                return await self._ask(file.descriptor, size, digest, samples_of)
        finally:
            file.close()

    async def _ask(self, descriptor: int, size: int, digest: str, samples_of: Tensors | None) -> bytes:
        limits = self._limits
        memory = limits.memory_bytes + 4 * size
        errand = Errand(digest, memory, limits.cpu_s, limits.deadline_s, limits.rules, samples_of)
        try:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-B", "-m", "shoal.coordinator.blobs.inspect_child", errand.to_text()),
                stdin=descriptor,
                stdout=PIPE,
                stderr=DEVNULL,
                env={"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
                start_new_session=True,
            )
        except OSError as failed:
            raise refuse(
                Code.INTERNAL, failed.strerror or "no process", "a process to inspect the model in", "try again"
            ) from failed
        try:
            async with asyncio.timeout(limits.deadline_s):
                answer = await _answer(child, limits.answer_bytes)
                status = await child.wait()
        except TimeoutError as late:
            raise _stopped("not done at its deadline", show_seconds(limits.deadline_s)) from late
        finally:
            await _end(child)
        if status != 0:
            raise _died(status, limits)
        return answer


async def _answer(child: Process, most: int) -> bytes:
    """Everything the child says, up to `most` bytes."""
    assert child.stdout is not None
    said = bytearray()
    while part := await child.stdout.read(most + 1 - len(said)):
        said += part
        if len(said) > most:
            raise _stopped("a profile without end", show_bytes(most))
    return bytes(said)


async def _end(child: Process) -> None:
    """The child is gone and its pipe drained, however we came here."""
    assert child.stdout is not None
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    while await child.stdout.read(2**16):
        pass
    await child.wait()


def _understood(answer: bytes, digest: str) -> ModelProfile:
    """A child that was taken over can say anything; it is checked like any message."""
    try:
        if (content := _of_kind(PROFILE, answer)) is not None:
            profile = nouns.from_wire(ModelProfile, nouns_pb2.ModelProfile.FromString(content))
            if profile.digest == digest:
                return profile
    except DecodeError as failed:
        raise _unreadable(f"{failed}") from failed
    except ShoalError as refused:
        if refused.code is Code.MESSAGE_INVALID:
            raise _unreadable(refused.refusal.found) from refused
        raise
    raise _unreadable("no profile of this model")


def _counted(answer: bytes, digest: str) -> PackRef:
    try:
        if (content := _of_kind(PACK, answer)) is not None:
            said = json.loads(content)
            count, size, answers = said["count"], said["size_bytes"], said["answers"]
            if type(count) is type(size) is int and LEAST_SAMPLES <= count <= PACK_BYTES and 0 < size <= PACK_BYTES:
                return PackRef(digest, Bytes(size), count, answers is True)
    except (ValueError, KeyError, TypeError, DecodeError) as failed:
        raise _unreadable(f"{failed}"[:200]) from failed
    raise _unreadable("no samples")


def _of_kind(kind: bytes, answer: bytes) -> bytes | None:
    """What it says, None where it is of another kind. Raises the refusal that it is, and DecodeError."""
    if answer[:1] == REFUSAL:
        raise ShoalError(nouns.from_wire(Refusal, nouns_pb2.Refusal.FromString(answer[1:])))
    return answer[1:] if answer[:1] == kind else None


def _unreadable(found: str) -> ShoalError:
    return refuse(
        Code.MODEL_INVALID, f"its inspection answered: {found}", "a profile within the protocol's limits",
        "names, lists or numbers in the model exceed what a profile holds: export it again",
    )  # fmt: skip


def _stopped(found: str, asked: str) -> ShoalError:
    return refuse(
        Code.MODEL_INVALID, f"inspection stopped: {found}", f"at most {asked}", "export a plainer model; see the limits"
    )


def _died(status: int, limits: InspectionLimits) -> ShoalError:
    if status == -signal.SIGXCPU:
        return _stopped("out of processor time", show_seconds(limits.cpu_s))
    if status == -signal.SIGALRM:
        return _stopped("not done at its deadline", show_seconds(limits.deadline_s))
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return _stopped(f"the process that read it ended with {how}", f"{show_bytes(limits.memory_bytes)} and 4x the file")
