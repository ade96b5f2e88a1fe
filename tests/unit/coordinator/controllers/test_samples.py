"""A workload's samples in a region: pushed for its model, pinned on apply, told to what verifies, kept while in use."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from harness.fakes.region import DIGEST, FakeAgent, RegionFixture
from shoal.coordinator.api.views import workload_views
from shoal.coordinator.controllers.workloads.recordings import provenance_of
from shoal.coordinator.core.catalog.model import DocumentKey, Provenance
from shoal.coordinator.core.placement.model import Aim
from shoal.coordinator.ports import Transaction
from shoal.types.assignment import Phase
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.migration import Against, InputsFrom, PackRef, Recording, Verification
from shoal.types.units import Bytes
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("default", "reader")
PACK = "sha256:" + "c" * 64
OTHER = "sha256:" + "d" * 64


def documents(verify: str, samples: str = "./reader.npz") -> list[tuple[str, str]]:
    return [
        (
            "w.yaml",
            f"""apiVersion: shoal/v1
kind: Policy
metadata: {{name: fast}}
spec: {{optimize: {{latency: 1.0}}, migration: {{verify: {{{verify}}}}}}}
---
apiVersion: shoal/v1
kind: Workload
metadata: {{name: reader}}
spec: {{model: {{source: ocr{f", samples: {samples}" if samples else ""}}}, policy: fast}}
""",
        )
    ]


async def content() -> AsyncIterator[bytes]:
    yield b"x" * 1000


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path)
    await opened.push()
    yield opened
    await opened.store.close()


async def push(world: RegionFixture) -> PackRef:
    found = await world.region.models.receive_pack("ocr", Bytes(1000), PACK, content())
    await world.region.models.keep_pack(found, "ocr", actor="test")
    return found


async def codes(world: RegionFixture, texts: list[tuple[str, str]], digests: dict[str, str]) -> list[Code]:
    applied = await world.region.documents.apply(texts, digests, "", "test")
    return [problem.refusal.code for problem in applied.plan_result.problems]


async def serve(world: RegionFixture, *agents: FakeAgent) -> None:
    for agent in agents:
        await agent.apply_desired()
    world.clock.advance(0.5)
    for _ in range(3):
        await world.step()


async def test_samples_are_pinned_and_told_to_what_verifies_a_move(world: RegionFixture, tmp_path: Path) -> None:
    texts = documents("inputs: samples, samples: 12")
    assert await codes(world, texts, {}) == [Code.MODEL_UNKNOWN], "they were not pushed"
    pack = await push(world)
    assert await world.region.models.keep_pack(pack, "ocr", actor="test"), "known"
    assert await codes(world, texts, {"./reader.npz": PACK}) == []
    agents = [FakeAgent(world, "edge-1"), FakeAgent(world, "edge-2")]
    for agent in agents:
        await agent.connect()
    await world.step()
    await serve(world, *agents)
    (source,) = [agent for agent in agents if world.region.workloads.desired[agent.name].assignments]
    (target,) = [agent for agent in agents if agent is not source]
    begun = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    await world.step()
    await world.step()
    (asked,) = [each.verification for each in world.region.workloads.desired[target.name].assignments]
    assert asked is not None
    assert (asked.migration, asked.against, asked.inputs) == (begun.id, Against.SOURCE, InputsFrom.SAMPLES)
    assert (asked.pack, asked.pack_bytes, asked.samples) == (PACK, 1000, 12)
    size, _ = await world.region.models.fetch(PACK, 0)
    assert size == 1000
    with pytest.raises(ShoalError) as caught:
        await world.region.models.remove(PACK, "test")
    assert caught.value.code is Code.IN_USE
    await world.store.close()
    again = await RegionFixture.open(tmp_path, world)
    assert again.region.workloads.intents[0].migration.pack == pack
    await again.store.close()


async def test_samples_go_with_their_model(world: RegionFixture) -> None:
    await push(world)
    await world.region.models.remove("ocr", "test")
    assert not world.region.workloads.catalog.packs
    assert PACK not in world.models.kept


async def test_a_reference_is_what_samples_answer_and_counts_for_every_new_replica(world: RegionFixture) -> None:
    texts = documents("against: reference, samples: 64")
    await push(world)
    assert await codes(world, texts, {"./reader.npz": PACK}) == []
    agent = FakeAgent(world, "edge-1")
    await agent.connect()
    await world.step()
    (one,) = world.region.workloads.desired["edge-1"].assignments
    asked = one.verification
    assert asked is not None
    assert (asked.against, asked.inputs, asked.pack) == (Against.REFERENCE, InputsFrom.SAMPLES, PACK)
    assert (asked.samples, asked.source) == (16, ""), "as many as there are"
    await serve(world, agent)
    (one,) = world.region.workloads.desired["edge-1"].assignments
    assert one.verification is None, "it has shown it"
    assert agent.observed[0].phase is Phase.READY


async def test_what_was_refused_leaves_no_bytes(world: RegionFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse_pack(*_: object) -> PackRef:
        raise refuse(Code.MODEL_INVALID)

    monkeypatch.setattr(world.models, "inspect_pack", refuse_pack)
    with pytest.raises(ShoalError):
        await push(world)
    assert PACK not in world.models.kept


async def test_samples_stay_while_one_of_their_models_does_and_go_with_the_last(
    world: RegionFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the very transaction that the model goes with."""
    models, other = world.region.models, "sha256:" + "b" * 64
    await models.push("other", Bytes(1000), other, content(), actor="test")
    await push(world)
    found = await models.receive_pack("other", Bytes(1000), PACK, content())
    assert not await models.keep_pack(found, "other", actor="test")
    await models.remove("other", "test")
    assert set(world.region.workloads.catalog.packs[PACK].read_for) == {DIGEST}
    assert PACK in world.models.kept
    commits, commit = list[Transaction](), world.store.commit

    async def record_commit(transaction: Transaction) -> int:
        commits.append(transaction)
        return await commit(transaction)

    monkeypatch.setattr(world.store, "commit", record_commit)
    await models.remove("ocr", "test")
    assert len(commits) == 1
    assert not world.region.workloads.catalog.packs
    assert PACK not in world.models.kept
    await world.store.close()
    again = await RegionFixture.open(tmp_path, world)
    assert not again.region.workloads.catalog.packs
    await again.store.close()


async def test_a_push_that_fails_takes_no_bytes_from_one_that_was_inspected(world: RegionFixture) -> None:
    """Two push the same file; the second one is cut off or refused between the first one's two halves."""
    models = world.region.models
    first = await models.receive_pack("ocr", Bytes(1000), PACK, content())
    world.models.kept.discard(PACK)  # what the second one's refusal does
    with pytest.raises(ShoalError) as caught:
        await models.keep_pack(first, "ocr", actor="test")
    assert caught.value.code is Code.MODEL_UNKNOWN
    assert not world.region.workloads.catalog.packs, "nothing is known of which the bytes are gone"
    other = "sha256:" + "b" * 64
    profile = await models.receive("other", Bytes(1000), other, content())
    world.models.kept.discard(other)
    with pytest.raises(ShoalError) as caught:
        await models.keep(profile, "other", other, actor="test")
    assert caught.value.code is Code.MODEL_UNKNOWN
    assert other not in world.region.workloads.catalog.models


async def test_a_refused_push_takes_no_bytes_while_another_is_being_recorded(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = world.region.models
    first = await models.receive_pack("ocr", Bytes(1000), PACK, content())

    turned = asyncio.Event()

    async def refuse_pack(*_: object) -> PackRef:
        turned.set()
        raise refuse(Code.MODEL_INVALID)

    second = models.receive_pack("ocr", Bytes(1000), PACK, content())
    pushing, commit = list[asyncio.Task[PackRef]](), world.store.commit

    async def meanwhile(transaction: Transaction) -> int:
        pushing.append(asyncio.create_task(second))
        await turned.wait()
        return await commit(transaction)

    monkeypatch.setattr(world.models, "inspect_pack", refuse_pack)
    monkeypatch.setattr(world.store, "commit", meanwhile)
    await models.keep_pack(first, "ocr", actor="test")
    with pytest.raises(ShoalError):
        await pushing[0]
    assert PACK in world.region.workloads.catalog.packs
    assert PACK in world.models.kept


def verification_of(world: RegionFixture, node: str) -> Verification:
    (one,) = world.region.workloads.desired[node].assignments
    assert one.verification is not None
    return one.verification


async def warm(world: RegionFixture) -> FakeAgent:
    """A node with the workload's only replica, which is asked to record."""
    assert await codes(world, documents("against: reference", ""), {}) == []
    agent = FakeAgent(world, "edge-1")
    await agent.connect()
    await world.step()
    assert verification_of(world, "edge-1").recording is Recording.AWAITED
    await agent.apply_desired()
    agent.observed = tuple(replace(each, phase=Phase.VERIFYING, verdict=None) for each in agent.observed)
    await agent.report()
    await world.step()
    assert verification_of(world, "edge-1").recording is Recording.HERE
    return agent


async def record(world: RegionFixture, digest: str, by: Provenance) -> bool:
    pack = await world.region.models.receive_pack(DIGEST, Bytes(1000), digest, content())
    return await world.region.models.keep_pack(pack, DIGEST, actor="edge-1", by=by)


async def test_what_the_first_replica_answered_is_kept_with_its_origin_and_judges_the_others(
    world: RegionFixture, tmp_path: Path
) -> None:
    agent = await warm(world)
    asked, desired = world.region.workloads, world.region.workloads.desired["edge-1"]
    (one,) = desired.assignments
    for node, assignment, model in (
        ("edge-2", one.id, DIGEST), ("edge-1", "a-other", DIGEST), ("edge-1", one.id, PACK)
    ):  # fmt: skip
        with pytest.raises(ShoalError) as caught:
            provenance_of(asked, node, assignment, model, world.clock.wall())
        assert caught.value.code is Code.ROLE_DENIED
    by = provenance_of(asked, "edge-1", one.id, DIGEST, world.clock.wall())
    assert (by.device, by.provider, by.precision, by.workload) == ("cpu0", "CPUExecutionProvider", "fp32", KEY)
    assert not await record(world, PACK, by)
    assert await record(world, OTHER, by), "once more, after a reply that was lost: the first counts"
    with pytest.raises(ShoalError) as caught:
        await record(world, OTHER, replace(by, assignment="a-other"))
    assert caught.value.code is Code.CONFLICT
    assert world.models.kept == {DIGEST, PACK}, "what came to nothing leaves no bytes"
    await world.step()
    assert verification_of(world, "edge-1").recording is Recording.HERE, "it is not judged by itself"
    await serve(world, agent)
    (one,) = world.region.workloads.desired["edge-1"].assignments
    assert one.verification is None
    await world.store.close()
    again = await RegionFixture.open(tmp_path, world)
    catalog = again.region.workloads.catalog
    assert catalog.provenance(PACK, DIGEST) == by
    (view,) = workload_views(again.region.workloads, again.region.fleet.fleet)
    (reference,) = view.references
    assert (reference.model, reference.pack.digest, reference.pack.recorded.node) == (DIGEST, PACK, "edge-1")
    await again.store.close()


async def test_a_replica_sends_one_recording_at_a_time(world: RegionFixture) -> None:
    async def slow() -> AsyncIterator[bytes]:
        began.set()
        yield b"x" * 500
        await goes_on.wait()
        yield b"x" * 500

    await warm(world)
    began, goes_on, models = asyncio.Event(), asyncio.Event(), world.region.models
    (one,) = world.region.workloads.desired["edge-1"].assignments
    by = provenance_of(world.region.workloads, "edge-1", one.id, DIGEST, world.clock.wall())
    sending = asyncio.create_task(models.receive_recording(by, Bytes(1000), PACK, slow()))
    await asyncio.wait_for(began.wait(), 10.0)
    with pytest.raises(ShoalError) as caught:
        await models.receive_recording(by, Bytes(1000), OTHER, content())
    assert caught.value.code is Code.OVERLOADED
    await models.receive_recording(replace(by, assignment="a-other"), Bytes(1000), OTHER, content())
    goes_on.set()
    assert (await sending).digest == PACK
    assert (await models.receive_recording(by, Bytes(1000), OTHER, content())).digest == OTHER


async def test_a_recording_that_is_removed_is_made_again_by_what_serves(world: RegionFixture) -> None:
    agent = await warm(world)
    (one,) = world.region.workloads.desired["edge-1"].assignments
    await record(world, PACK, provenance_of(world.region.workloads, "edge-1", one.id, DIGEST, world.clock.wall()))
    await serve(world, agent)
    with pytest.raises(ShoalError) as caught:
        await world.region.models.remove("ocr", "test")
    assert caught.value.code is Code.IN_USE, "it stays as long as its model does"
    assert await world.region.models.remove(PACK, "ops") == (PACK, True)
    assert PACK not in world.models.kept
    await world.step()
    asked = verification_of(world, "edge-1")
    assert (asked.recording, asked.beside) == (Recording.HERE, True)
    await world.region.documents.delete(DocumentKey("Workload", str(KEY)), "test")
    await world.region.models.remove("ocr", "test")
    assert not world.region.workloads.catalog.references


async def test_of_what_keeps_state_nothing_is_recorded(world: RegionFixture) -> None:
    stateful = [
        (name, text.replace("source: ocr", "source: ocr}, session: {state: {x: x}")) for name, text in
        documents("against: reference", "")
    ]  # fmt: skip
    assert Code.VERIFY_IMPOSSIBLE in await codes(world, stateful, {})


async def test_samples_beside_a_session_are_no_model_whose_state_is_looked_at(world: RegionFixture) -> None:
    stateful = [
        (name, text.replace("samples: ./reader.npz}", "samples: ./reader.npz}, session: {state: {x: x}}"))
        for name, text in documents("against: none")
    ]
    await push(world)
    assert await codes(world, stateful, {"./reader.npz": PACK}) == []
    assert world.region.workloads.intents[0].session == {"x": "x"}
    wrong = [(name, text.replace("{x: x}", "{h: x}")) for name, text in stateful]
    assert await codes(world, wrong, {"./reader.npz": PACK}) == [Code.SESSION_INVALID]


async def test_shapes_of_a_push_count_until_a_workload_uses_the_model(world: RegionFixture) -> None:
    models, larger = world.region.models, {"x": (1, 3, 96, 96)}

    async def push_at(shapes: Mapping[str, tuple[int, ...]] | None) -> tuple[int, ...]:
        profile = await models.receive("ocr", Bytes(1000), DIGEST, content(), shapes=shapes)
        await models.keep(profile, "ocr", DIGEST, actor="test", has_shapes=bool(shapes))
        return world.region.workloads.catalog.models[DIGEST].profile.reference_shapes["x"]

    assert await push_at(None) == (1, 3, 48, 48)
    assert await push_at(larger) == (1, 3, 96, 96)
    assert await push_at(None) == (1, 3, 96, 96), "a push without any leaves them"
    await world.region.documents.apply(documents("samples: 8", ""), {}, "", "test")
    assert await push_at({"x": (1, -1, 96, 96)}) == (1, 3, 96, 96)
    with pytest.raises(ShoalError) as caught:
        await push_at({"x": (1, 3, 64, 64)})
    assert caught.value.code is Code.IN_USE
