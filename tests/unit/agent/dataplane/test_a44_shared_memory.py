"""A44: shared memory against real files: what is opened, what a request reads and writes, and what becomes of both
when the owner of a file changes it meanwhile."""

import asyncio
import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.attacks.frame_fuzzer import mutate
from shoal.agent.core.shared_memory import REGIONS_PER_TENANT, SharedMemoryGrant, SharedRegion
from shoal.agent.dataplane import shared_tensors
from shoal.agent.dataplane.auth import Caller
from shoal.agent.dataplane.memory import COPIES, DEFAULT_EXPECTED_BYTES, MemoryCharge, MessageMemory
from shoal.agent.dataplane.request import parse_request
from shoal.agent.dataplane.shared_memory import SharedMemory
from shoal.agent.dataplane.shared_regions import SharedRegions
from shoal.agent.dataplane.shared_tensors import PIECE, SharedTensors
from shoal.agent.dataplane.transport import MAX_MESSAGE
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role

GRANTS = (SharedMemoryGrant("acme", "acme-"), SharedMemoryGrant("shop", "shop-"))
SIZE = 3 * PIECE + 5
"""Bytes of the file: more than are copied at once."""
CONTENT = bytes(range(251)) * (SIZE // 251 + 1)
Request = oip.ModelInferRequest


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "acme-x"
    path.write_bytes(CONTENT[:SIZE])
    return path


@pytest.fixture
def regions(tmp_path: Path, file: Path) -> Iterator[SharedRegions]:
    made = SharedRegions(GRANTS, tmp_path)
    yield made
    for tenant in ("acme", "shop"):
        made.unregister(tenant)


def descriptors() -> int:
    gc.collect()  # what earlier tests left open does not end within this one
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def region(name: str = "r", key: str = "acme-x", offset: int = 0, size: int = SIZE) -> SharedRegion:
    return SharedRegion(name, key, offset, size)


def code_of_registration(regions: SharedRegions, asked: SharedRegion, tenant: str = "acme") -> Code:
    before = descriptors()
    with pytest.raises(ShoalError) as refused:
        regions.register(tenant, asked)
    assert descriptors() == before
    assert regions.of(tenant) == ()
    return refused.value.code


def reference(name: str, offset: int, size: int) -> dict[str, oip.InferParameter]:
    found = {
        "shared_memory_region": oip.InferParameter(string_param=name),
        "shared_memory_byte_size": oip.InferParameter(int64_param=size),
    }
    return {**found, "shared_memory_offset": oip.InferParameter(int64_param=offset)} if offset else found


def shared_input(name: str, size: int, offset: int = 0, of: str = "r") -> oip.ModelInferRequest.InferInputTensor:
    return Request.InferInputTensor(name=name, datatype="UINT8", shape=[size], parameters=reference(of, offset, size))


def plain_input(name: str, size: int) -> oip.ModelInferRequest.InferInputTensor:
    return Request.InferInputTensor(name=name, datatype="UINT8", shape=[size])


def shared_output(name: str, size: int, offset: int = 0) -> oip.ModelInferRequest.InferRequestedOutputTensor:
    return Request.InferRequestedOutputTensor(name=name, parameters=reference("r", offset, size))


def answer(**outputs: bytes) -> bytes:
    return oip.ModelInferResponse(
        model_name="m",
        outputs=[
            oip.ModelInferResponse.InferOutputTensor(name=name, datatype="UINT8", shape=[len(raw)])
            for name, raw in outputs.items()
        ],
        raw_output_contents=list(outputs.values()),
    ).SerializeToString()


async def read(regions: SharedRegions, message: oip.ModelInferRequest, tenant: str = "acme") -> oip.ModelInferRequest:
    with SharedTensors(regions, MessageMemory(), tenant) as tensors:
        return Request.FromString(await tensors.read(message.SerializeToString()))


async def code_of_read(regions: SharedRegions, message: oip.ModelInferRequest, tenant: str = "acme") -> Code:
    with pytest.raises(ShoalError) as refused:
        await read(regions, message, tenant)
    return refused.value.code


# registration


def test_a44_only_a_plain_file_is_opened(regions: SharedRegions, tmp_path: Path, file: Path) -> None:
    (tmp_path / "acme-link").symlink_to(file)
    (tmp_path / "acme-dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "acme-folder").mkdir()
    os.mkfifo(tmp_path / "acme-pipe")
    (tmp_path / "secret").write_bytes(CONTENT)
    os.link(tmp_path / "secret", tmp_path / "acme-stolen")
    for name in ("link", "dangling", "folder", "pipe", "stolen", "missing"):
        assert code_of_registration(regions, region(key=f"acme-{name}", size=1)) is Code.SHM_DENIED, name


def test_a44_another_tenants_file_is_not_opened(regions: SharedRegions, tmp_path: Path) -> None:
    (tmp_path / "shop-x").write_bytes(CONTENT)
    for key in ("shop-x", "/shop-x", f"../{tmp_path.name}/acme-x", str(tmp_path / "acme-x")):
        assert code_of_registration(regions, region(key=key, size=1)) is Code.SHM_DENIED
    assert code_of_registration(regions, region(size=1), "nobody") is Code.SHM_DENIED
    assert code_of_registration(SharedRegions((), tmp_path), region(size=1)) is Code.SHM_DENIED


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (0, 0),
        (0, SIZE + 1),
        (SIZE, 1),
        (1, SIZE),
        (2**64 - 1, 2),
        (2**63, 2**63),
        (0, 2**64 - 1),
        (2**64 - 1, 2**64 - 1),
    ],
)
def test_a44_a_region_lies_inside_its_file(regions: SharedRegions, offset: int, size: int) -> None:
    assert code_of_registration(regions, region(offset=offset, size=size)) is Code.SHM_DENIED


def test_a_file_is_opened_once_and_closed_with_its_region(regions: SharedRegions) -> None:
    before = descriptors()
    regions.register("acme", region("a"))
    regions.register("acme", region("b", "/acme-x", 7, 10))
    assert descriptors() == before + 2
    with pytest.raises(ShoalError) as again:
        regions.register("acme", region("a"))
    assert again.value.code is Code.CONFLICT
    assert {each.name for each in regions.of("acme")} == {"a", "b"}
    regions.unregister("acme", "a")
    regions.unregister("acme", "a")
    assert descriptors() == before + 1
    regions.unregister("acme")
    assert descriptors() == before


async def test_a44_a_region_in_use_stays_open_and_counted(regions: SharedRegions, file: Path) -> None:
    """Else its descriptor's number would be another file's, when the answer is written."""
    before = descriptors()
    held = []
    for _ in range(REGIONS_PER_TENANT):
        regions.register("acme", region())
        tensors = SharedTensors(regions, MessageMemory(), "acme")
        await tensors.read(Request(model_name="m", outputs=[shared_output("y", 4)]).SerializeToString())
        held.append(tensors)
        regions.unregister("acme", "r")
    assert descriptors() == before + REGIONS_PER_TENANT
    assert code_of_registration(regions, region()) is Code.SHM_DENIED
    await held[0].write(answer(y=b"wxyz"))
    assert file.read_bytes()[:4] == b"wxyz"
    for each in held:
        each.__exit__()
    assert descriptors() == before
    regions.register("acme", region())


# requests


async def test_inputs_become_bytes(regions: SharedRegions) -> None:
    regions.register("acme", region("r", offset=1, size=SIZE - 1))
    asked = Request(
        model_name="m",
        id="7",
        inputs=[shared_input("a", SIZE - 9, 8), plain_input("b", 3), shared_input("c", 2), plain_input("d", 0)],
        outputs=[Request.InferRequestedOutputTensor(name="y")],
        raw_input_contents=[b"xyz", b""],
    )
    asked.inputs[0].parameters["kept"].bool_param = True
    found = await read(regions, asked)
    assert list(found.raw_input_contents) == [CONTENT[9:SIZE], b"xyz", CONTENT[1:3], b""]
    assert [tensor.name for tensor in found.inputs] == ["a", "b", "c", "d"]
    assert [set(tensor.parameters) for tensor in found.inputs] == [{"kept"}, set(), set(), set()]
    assert (found.model_name, found.id, [each.name for each in found.outputs]) == ("m", "7", ["y"])


@given(offset=st.integers(-2, 12), size=st.integers(-2, 12), start=st.integers(0, 9), length=st.integers(1, 10))
async def test_a44_a_request_gets_what_its_region_has_and_no_other_byte(
    tmp_path_factory: pytest.TempPathFactory, offset: int, size: int, start: int, length: int
) -> None:
    folder = tmp_path_factory.mktemp("shm")
    (folder / "acme-x").write_bytes(bytes(range(10)))
    regions = SharedRegions(GRANTS, folder)
    if start + length > 10:
        with pytest.raises(ShoalError):
            regions.register("acme", region(offset=start, size=length))
        return
    regions.register("acme", region(offset=start, size=length))
    tensor = Request.InferInputTensor(name="x", datatype="UINT8", shape=[1], parameters=reference("r", offset, size))
    message = Request(model_name="m", inputs=[tensor])
    try:
        if offset < 0 or size < 0 or offset + size > length:
            assert await code_of_read(regions, message) is Code.SHM_DENIED
        else:
            found = await read(regions, message)
            assert list(found.raw_input_contents) == [bytes(range(start + offset, start + offset + size))]
    finally:
        regions.unregister("acme")


async def test_outputs_go_to_their_regions(regions: SharedRegions, file: Path) -> None:
    regions.register("acme", region("r", offset=10, size=SIZE - 10))
    large = bytes(reversed(CONTENT[: 2 * PIECE]))
    with SharedTensors(regions, MessageMemory(), "acme") as tensors:
        outputs = [
            shared_output("y", 5, 3),
            Request.InferRequestedOutputTensor(name="z"),
            shared_output("w", SIZE - 30, 20),
        ]
        await tensors.read(Request(model_name="m", outputs=outputs).SerializeToString())
        found = oip.ModelInferResponse.FromString(await tensors.write(answer(y=b"abc", z=b"plain", w=large)))
    assert list(found.raw_output_contents) == [b"", b"plain", b""]
    y, z, w = found.outputs
    assert y.parameters["shared_memory_region"].string_param == "r"
    assert y.parameters["shared_memory_byte_size"].int64_param == 3
    assert y.parameters["shared_memory_offset"].int64_param == 3
    assert not z.parameters
    assert (list(w.shape), w.parameters["shared_memory_byte_size"].int64_param) == ([len(large)], len(large))
    now = file.read_bytes()
    assert now == CONTENT[:13] + b"abc" + CONTENT[16:30] + large + CONTENT[30 + len(large) : SIZE]


async def test_a44_an_output_that_does_not_fit_is_not_written(regions: SharedRegions, file: Path) -> None:
    regions.register("acme", region())
    with SharedTensors(regions, MessageMemory(), "acme") as tensors:
        await tensors.read(Request(model_name="m", outputs=[shared_output("y", 5)]).SerializeToString())
        with pytest.raises(ShoalError) as refused:
            await tensors.write(answer(y=b"abcdef"))
    assert refused.value.code is Code.SHM_DENIED
    assert file.read_bytes() == CONTENT[:SIZE]


async def test_a44_a_file_that_was_shrunk_ends_in_a_refusal(regions: SharedRegions, file: Path) -> None:
    regions.register("acme", region())
    asked = Request(model_name="m", inputs=[shared_input("x", SIZE)])
    for size in (SIZE - 1, PIECE, 0):
        os.truncate(file, size)
        assert await code_of_read(regions, asked) is Code.SHM_DENIED
    os.truncate(file, SIZE)
    with SharedTensors(regions, MessageMemory(), "acme") as tensors:
        await tensors.read(Request(model_name="m", outputs=[shared_output("y", 8, SIZE - 8)]).SerializeToString())
        os.truncate(file, SIZE - 1)
        with pytest.raises(ShoalError) as refused:
            await tensors.write(answer(y=b"12345678"))
    assert refused.value.code is Code.SHM_DENIED
    assert file.stat().st_size == SIZE - 1, "it was not made longer"


async def test_a44_a_name_that_was_given_to_another_file_means_nothing(regions: SharedRegions, file: Path) -> None:
    regions.register("acme", region(size=4))
    file.unlink()
    file.symlink_to("/etc/hostname")
    found = await read(regions, Request(model_name="m", inputs=[shared_input("x", 4)]))
    assert list(found.raw_input_contents) == [CONTENT[:4]]


async def test_a44_another_tenants_region_is_as_one_that_does_not_exist(regions: SharedRegions) -> None:
    regions.register("acme", region("secret-name", size=4))
    texts = set()
    for name in ("secret-name", "no-such-name"):
        with pytest.raises(ShoalError) as refused:
            await read(regions, Request(model_name="m", inputs=[shared_input("x", 4, of=name)]), "shop")
        texts.add(str(refused.value).replace(name, "NAME"))
    assert len(texts) == 1
    assert regions.of("shop") == ()


def parameters(**given: object) -> dict[str, oip.InferParameter]:
    kinds = {str: "string_param", int: "int64_param", bool: "bool_param", float: "double_param"}
    return {
        f"shared_memory_{name}": oip.InferParameter(**{kinds[type(value)]: value})  # type: ignore[arg-type]
        for name, value in given.items()
    }


@pytest.mark.parametrize(
    "wrong",
    [
        parameters(region="r"),
        parameters(byte_size=4),
        parameters(offset=4),
        parameters(region=1, byte_size=4),
        parameters(region="r", byte_size="4"),
        parameters(region="r", byte_size=True),
        parameters(region="r", byte_size=4.0),
        parameters(region="r", byte_size=4, offset="0"),
        parameters(region="r", byte_size=4, kind="cuda"),
        {"shared_memory_region": oip.InferParameter(), "shared_memory_byte_size": oip.InferParameter(int64_param=1)},
    ],
)
async def test_a44_references_that_are_none(regions: SharedRegions, wrong: dict[str, oip.InferParameter]) -> None:
    regions.register("acme", region())
    tensor = Request.InferInputTensor(name="x", datatype="UINT8", shape=[4], parameters=wrong)
    output = Request.InferRequestedOutputTensor(name="y", parameters=wrong)
    for message in (Request(model_name="m", inputs=[tensor]), Request(model_name="m", outputs=[output])):
        assert await code_of_read(regions, message) is Code.INVALID_ARGUMENT


async def test_contents_belong_to_the_inputs_that_are_not_shared(regions: SharedRegions) -> None:
    regions.register("acme", region())
    shared, plain = shared_input("x", 4), plain_input("y", 1)
    typed = Request.InferInputTensor(
        name="y", datatype="UINT8", shape=[1], contents=oip.InferTensorContents(uint_contents=[1])
    )
    for inputs, raws in (
        ([shared], [b"more"]),
        ([shared, plain], []),
        ([shared, plain], [b"1", b"2"]),
        ([shared, typed], []),
    ):
        message = Request(model_name="m", inputs=inputs, raw_input_contents=raws)
        assert await code_of_read(regions, message) is Code.INVALID_ARGUMENT


async def test_what_a_request_brings_is_charged_and_bounded(
    regions: SharedRegions, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(file, MAX_MESSAGE)
    regions.register("acme", region(size=MAX_MESSAGE))
    memory = MessageMemory(budget=COPIES * MAX_MESSAGE)
    message = Request(model_name="m", inputs=[shared_input("x", 5 * PIECE)]).SerializeToString()
    with SharedTensors(regions, memory, "acme") as tensors:
        whole = await tensors.read(message)
        assert memory.held_bytes >= COPIES * 5 * PIECE
        assert len(whole) * COPIES <= memory.held_bytes + 32
        large = Request(model_name="m", inputs=[shared_input("x", 40 * PIECE)]).SerializeToString()
        monkeypatch.setattr(shared_tensors, "ROOM_WAIT_S", 0.01)
        with pytest.raises(ShoalError) as full, SharedTensors(regions, memory, "acme") as other:
            await other.read(large)
        assert full.value.code is Code.OVERLOADED
        monkeypatch.setattr(shared_tensors, "ROOM_WAIT_S", 20.0)
        later = SharedTensors(regions, memory, "acme")
        waiting = asyncio.create_task(later.read(large))
        done, _ = await asyncio.wait((waiting,), timeout=0.05)
        assert not done
        tensors.__exit__()
        with later:
            assert len(await waiting) > 40 * PIECE
    assert memory.held_bytes == 0
    half = MAX_MESSAGE // 2 + 1
    twice = Request(model_name="m", inputs=[shared_input("x", half), shared_input("y", half)])
    assert await code_of_read(regions, twice) is Code.TOO_LARGE


async def test_a_request_that_fits_alone_fits_from_shared_memory(
    regions: SharedRegions, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside its own small message, which is charged, and a waiting one."""
    os.truncate(file, MAX_MESSAGE)
    regions.register("acme", region(size=MAX_MESSAGE))
    memory = MessageMemory(budget=COPIES * MAX_MESSAGE)
    monkeypatch.setattr(shared_tensors, "ROOM_WAIT_S", 20.0)
    message = Request(model_name="m", inputs=[shared_input("x", 40 * PIECE)]).SerializeToString()

    async def ask(charge: MemoryCharge) -> int:
        with charge, SharedTensors(regions, memory, "acme") as tensors:
            return len(await tensors.read(message))

    charges = [memory.hold("acme", len(message)) for _ in range(2)]
    done, waiting = await asyncio.wait([asyncio.create_task(ask(each)) for each in charges], timeout=10.0)
    assert not waiting
    assert all(each.result() > 40 * PIECE for each in done)
    with memory.hold("acme", DEFAULT_EXPECTED_BYTES + 1):
        assert not memory.has_room("acme", 40 * PIECE), "what is not small is in the way"
    assert memory.held_bytes == 0


@pytest.mark.parametrize("count", [1, 40])
async def test_other_tasks_have_their_turn_after_each_piece(regions: SharedRegions, count: int) -> None:
    """Whether few tensors are large or many are small."""
    regions.register("acme", region())
    size = SIZE // count
    asked = Request(
        model_name="m",
        inputs=[shared_input(f"x{number}", size) for number in range(count)],
        outputs=[shared_output(f"y{number}", size) for number in range(count)],
    )
    loop, turns, is_counting = asyncio.get_running_loop(), 0, True

    def count_turn() -> None:
        nonlocal turns
        turns += 1
        if is_counting:
            loop.call_soon(count_turn)

    loop.call_soon(count_turn)
    with SharedTensors(regions, MessageMemory(), "acme") as tensors:
        await tensors.read(asked.SerializeToString())
        read_turns = turns
        await tensors.write(answer(**{f"y{number}": bytes(size) for number in range(count)}))
    is_counting = False
    assert min(read_turns, turns - read_turns) >= 2


async def test_a_refused_request_holds_nothing(regions: SharedRegions, file: Path) -> None:
    before, memory = descriptors(), MessageMemory()
    regions.register("acme", region())
    os.truncate(file, 2 * PIECE)
    with pytest.raises(ShoalError), SharedTensors(regions, memory, "acme") as tensors:
        await tensors.read(Request(model_name="m", inputs=[shared_input("x", SIZE)]).SerializeToString())
    regions.unregister("acme")
    assert (memory.held_bytes, descriptors()) == (0, before)


async def test_a44_a_scrambled_request_is_refused_or_holds_bytes(regions: SharedRegions) -> None:
    regions.register("acme", region("r", size=64))
    sound = Request(
        model_name="m",
        id="7",
        inputs=[shared_input("a", 16, 8), plain_input("b", 3), shared_input("c", 2)],
        outputs=[shared_output("y", 8, 4)],
        raw_input_contents=[b"xyz"],
    ).SerializeToString(deterministic=True)
    rng, outcomes = np.random.default_rng(44), Counter[str]()
    for _ in range(20_000):
        scrambled = mutate(sound, rng)
        if rng.random() < 0.75:  # that is hardly ever a message; with one byte changed it often is
            at = int(rng.integers(len(sound)))
            scrambled = sound[:at] + rng.bytes(1) + sound[at + 1 :]
        try:
            if not parse_request(scrambled).uses_shared_memory:
                continue
            with SharedTensors(regions, MessageMemory(), "acme") as tensors:
                whole = await tensors.read(scrambled)
        except ShoalError as error:
            outcomes[error.code] += 1
            continue
        assert not parse_request(whole).uses_shared_memory
        outcomes["read"] += 1
    assert {"read", Code.SHM_DENIED, Code.NOT_FOUND, Code.INVALID_ARGUMENT} <= outcomes.keys(), outcomes


# who calls


@pytest.mark.parametrize(
    "caller",
    [
        Caller("acme", Role.AGENT, "n2", 1, "n2"),
        Caller("acme", Role.GATEWAY, "g1", 0, "g1", region="east"),
        Caller("acme", Role.AGENT, "n2", 0, "n2"),
        Caller("other", Role.TENANT, "other", 0, "n1"),
    ],
)
def test_a44_it_is_of_the_front_that_a_client_of_an_allowed_tenant_called(
    regions: SharedRegions, caller: Caller
) -> None:
    memory = SharedMemory(regions)
    asked = oip.SystemSharedMemoryRegisterRequest(name="r", key="acme-x", byte_size=4)
    for call in (
        lambda: memory.register(caller, asked),
        lambda: memory.status(caller, ""),
        lambda: memory.unregister(caller, ""),
        lambda: memory.check(caller),
    ):
        with pytest.raises(ShoalError) as refused:
            call()
        assert refused.value.code is Code.SHM_DENIED
    memory.register(Caller("acme", Role.TENANT, "acme", 0, "n1"), asked)
    (found,) = memory.status(Caller("acme", Role.OPERATOR, "root", 0, "n1"), "").regions.values()
    assert (found.name, found.key, found.offset, found.byte_size) == ("r", "acme-x", 0, 4)
