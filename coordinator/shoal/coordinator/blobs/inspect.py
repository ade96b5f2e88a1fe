"""Inspects an untrusted model in a child process that holds no secrets and may crash.

The child gets the open file as its standard input and nothing else: no path, no environment, none of our descriptors.
It limits itself before it reads the first byte: memory, CPU time, no file writes, few descriptors, and a deadline of
its own in case the parent dies. It leaves the network where the kernel allows an unprivileged network namespace; many
containers do not, but the child opens no socket either way. It answers with one message on a pipe.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from shoal.coordinator.blobs.directory import OpenFile
from shoal.coordinator.blobs.inspect_child import PACK, PROFILE, REFUSAL, InspectionRequest, Tensors
from shoal.coordinator.blobs.thread import run_thread_to_completion
from shoal.coordinator.core.graph import RULES, Rules
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.migration import LEAST_SAMPLES, PACK_BYTES, PackRef
from shoal.types.profile import PROFILE_VERSION, ModelProfile
from shoal.types.units import Bytes, Seconds, show_bytes, show_seconds
from shoal.v1 import nouns_pb2
from shoal.wire import nouns


@dataclass(frozen=True, slots=True)
class InspectionLimits:
    """Limits of one inspection and of the pool of inspection processes."""

    # Address space of the child beyond four times the file, which covers its bytes, the parsed model and copies of
    # tensors.
    memory_bytes: Bytes = Bytes(2**30)
    # Processor time of one child, in seconds.
    cpu_s: Seconds = Seconds(30.0)
    # Wall-clock time of one inspection in seconds, including the start of the process.
    deadline_s: Seconds = Seconds(60.0)
    # The same of an inspection in the background. On a busy machine it may get no processor for minutes, and `cpu_s`
    # bounds its work already. A choice.
    background_deadline_s: Seconds = Seconds(3600.0)
    # Largest message that the parent accepts from the child, in bytes.
    answer_bytes: Bytes = Bytes(4 * 2**20)
    # Children that run at the same time; further inspections wait. One more runs in the background.
    max_children: int = 2
    # What a model may contain; its `max_size_bytes` also bounds the file.
    rules: Rules = RULES


_CHILD_CODES: Final = frozenset({
    Code.MODEL_PATH, Code.MODEL_TOO_LARGE, Code.MODEL_DIGEST, Code.MODEL_ARCHIVE, Code.MODEL_INVALID,
    Code.CUSTOM_OP_DENIED, Code.INVALID_ARGUMENT,
})  # fmt: skip
"""What a child may refuse a model with. A model that took it over could otherwise blame this machine, and be inspected
again and again."""
_BACKGROUND_NICENESS: Final = 19
"""The lowest priority. Where Linux groups processes by session (sched(7), autogroup) it counts only within one, so that
whoever inspects many in the background also pauses."""


class ChildInspector:
    """`ports.Inspector` with one child process for each model, at most `max_children` at a time."""

    def __init__(self, limits: InspectionLimits | None = None) -> None:
        self._limits = limits or InspectionLimits()
        self._slots = asyncio.Semaphore(self._limits.max_children)
        self._background_slot = asyncio.Semaphore(1)

    async def inspect(
        self,
        path: str,
        digest: str,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        *,
        is_background: bool = False,
    ) -> ModelProfile:
        """The profile of the file with this digest, at these shapes.

        The parent opens the file once; the child hashes and reads that same descriptor.

        Raises ShoalError(MODEL_UNKNOWN | MODEL_PATH | MODEL_TOO_LARGE | MODEL_DIGEST | MODEL_ARCHIVE | MODEL_INVALID |
        CUSTOM_OP_DENIED | INVALID_ARGUMENT | INTERNAL) and nothing else but CancelledError. INTERNAL is this machine's
        fault, never the model's.
        """
        most = self._limits.rules.max_size_bytes
        remedy = "a model in one protobuf file ends below 2 GiB: quantise it"
        answer = await self._read(path, digest, most, remedy, shapes=shapes, is_background=is_background)
        return _parse_profile(answer, digest)

    async def inspect_pack(self, path: str, digest: str, model: ModelProfile) -> PackRef:
        """Like `inspect`, for a sample pack of a model with these inputs and outputs."""
        asked = Tensors(model.inputs, model.outputs)
        answer = await self._read(path, digest, PACK_BYTES, "fewer or smaller samples", asked)
        return _parse_pack(answer, digest)

    async def _read(
        self, path: str, digest: str, most: int, remedy: str, samples_of: Tensors | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None, *, is_background: bool = False,
    ) -> bytes:  # fmt: skip
        """The child's answer for the file at `path`, which may have at most `most` bytes."""
        file = OpenFile()
        try:
            await run_thread_to_completion(file.open, Path(path))
            size = os.fstat(file.descriptor).st_size
            if size > most:
                raise refuse(Code.MODEL_TOO_LARGE, f"{size} bytes", f"at most {most} in one file", remedy)
            limits, rules = self._limits, self._limits.rules
            request = InspectionRequest(
                digest, limits.memory_bytes + 4 * size, limits.cpu_s,
                limits.background_deadline_s if is_background else limits.deadline_s, rules, samples_of, shapes or {},
                _BACKGROUND_NICENESS if is_background else 0,
            )  # fmt: skip
            async with self._background_slot if is_background else self._slots:
                return await self._run_child(file.descriptor, request)
        finally:
            file.close()

    async def _run_child(self, descriptor: int, request: InspectionRequest) -> bytes:
        limits = self._limits
        try:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-B", "-m", "shoal.coordinator.blobs.inspect_child", request.to_text()),
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
            async with asyncio.timeout(request.deadline_s):
                answer = await _read_answer(child, limits.answer_bytes)
                status = await child.wait()
        except TimeoutError as late:
            raise _stop_error("not done at its deadline", show_seconds(Seconds(request.deadline_s))) from late
        finally:
            await _kill(child)
        if status != 0:
            raise _exit_error(status, request, limits.memory_bytes)
        return answer


async def _read_answer(child: Process, most: int) -> bytes:
    """Everything that the child writes, up to `most` bytes."""
    assert child.stdout is not None
    said = bytearray()
    while part := await child.stdout.read(most + 1 - len(said)):
        said += part
        if len(said) > most:
            raise _stop_error("a profile without end", show_bytes(most))
    return bytes(said)


async def _kill(child: Process) -> None:
    """Kills the child, drains its pipe and reaps it, whatever the outcome."""
    assert child.stdout is not None
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    while await child.stdout.read(2**16):
        pass
    await child.wait()


def _parse_profile(answer: bytes, digest: str) -> ModelProfile:
    """Parses and checks the answer like any untrusted message, because the model may have taken over the child."""
    try:
        if (content := _content_of(PROFILE, answer)) is not None:
            profile = nouns.from_wire(ModelProfile, nouns_pb2.ModelProfile.FromString(content))
            if profile.version != PROFILE_VERSION:
                raise _answer_error(f"a profile of version {profile.version}")
            if profile.digest == digest:
                return profile
    except DecodeError as failed:
        raise _answer_error(f"{failed}") from failed
    except ShoalError as refused:
        if refused.code is Code.MESSAGE_INVALID:
            raise _answer_error(refused.refusal.found) from refused
        raise
    raise _answer_error("no profile of this model")


def _parse_pack(answer: bytes, digest: str) -> PackRef:
    try:
        if (content := _content_of(PACK, answer)) is not None:
            said = json.loads(content)
            count, size, answers = said["count"], said["size_bytes"], said["answers"]
            if type(count) is type(size) is int and LEAST_SAMPLES <= count <= PACK_BYTES and 0 < size <= PACK_BYTES:
                return PackRef(digest, Bytes(size), count, answers is True)
    except (ValueError, KeyError, TypeError, DecodeError) as failed:
        raise _answer_error(f"{failed}"[:200]) from failed
    raise _answer_error("no samples")


def _content_of(kind: bytes, answer: bytes) -> bytes | None:
    """The answer's content, or None if it is of another kind. Raises ShoalError if the answer is a refusal, and
    DecodeError."""
    if answer[:1] == REFUSAL:
        refusal = nouns.from_wire(Refusal, nouns_pb2.Refusal.FromString(answer[1:]))
        raise ShoalError(refusal) if refusal.code in _CHILD_CODES else _answer_error(f"{refusal.code}")
    return answer[1:] if answer[:1] == kind else None


def _answer_error(found: str) -> ShoalError:
    return refuse(
        Code.MODEL_INVALID, f"its inspection answered: {found}", "a profile within the protocol's limits",
        "names, lists or numbers in the model exceed what a profile holds: export it again",
    )  # fmt: skip


def _stop_error(found: str, asked: str) -> ShoalError:
    return refuse(
        Code.MODEL_INVALID, f"inspection stopped: {found}", f"at most {asked}", "export a plainer model; see the limits"
    )


def _exit_error(status: int, request: InspectionRequest, memory_bytes: Bytes) -> ShoalError:
    if status == -signal.SIGXCPU:
        return _stop_error("out of processor time", show_seconds(Seconds(request.cpu_s)))
    if status == -signal.SIGALRM:
        return _stop_error("not done at its deadline", show_seconds(Seconds(request.deadline_s)))
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return _stop_error(f"the process that read it ended with {how}", f"{show_bytes(memory_bytes)} and 4x the file")
