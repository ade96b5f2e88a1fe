"""The child that reads a stranger's model: what it is handed, what stops it, what it cannot do."""

import asyncio
import errno
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from google.protobuf.message import Message
from numpy.typing import NDArray
from onnx import helper

from harness.models.synthetic import digest_of, ints, length_delimited_field, model, relu, tensor
from harness.wait import until
from shoal.coordinator.blobs import inspect_child
from shoal.coordinator.blobs.inspect import ChildInspector, InspectionLimits
from shoal.coordinator.blobs.inspect_child import InspectionRequest, Tensors
from shoal.coordinator.core.graph import Rules, profile_of
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.migration import PackRef
from shoal.types.profile import PROFILE_VERSION, ModelProfile, TensorSpec
from shoal.types.units import Bytes, Seconds
from shoal.wire import nouns

RELU = relu().SerializeToString()


def write_model(folder: Path, content: bytes = RELU) -> tuple[str, str]:
    path = folder / "model"
    path.write_bytes(content)
    return str(path), digest_of(content)


async def inspect_refusal(path: str, digest: str, limits: InspectionLimits | None = None) -> ShoalError:
    with pytest.raises(ShoalError) as caught:
        await ChildInspector(limits).inspect(path, digest)
    return caught.value


def slow() -> bytes:
    """Half a minute of constant folding, all within the limits on size."""
    nodes = [helper.make_node("Add", [f"t{i}", "one"], [f"t{i + 1}"]) for i in range(90_000)]
    return bytes(
        model(
            [*nodes, helper.make_node("Add", ["x", "t90000"], ["y"])],
            [tensor("x", [1], 7)],
            [tensor("y", [1], 7)],
            [ints("t0", [0]), ints("one", [1])],
        ).SerializeToString()
    )


def test_a_profile_that_no_message_can_hold_is_a_fault_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = profile_of(RELU, digest_of(RELU))
    assert isinstance(profile, ModelProfile)
    monkeypatch.setattr(inspect_child, "_read", lambda request: replace(profile, run_bytes=Bytes(2**70)))
    answer = inspect_child.inspect(InspectionRequest(digest_of(RELU), 2**30, 10.0, 10.0, Rules()))
    assert answer.startswith(inspect_child.REFUSAL)
    assert Code.MODEL_INVALID.encode() in answer


async def test_the_child_answers_what_the_core_says(tmp_path: Path) -> None:
    path, digest = write_model(tmp_path)
    assert await ChildInspector().inspect(path, digest) == profile_of(RELU, digest)


async def test_rules_reach_the_child(tmp_path: Path) -> None:
    node = helper.make_node("Own", ["x"], ["y"], domain="com.mine")
    content = model([node], [tensor("x", [1])], [tensor("y", [1])], domains={"com.mine": 1}).SerializeToString()
    path, digest = write_model(tmp_path, content)
    assert (await inspect_refusal(path, digest)).code is Code.CUSTOM_OP_DENIED
    trusting = InspectionLimits(rules=Rules(trusted_digests=frozenset({digest})))
    assert (await ChildInspector(trusting).inspect(path, digest)).operators == ("com.mine:Own",)


def test_an_errand_survives_its_text() -> None:
    tensors = Tensors((TensorSpec("x", "FP32", (-1, 3)),), (TensorSpec("y", "INT64", ()),))
    for samples_of in (None, tensors):
        errand = InspectionRequest(
            "sha256:0",
            5,
            1.5,
            2.5,
            Rules(max_nodes=7, trusted_digests=frozenset({"a", "b"})),
            samples_of,
            {"x": (1, -1)},
        )
        assert InspectionRequest.from_text(errand.to_text()) == errand


def relu_profile() -> ModelProfile:
    found = profile_of(RELU, digest_of(RELU))
    assert isinstance(found, ModelProfile)
    return found


def samples(count: int = 8, *, answers: bool = False, dtype: type = np.float32) -> bytes:
    file = io.BytesIO()
    x: NDArray[Any] = np.zeros((count, 2, 4)).astype(dtype)
    y = np.zeros((count, 2, 4), np.float32)
    np.savez(file, **({"x": x, "y": y} if answers else {"x": x}))  # type: ignore[arg-type]
    return file.getvalue()


@pytest.mark.parametrize("answers", [False, True])
async def test_samples_are_read_in_the_child_against_their_model(tmp_path: Path, *, answers: bool) -> None:
    content = samples(9, answers=answers)
    path, digest = write_model(tmp_path, content)
    found = await ChildInspector().inspect_pack(path, digest, relu_profile())
    assert found == PackRef(digest, Bytes(len(content)), 9, answers=answers)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (samples(7), "7 samples"),
        (samples(dtype=np.float64), "float64"),
        (RELU, "samples:"),
        (samples()[:-40], "samples:"),
    ],
    ids=["few", "datatype", "a model", "cut off"],
)
async def test_what_are_no_samples_of_the_model_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path, digest = write_model(tmp_path, content)
    with pytest.raises(ShoalError) as caught:
        await ChildInspector().inspect_pack(path, digest, relu_profile())
    assert caught.value.code is Code.MODEL_INVALID
    assert why in caught.value.refusal.found


async def test_samples_that_changed_on_the_way_are_refused(tmp_path: Path) -> None:
    path, _ = write_model(tmp_path, samples())
    with pytest.raises(ShoalError) as caught:
        await ChildInspector().inspect_pack(path, digest_of(samples(9)), relu_profile())
    assert caught.value.code is Code.MODEL_DIGEST


@pytest.mark.parametrize("kind", ["symlink", "hardlink", "fifo", "device", "folder"])
async def test_only_a_plain_file_is_opened(tmp_path: Path, kind: str) -> None:
    real, digest = write_model(tmp_path)
    path = tmp_path / "other"
    match kind:
        case "symlink":
            path.symlink_to(real)
        case "hardlink":
            path.hardlink_to(real)
        case "fifo":
            os.mkfifo(path)
        case "device":
            path = Path("/dev/zero")
        case "folder":
            path.mkdir()
    assert (await inspect_refusal(str(path), digest)).code is Code.MODEL_PATH


async def test_a_missing_file_and_a_name_with_nul(tmp_path: Path) -> None:
    _, digest = write_model(tmp_path)
    assert (await inspect_refusal(str(tmp_path / "none"), digest)).code is Code.MODEL_UNKNOWN
    assert (await inspect_refusal(str(tmp_path / "a\0b"), digest)).code is Code.MODEL_PATH


async def test_a_file_that_changed_after_its_digest_was_taken(tmp_path: Path) -> None:
    path, digest = write_model(tmp_path)
    Path(path).write_bytes(RELU + b"\x12\x01x")
    assert (await inspect_refusal(path, digest)).code is Code.MODEL_DIGEST


async def test_a_file_at_the_edge_of_protobuf_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with path.open("wb") as sparse:
        sparse.truncate(2**31)
    assert (await inspect_refusal(str(path), "sha256:" + "0" * 64)).code is Code.MODEL_TOO_LARGE


async def test_the_deadline_stops_it(tmp_path: Path) -> None:
    path, digest = write_model(tmp_path)
    error = await inspect_refusal(path, digest, InspectionLimits(deadline_s=Seconds(0.01)))
    assert error.code is Code.MODEL_INVALID
    assert "deadline" in error.refusal.found
    assert psutil.Process().children() == []


async def test_an_inspection_in_the_background_has_a_deadline_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it gets no processor for minutes. What it does is bounded by its processor time."""
    path, digest = write_model(tmp_path)
    start, alarms = asyncio.create_subprocess_exec, list[float]()

    async def record_start(*command: str, **options: Any) -> asyncio.subprocess.Process:
        alarms.append(InspectionRequest.from_text(command[-1]).deadline_s)
        return await start(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", record_start)
    short = ChildInspector(InspectionLimits(deadline_s=Seconds(0.01)))
    assert await short.inspect(path, digest, is_background=True) == profile_of(RELU, digest)
    never = ChildInspector(InspectionLimits(background_deadline_s=Seconds(0.01)))
    with pytest.raises(ShoalError, match=r"deadline.*10ms"):
        await never.inspect(path, digest, is_background=True)
    assert await never.inspect(path, digest) == profile_of(RELU, digest)
    assert alarms == [3600.0, 0.01, 60.0]


async def test_processor_time_stops_it(tmp_path: Path) -> None:
    path, digest = write_model(tmp_path, slow())
    error = await inspect_refusal(path, digest, InspectionLimits(cpu_s=Seconds(1)))
    assert error.code is Code.MODEL_INVALID
    assert "processor time" in error.refusal.found


async def test_memory_stops_it(tmp_path: Path) -> None:
    """Two bytes a node in the file, a hundred in memory: two million of them."""
    nodes = b"\x0a\x00" * 2_000_000
    path, digest = write_model(tmp_path, length_delimited_field(7, nodes))
    rules = Rules(max_nodes=10**7, max_fields=10**7)
    error = await inspect_refusal(path, digest, InspectionLimits(memory_bytes=Bytes(224 * 2**20), rules=rules))
    assert error.code is Code.MODEL_INVALID
    assert "memory" in error.refusal.found


async def test_an_answer_without_end_stops_it(tmp_path: Path) -> None:
    path, digest = write_model(tmp_path)
    error = await inspect_refusal(path, digest, InspectionLimits(answer_bytes=Bytes(20)))
    assert error.code is Code.MODEL_INVALID
    assert "without end" in error.refusal.found


async def test_a_child_that_is_killed_is_a_model_refused(tmp_path: Path) -> None:
    path, digest = write_model(tmp_path, slow())
    asked = asyncio.ensure_future(ChildInspector().inspect(path, digest))
    child = await until(lambda: next(iter(psutil.Process().children()), None), 10, "a child that reads the model")
    assert child is not None
    os.kill(child.pid, signal.SIGSEGV)
    with pytest.raises(ShoalError) as caught:
        await asked
    assert caught.value.code is Code.MODEL_INVALID
    assert "SIGSEGV" in caught.value.refusal.found


async def test_a_machine_without_a_process_or_a_descriptor_is_no_fault_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, digest = write_model(tmp_path)

    async def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "create_subprocess_exec", no_process)
        assert (await inspect_refusal(path, digest)).code is Code.INTERNAL

    def no_descriptor(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", no_descriptor)
        assert (await inspect_refusal(path, digest)).code is Code.INTERNAL
    assert await ChildInspector().inspect(path, digest) == profile_of(RELU, digest)


@pytest.mark.parametrize("is_background", [False, True], ids=["push", "background"])
@pytest.mark.parametrize("version", [2**31 - 1, -5, 0, PROFILE_VERSION + 1])
async def test_a_child_that_was_taken_over_decides_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, *, is_background: bool
) -> None:
    path, digest = write_model(tmp_path)
    answer_with(tmp_path, monkeypatch, inspect_child.PROFILE, nouns.to_wire(replace(relu_profile(), version=version)))
    with pytest.raises(ShoalError, match=f"version {version}") as caught:
        await ChildInspector().inspect(path, digest, is_background=is_background)
    assert caught.value.code is Code.MODEL_INVALID
    answer_with(tmp_path, monkeypatch, inspect_child.PROFILE, nouns.to_wire(relu_profile()))
    assert await ChildInspector().inspect(path, digest, is_background=is_background) == relu_profile()


@pytest.mark.parametrize("code", [Code.INTERNAL, Code.NOT_LEADER, Code.STORE_FULL])
async def test_a_child_that_was_taken_over_blames_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: Code
) -> None:
    """Else it would be inspected again and again, and the models after it never."""
    path, digest = write_model(tmp_path)
    answer_with(tmp_path, monkeypatch, inspect_child.REFUSAL, nouns.to_wire(Refusal(code, "a", "b", "c")))
    error = await inspect_refusal(path, digest)
    assert error.code is Code.MODEL_INVALID
    assert code in error.refusal.found


def answer_with(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes, message: Message) -> None:
    """In place of the child a process answers that reads no model."""
    (folder / "answer").write_bytes(kind + message.SerializeToString())
    program = folder / "program"
    program.write_text(f"#!/bin/sh\nexec /bin/cat '{folder}/answer'\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))


async def test_a_caller_that_gives_up_leaves_no_child(tmp_path: Path) -> None:
    path, digest = write_model(tmp_path, slow())
    asked = asyncio.ensure_future(ChildInspector().inspect(path, digest))
    await until(lambda: psutil.Process().children(), 10, "a child that reads the model")
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert psutil.Process().children() == []


async def test_nobody_waits_behind_an_inspection_in_the_background(tmp_path: Path) -> None:
    """It runs with the lowest priority, beside as many others as there may be; another in the background waits."""
    (tmp_path / "slow").mkdir()
    path, digest = write_model(tmp_path / "slow", slow())
    quick_path, quick = write_model(tmp_path)
    inspector = ChildInspector(InspectionLimits(max_children=1))
    background = [asyncio.ensure_future(inspector.inspect(path, digest, is_background=True)) for _ in range(2)]
    try:
        await until(
            lambda: [each.nice() for each in psutil.Process().children()] == [19], 20, "one child of lowest priority"
        )
        assert await inspector.inspect(quick_path, quick) == profile_of(RELU, quick)
        assert not any(each.done() for each in background)
        assert [each.nice() for each in psutil.Process().children()] == [19]
    finally:
        for each in background:
            each.cancel()
        await asyncio.gather(*background, return_exceptions=True)


_CONFINED = """
import json, os, resource, socket, sys
from shoal.coordinator.blobs.inspect_child import InspectionRequest, Tensors, confine
confine(InspectionRequest.from_text(sys.argv[1]))
status = open("/proc/self/status").read()
found = {}
def attempt(name, act):
    try:
        act()
        found[name] = "done"
    except (OSError, MemoryError) as failed:
        found[name] = type(failed).__name__
def write():
    descriptor = os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY)
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.write(descriptor, b"x")
def files():
    for _ in range(64):
        os.open("/dev/null", os.O_RDONLY)
def reach():
    with socket.create_connection(("127.0.0.1", int(sys.argv[3])), timeout=5):
        pass
attempt("reach", reach)
attempt("write", write)
attempt("memory", lambda: bytearray(2**30))
attempt("files", files)
found["namespace"] = os.readlink("/proc/self/ns/net") != sys.argv[4]
found["cpu"] = resource.getrlimit(resource.RLIMIT_CPU)[0]
found["privileges"] = "NoNewPrivs:\\t1" not in status
print(json.dumps(found))
"""


async def test_a_child_that_was_taken_over_cannot_do_much(tmp_path: Path) -> None:
    """It writes no byte to a file, takes no more memory or files than given, and, in a namespace, reaches no port."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    errand = InspectionRequest("", 2**29, 3.0, 20.0, Rules())
    here = os.readlink("/proc/self/ns/net")  # noqa: PTH115
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _CONFINED, errand.to_text(), str(tmp_path / "file"), str(port), here),
        stdout=subprocess.PIPE,
    )
    said, _ = await child.communicate()
    server.close()
    found = json.loads(said)
    assert found["write"] in ("PermissionError", "OSError"), "no such file may be made, or nothing written to it"
    assert not (tmp_path / "file").exists() or (tmp_path / "file").stat().st_size == 0
    assert (found["memory"], found["files"], found["cpu"]) == ("MemoryError", "OSError", 3)
    assert not found["privileges"]
    assert (found["reach"] == "done") is not found["namespace"]
