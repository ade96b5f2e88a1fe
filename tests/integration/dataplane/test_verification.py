"""A new replica compared with the one that it takes over from: real fronts and workers of two nodes of a region."""

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import onnxruntime
import pytest
import pytest_asyncio

from harness.builders.agent_values import verification
from harness.clients.oip import Tensor
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority, CertificateFiles
from harness.models import engine_cases
from shoal.agent.clock import SystemClock
from shoal.agent.ports import ReferenceRecording, VerificationSource
from shoal.coordinator.core.graph import profile_of
from shoal.coordinator.core.prediction.demand import work_of
from shoal.types.assignment import Work
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.migration import Against, InputsFrom, Recording, Verdict, Verification, Verifier
from shoal.types.profile import ModelProfile
from shoal.types.tolerance import default
from shoal.types.workload import WorkloadKey
from shoal.v1 import witness_pb2
from shoal.wire import grpcio_status, limits
from shoal.wire.certificates import identity_of_pem

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY = WorkloadKey("acme", "dense")
SOURCE, TARGET = "a-source", "a-target"
TEXT, FILES = "a-text", "a-files"
"""Sources of the real models: PP-OCR's recogniser of text, and magika, which tells types of files."""
WORK = Work(shapes={"x": (4, 16)})
NAMED = (Verifier("m-1", "new"),)
RIGHT = engine_cases.dense()


@dataclass
class Pair:
    """Node `old` serves the right model; node `new` is where another is to be compared with it."""

    folder: Path
    authority: Authority
    old: DataPlaneNode
    new: DataPlaneNode
    loaded: list[str] = field(default_factory=list)

    async def configure_source(self, *verifiers: Verifier, capture: int = 0, revoked: tuple[str, ...] = ()) -> None:
        witnesses = (VerificationSource(SOURCE, verifiers, capture),) if verifiers or capture else ()
        await self.old.configure(witnesses=witnesses, revoked=revoked)

    def make_verification(self, **changes: Any) -> Verification:
        address = f"127.0.0.1:{self.old.front.config.port}"
        return replace(verification(source=SOURCE, source_node="old", source_address=address), **changes)

    async def load(self, model: bytes, **terms: Any) -> str:
        name = f"{TARGET}-{len(self.loaded)}"
        path = self.folder / name
        path.write_bytes(model)
        await self.new.load(name, KEY, path, **{"work": WORK, **terms})
        self.loaded.append(name)
        return name

    async def verify(self, model: bytes = RIGHT, work: Work = WORK, file: str = "", **changes: Any) -> Verdict:
        """Of a fresh worker with this model. file: with samples. Raises ShoalError."""
        name = await self.load(model, work=work)
        try:
            return await self.new.front.verify(self.new.local_worker(name), self.make_verification(**changes), file)
        finally:
            assert self.new.workers is not None
            await self.new.workers.stop(name)
            self.new.models.pop(name, None)

    async def call(self, files: CertificateFiles, method: str, message: Any) -> bytes:
        """One call to the old node's front with those files. Raises grpc.aio.AioRpcError."""
        credentials = grpc.ssl_channel_credentials(
            self.old.files.authority.read_bytes(), files.key.read_bytes(), files.certificate.read_bytes()
        )
        address = f"127.0.0.1:{self.old.front.config.port}"
        async with grpc.aio.secure_channel(address, credentials, limits.channel_options(2**20)) as channel:
            call = channel.unary_unary(f"/shoal.v1.Witness/{method}", None, None)
            return bytes(await call(message.SerializeToString(), timeout=5))

    async def denied_codes(self, files: CertificateFiles, migration: str = "m-1", assignment: str = SOURCE) -> set[str]:
        """Codes of what these files may not see: both methods."""
        found = set()
        for method, message in (
            ("Captured", witness_pb2.CapturedRequest(migration=migration, assignment=assignment, count=8)),
            ("Answer", witness_pb2.AnswerRequest(migration=migration, assignment=assignment, request=b"")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await self.call(files, method, message)
            found.add(str(grpcio_status.refusal_of(caught.value).code))
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("verification")
    authority = Authority(folder / "ca", "eu", SystemClock().wall())
    old, new = (DataPlaneNode(name, authority, folder / name) for name in ("old", "new"))
    model = folder / "right.onnx"
    model.write_bytes(RIGHT)
    try:
        await asyncio.gather(old.start(), new.start())
        await old.load(SOURCE, KEY, model, work=WORK)
        made = Pair(folder, authority, old, new)
        await new.configure()
        await made.configure_source(*NAMED)
        yield made
    finally:
        await asyncio.gather(old.stop(), new.stop())


async def test_the_same_model_passes_and_the_source_counts_none_of_it(pair: Pair) -> None:
    await pair.configure_source(*NAMED)
    verdict = await pair.verify()
    assert verdict.passed, verdict.reason
    assert (verdict.samples, verdict.inputs, verdict.migration) == (8, InputsFrom.GENERATED, "m-1")
    assert {(drift.output, str(drift.metric)) for drift in verdict.drifts} == {("y", "max_rel"), ("y", "cosine")}
    assert len(verdict.inputs_sha256) == 64
    again = await pair.verify()
    assert again.inputs_sha256 == verdict.inputs_sha256, "the same migration draws the same"
    assert pair.old.workers is not None
    assert [served for each in await pair.old.workers.stats() for served in each.served] == []


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (engine_cases.dense(noise=0.05), "y: max_rel"),
        (engine_cases.dense(seed=2), "best: "),
        (engine_cases.dense(kind="FP16"), "y: max_rel"),
        (engine_cases.dense(activation="Abs"), "y: max_rel"),
        (engine_cases.add_one(), "it answers what the other refuses"),
    ],
    ids=["noise", "weights", "precision", "operator", "signature"],
)
async def test_what_answers_otherwise_is_refused(pair: Pair, wrong: bytes, reason: str) -> None:
    await pair.configure_source(*NAMED)
    tight = tuple(replace(each, bound=1e-4) if each.bound < 0.5 else each for each in verification().tolerances)
    verdict = await pair.verify(wrong, tolerances=tight)
    assert (verdict.passed, verdict.code) == (False, Code.VERIFY_FAILED)
    assert reason in verdict.reason


async def test_captured_inputs_are_used_with_consent_and_forgotten_without(pair: Pair) -> None:
    client = pair.old.grpc_client(pair.authority.issue(Role.TENANT, KEY.tenant))
    rows = [np.full((2, 16), number, np.float32).tobytes() for number in range(1, 6)]

    async def ask() -> None:
        for row in rows:
            await client.infer("dense", [Tensor("x", "FP32", (2, 16), row)], request_id="secret-name")

    async def fetch_captured() -> list[bytes]:
        message = witness_pb2.CapturedRequest(migration="m-1", assignment=SOURCE, count=9)
        return list(witness_pb2.CapturedReply.FromString(await pair.call(pair.new.files, "Captured", message)).requests)

    try:
        await pair.configure_source(*NAMED)
        await ask()
        assert await fetch_captured() == [], "without consent nothing is kept"
        await pair.configure_source(*NAMED, capture=3)
        assert await fetch_captured() == [], "nor what came before the consent"
        await ask()
        kept = await fetch_captured()
        assert len(kept) == 3
        assert all(row in one for row, one in zip(rows[-3:], kept, strict=True)), "the newest, in their order"
        assert not any(b"secret-name" in one or b"dense" in one for one in kept)
        verdict = await pair.verify(inputs=InputsFrom.CAPTURED, samples=3)
        assert (verdict.passed, verdict.inputs, verdict.samples) == (True, InputsFrom.CAPTURED, 3)
        verdict = await pair.verify(inputs=InputsFrom.CAPTURED, samples=8)
        assert (verdict.passed, verdict.inputs) == (True, InputsFrom.GENERATED), "some had to be made up"
        await pair.configure_source(*NAMED)
        assert await fetch_captured() == []
        await pair.configure_source(*NAMED, capture=3)
        assert await fetch_captured() == [], "gone with the consent"
    finally:
        await client.close()


async def test_the_workloads_own_samples_are_used_and_their_answers_against_a_reference(pair: Pair) -> None:
    await pair.configure_source(*NAMED)
    x = np.random.default_rng(3).standard_normal((8, 2, 16)).astype(np.float32)
    session = onnxruntime.InferenceSession(RIGHT, providers=["CPUExecutionProvider"])
    answers = [session.run(None, {"x": one}) for one in x]
    y, best = (np.stack([np.asarray(answer[index]) for answer in answers]) for index in range(2))
    np.savez(pair.folder / "inputs.npz", x=x)
    np.savez(pair.folder / "whole.npz", x=x, y=y, best=best)
    np.savez(pair.folder / "wrong.npz", x=x, y=-y, best=best)

    def of(name: str) -> dict[str, Any]:
        path = pair.folder / f"{name}.npz"
        return {"file": str(path), "inputs": InputsFrom.SAMPLES, "pack": engine_cases.digest(path.read_bytes())}

    for name, against, passed in (
        ("inputs", Against.SOURCE, True),
        ("whole", Against.REFERENCE, True),
        ("wrong", Against.REFERENCE, False),
        ("wrong", Against.SOURCE, True),
        ("inputs", Against.REFERENCE, False),
    ):
        verdict = await pair.verify(against=against, **of(name))
        assert (verdict.passed, verdict.inputs) == (
            passed,
            InputsFrom.SAMPLES if verdict.samples else InputsFrom.GENERATED,
        ), (name, against, verdict)
    junk = pair.folder / "junk.npz"
    junk.write_bytes(b"PK no samples")
    with pytest.raises(ShoalError) as caught:
        await pair.verify(**of("junk"))
    assert caught.value.code is Code.MODEL_INVALID


async def test_what_one_replica_answered_is_what_others_are_judged_by(pair: Pair) -> None:
    async def record_model(model: bytes, file: str = "", work: Work = WORK, **changes: Any) -> ReferenceRecording:
        name = await pair.load(model, work=work)
        asked = pair.make_verification(against=Against.REFERENCE, recording=Recording.HERE, **changes)
        try:
            return await pair.new.front.record(pair.new.local_worker(name), asked, file)
        finally:
            assert pair.new.workers is not None
            await pair.new.workers.stop(name)
            pair.new.models.pop(name, None)

    first, again = await record_model(RIGHT), await record_model(RIGHT, migration="m-2")
    assert (first.verdict.passed, first.verdict.recorded, first.verdict.samples) == (True, True, 8), first.verdict
    assert first.content == again.content, "the same model draws the same inputs, whoever asks"
    path = pair.folder / "recorded.npz"
    path.write_bytes(first.content)
    assert first.verdict.pack == engine_cases.digest(first.content)
    terms: dict[str, Any] = {"file": str(path), "pack": first.verdict.pack, "inputs": InputsFrom.SAMPLES}
    for model, passed in ((RIGHT, True), (engine_cases.dense(noise=0.05), False)):
        verdict = await pair.verify(model, against=Against.REFERENCE, **terms)
        assert (verdict.passed, verdict.pack, verdict.recorded) == (passed, first.verdict.pack, False), verdict
    inputs = np.load(path)
    np.savez(pair.folder / "asked.npz", x=2 * inputs["x"])
    asked = pair.folder / "asked.npz"
    own = await record_model(
        RIGHT, str(asked), inputs=InputsFrom.SAMPLES, pack=engine_cases.digest(asked.read_bytes()), migration="m-3"
    )
    assert (own.verdict.passed, own.verdict.inputs) == (True, InputsFrom.SAMPLES)
    assert np.array_equal(np.load(io.BytesIO(own.content))["x"], 2 * inputs["x"])
    uneven = await record_model(engine_cases.fill(), work=Work(shapes={"x": (1,)}))
    assert (uneven.content, uneven.verdict.code) == (b"", Code.VERIFY_IMPOSSIBLE)
    assert "shapes" in uneven.verdict.reason
    large = await record_model(engine_cases.heavy(10), work=Work(shapes={"x": (1,)}))
    assert (large.content, large.verdict.code) == (b"", Code.VERIFY_IMPOSSIBLE)
    assert "take more than" in large.verdict.reason


async def test_only_who_the_region_named_is_answered(pair: Pair) -> None:
    await pair.configure_source(*NAMED, capture=8)
    issue = pair.authority.issue
    for role, name in ((Role.AGENT, "rogue"), (Role.AGENT, "old")):
        assert await pair.denied_codes(issue(role, name)) == {"ROLE_DENIED"}
    for role in (Role.TENANT, Role.GATEWAY, Role.OPERATOR, Role.COORDINATOR):
        assert await pair.denied_codes(issue(role, "new")) == {"ROLE_DENIED"}, role
    assert await pair.denied_codes(pair.new.files, migration="m-2") == {"ROLE_DENIED"}
    assert await pair.denied_codes(pair.new.files, assignment="a-other") == {"ROLE_DENIED"}
    await pair.configure_source(capture=8)
    assert await pair.denied_codes(pair.new.files) == {"ROLE_DENIED"}, "its move is over"


async def test_a_revoked_verifier_is_refused(pair: Pair) -> None:
    serial = identity_of_pem(pair.new.files.certificate.read_bytes()).serial
    await pair.configure_source(*NAMED, revoked=(serial,))
    assert await pair.denied_codes(pair.new.files) == {"CERT_REVOKED"}


async def test_without_an_answer_there_is_no_verdict(pair: Pair) -> None:
    await pair.configure_source()
    with pytest.raises(ShoalError) as caught:
        await pair.verify()
    assert caught.value.code is Code.ROLE_DENIED
    await pair.configure_source(*NAMED)
    with pytest.raises(ShoalError) as caught:
        await pair.verify(source_address="127.0.0.1:1")
    assert caught.value.code is Code.REPLICA_UNREACHABLE
    with pytest.raises(ShoalError) as caught:
        await pair.verify(source_node="another")
    assert caught.value.code is Code.REPLICA_UNREACHABLE, "who answers there must prove to be the node that is named"


def work_of_model(content: bytes) -> Work:
    profile = profile_of(content, engine_cases.digest(content))
    assert isinstance(profile, ModelProfile), profile
    return work_of(profile)


@pytest.mark.long
async def test_twenty_targets_that_are_wrong_on_purpose_are_refused_and_right_ones_are_not(
    pair: Pair, tmp_path: Path
) -> None:
    """With the tolerances of a move that keeps its precision; each target and each source is a worker of its own."""
    refused: dict[str, str] = {}
    readings: dict[str, float] = {}
    witnesses, moves = [], ("m-1", "m-2", "m-3")
    for name, path, wrongs in (
        (TEXT, engine_cases.recogniser(), engine_cases.wrong_recognisers),
        (FILES, engine_cases.magika(), engine_cases.wrong_classifiers),
    ):
        right = path.read_bytes()
        work = work_of_model(right)
        source = pair.folder / name
        source.write_bytes(right)
        await pair.old.load(name, WorkloadKey("acme", name), source, work=work)
        witnesses.append(VerificationSource(name, tuple(Verifier(migration, "new") for migration in moves)))
        await pair.old.configure(witnesses=tuple(witnesses))
        terms: dict[str, Any] = {"source": name, "tolerances": default("fp32", "fp32"), "work": work}
        for migration in moves:  # other inputs each time
            verdict = await pair.verify(right, migration=migration, **terms)
            assert verdict.passed, verdict.reason
        for what, wrong in wrongs(right, tmp_path):
            verdict = await pair.verify(wrong, **terms)
            assert verdict.code is Code.VERIFY_FAILED, f"{name}, {what}: {verdict}"
            refused[f"{name}: {what}"] = verdict.reason
            readings[f"{name}: {what}"] = max(drift.worst for drift in verdict.drifts if drift.metric == "max_rel")
    for what, drift in readings.items():
        print(f"{drift:9.4f}  {what}  {refused[what]}")
    assert len(refused) == 20
    assert not pair.old.exits, "the source is untouched"
    assert pair.old.workers is not None
    assert [
        served for each in await pair.old.workers.stats() for served in each.served if each.assignment != SOURCE
    ] == []
