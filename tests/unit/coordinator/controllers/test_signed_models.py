"""Signed models in a region: what is taken in, what may be pinned, what nodes are told; back only with leave (A38)."""

import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from harness.crypto.signatures import FILES, Publisher
from harness.fakes.region import DIGEST, FakeAgent, RegionFixture
from shoal.coordinator.controllers.documents.models import PushResult
from shoal.coordinator.controllers.documents.publishers import verify_bundle
from shoal.coordinator.core.placement.model import WorkloadPlan
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, ShoalError
from shoal.types.units import Bytes, Wall
from shoal.types.workload import WorkloadKey
from shoal.wire import nouns

SHOP = Publisher(ed25519.Ed25519PrivateKey.generate(), "shop-release")
OTHER = Publisher(ec.generate_private_key(ec.SECP256R1()), "other")
READER = WorkloadKey("default", "reader")
OLD, NEW = DIGEST, "sha256:" + "b" * 64
DAY = 86_400.0


def region_document(*publishers: Publisher, until: str = "") -> tuple[str, str]:
    keys = "".join(
        f"    - {{name: {each.name}, key: {each.key.key}{f', until: {until}' if until else ''}}}\n"
        for each in publishers
    )
    head = "apiVersion: shoal/v1\nkind: Region\nmetadata: {name: eu}\n"
    return "region.yaml", head + (f"spec:\n  keys:\n{keys}" if keys else "")


def reader(source: str = "ocr", keys: str = "shop-release", name: str = "reader") -> tuple[str, str]:
    return (
        f"{name}.yaml",
        f"""apiVersion: shoal/v1
kind: Policy
metadata: {{name: signed}}
spec: {{require: {{trust: {{signed_model: {{keys: [{keys}]}}}}}}}}
---
apiVersion: shoal/v1
kind: Workload
metadata: {{name: {name}}}
spec: {{model: {{source: {source}}}, policy: signed}}
""",
    )


async def chunks() -> AsyncIterator[bytes]:
    yield b"x" * 1000


async def push(world: RegionFixture, digest: str = OLD, signature: bytes = b"", name: str = "ocr") -> PushResult:
    return await world.region.models.push(name, Bytes(1000), digest, chunks(), actor="test", signature=signature)


async def expect_refusal(world: RegionFixture, digest: str, signature: bytes, code: Code) -> None:
    before = world.region.workloads.catalog
    with pytest.raises(ShoalError) as caught:
        await push(world, digest, signature)
    assert caught.value.code is code
    assert caught.value.refusal.remedy
    assert world.region.workloads.catalog is before


async def apply(world: RegionFixture, *texts: tuple[str, str]) -> list[Code]:
    applied = await world.region.documents.apply(list(texts), {}, "", "test")
    return [problem.refusal.code for problem in applied.plan_result.problems]


async def plan(world: RegionFixture) -> WorkloadPlan:
    found = (await world.region.placement.explain()).of(READER)
    assert found is not None
    return found


async def join_agent(world: RegionFixture) -> FakeAgent:
    agent = FakeAgent(world, "edge-1")
    await agent.connect()
    await world.region.fleet.tick()
    return agent


async def only_assignment(world: RegionFixture, agent: FakeAgent) -> Assignment:
    await world.step()
    (assignment,) = world.region.workloads.desired[agent.name].assignments
    return assignment


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    world = await RegionFixture.open(tmp_path)
    assert await apply(world, region_document(SHOP, OTHER)) == []
    yield world
    await world.store.close()


async def test_a_signed_model_runs_and_its_node_is_told_what_to_verify(world: RegionFixture) -> None:
    bundle = SHOP.sign_digest(OLD, model="ocr", version=3)
    pushed = await push(world, OLD, bundle)
    assert not pushed.was_known
    assert await apply(world, reader()) == []
    agent = await join_agent(world)
    signed = (await only_assignment(world, agent)).signed
    assert signed is not None
    assert (signed.bundle, signed.keys, signed.allow_version) == (bundle, (SHOP.key,), 0)


async def test_what_is_stored_of_a_signed_model_comes_back(world: RegionFixture, tmp_path: Path) -> None:
    await push(world, OLD, SHOP.sign_digest(OLD, model="ocr", version=3))
    assert await apply(world, reader()) == []
    agent = await join_agent(world)
    before = await only_assignment(world, agent)
    assert nouns.decode(Assignment, nouns.encode(before)) == before
    await world.store.close()
    again = await RegionFixture.open(tmp_path, world)
    assert again.region.workloads.desired["edge-1"].assignments == (before,)
    assert again.region.workloads.catalog.models == world.region.workloads.catalog.models
    assert again.region.workloads.catalog.newest == world.region.workloads.catalog.newest
    await expect_refusal(again, NEW, SHOP.sign_digest(NEW, model="ocr", version=2), Code.MODEL_ROLLBACK)
    await again.store.close()


async def test_an_unsigned_model_is_not_placed_where_a_signature_is_asked_for(world: RegionFixture) -> None:
    await push(world)
    assert await apply(world, reader()) == []
    await join_agent(world)
    found = await plan(world)
    assert found.refusal is not None
    assert found.refusal.code is Code.SIGNATURE_REQUIRED
    assert "shoal model push ocr --signature" in found.nearest
    await push(world, OLD, SHOP.sign_digest(OLD, model="ocr"))
    assert (await plan(world)).refusal is None


async def test_a_model_by_another_key_is_not_placed_and_the_nearest_change_is_named(world: RegionFixture) -> None:
    await push(world, OLD, OTHER.sign_digest(OLD))
    assert await apply(world, reader()) == []
    await join_agent(world)
    found = await plan(world)
    assert found.refusal is not None
    assert found.refusal.code is Code.SIGNATURE_INVALID
    assert found.nearest == "trust: {signed_model: {keys: [shop-release, other]}}"
    assert await apply(world, reader(keys="shop-release, other")) == []
    assert (await plan(world)).refusal is None


async def test_a_policy_names_only_keys_that_the_region_declares(world: RegionFixture) -> None:
    assert await apply(world, reader(keys="nobody")) == [Code.MODEL_UNKNOWN, Code.PUBLISHER_UNKNOWN]
    await push(world)
    assert await apply(world, reader(keys="nobody")) == [Code.PUBLISHER_UNKNOWN]


async def test_a_key_that_is_withdrawn_counts_no_more_and_what_runs_serves_on(world: RegionFixture) -> None:
    await push(world, OLD, SHOP.sign_digest(OLD))
    assert await apply(world, reader()) == []
    agent = await join_agent(world)
    before = await only_assignment(world, agent)
    await agent.apply_desired()
    assert await apply(world, region_document(OTHER)) == []
    found = await plan(world)
    assert found.refusal is not None
    assert found.refusal.code is Code.PUBLISHER_UNKNOWN
    assert await only_assignment(world, agent) == before


@pytest.mark.parametrize(
    ("signature", "code"),
    [
        (Publisher(ed25519.Ed25519PrivateKey.generate(), "stranger").sign_digest(OLD), Code.SIGNATURE_INVALID),
        (SHOP.sign_digest(NEW), Code.SIGNATURE_INVALID),
        (SHOP.sign(FILES), Code.SIGNATURE_INVALID),
        (b"no bundle", Code.SIGNATURE_INVALID),
        (SHOP.sign_digest(OLD, expires_at=Wall(1_700_000_000.0)), Code.SIGNATURE_EXPIRED),
    ],
    ids=["stranger", "another model", "more files", "junk", "expired"],
)
async def test_a37_a_push_with_a_bad_signature_leaves_nothing(
    world: RegionFixture, signature: bytes, code: Code
) -> None:
    await expect_refusal(world, OLD, signature, code)
    assert not world.models.kept


async def test_a37_a_key_past_its_day_signs_nothing_new(world: RegionFixture) -> None:
    await push(world, OLD, SHOP.sign_digest(OLD))
    assert await apply(world, reader()) == []
    await join_agent(world)
    assert await apply(world, region_document(SHOP, until="2020-01-01")) == []
    await expect_refusal(world, NEW, SHOP.sign_digest(NEW), Code.SIGNATURE_EXPIRED)
    found = await plan(world)
    assert found.refusal is not None
    assert found.refusal.code is Code.SIGNATURE_EXPIRED


async def test_a38_a_signature_that_ends_freezes_nothing_that_runs(world: RegionFixture) -> None:
    """Freeze: past the signature's end nothing new is placed by it, so a withheld update shows."""
    await push(world, OLD, SHOP.sign_digest(OLD, expires_at=Wall(world.clock.date + DAY)))
    assert await apply(world, reader()) == []
    agent = await join_agent(world)
    before = await only_assignment(world, agent)
    await agent.apply_desired()
    world.clock.date += 2 * DAY
    await agent.report()
    assert await only_assignment(world, agent) == before
    assert await apply(world, reader(name="second")) == []
    second = (await world.region.placement.explain()).of(WorkloadKey("default", "second"))
    assert second is not None
    assert second.refusal is not None
    assert second.refusal.code is Code.SIGNATURE_EXPIRED
    await push(world, OLD, SHOP.sign_digest(OLD, expires_at=Wall(world.clock.date + DAY)))
    second = (await world.region.placement.explain()).of(WorkloadKey("default", "second"))
    assert second is not None
    assert second.refusal is None


async def test_a38_an_older_version_comes_back_only_with_leave(world: RegionFixture) -> None:
    old, new = SHOP.sign_digest(OLD, model="ocr", version=1), SHOP.sign_digest(NEW, model="ocr", version=2)
    await push(world, OLD, old, "ocr-1")
    assert await apply(world, reader("ocr-1")) == []
    agent = await join_agent(world)
    assert (await only_assignment(world, agent)).signed is not None
    await push(world, NEW, new, "ocr-2")
    # What was pinned before goes on, and its node is told that it may.
    assert await apply(world, reader("ocr-1")) == []
    found = await only_assignment(world, agent)
    assert found.signed is not None
    assert (found.model, found.signed.allow_version) == (OLD, 1)
    # Another workload may not go back, nor this one once it is on.
    assert await apply(world, reader("ocr-1", name="second")) == [Code.MODEL_ROLLBACK]
    assert await apply(world, reader("ocr-2")) == []
    assert await apply(world, reader("ocr-1")) == [Code.MODEL_ROLLBACK]
    # Not under another name or with the same bytes pushed again; a signature of another model's line is its own.
    older = "sha256:" + "c" * 64
    await expect_refusal(world, older, SHOP.sign_digest(older, model="ocr", version=1), Code.MODEL_ROLLBACK)
    await expect_refusal(world, older, SHOP.sign_digest(older, model="ocr"), Code.MODEL_ROLLBACK)
    await push(world, OLD, old, "ocr-1")
    await push(world, older, OTHER.sign_digest(older, model="ocr", version=1), "theirs")
    # With an operator's leave.
    lines = await world.region.models.allow_rollback("ocr", 1, "operator")
    assert lines == (f"{SHOP.key.fingerprint}/ocr",)
    assert await apply(world, reader("ocr-1")) == []
    await agent.apply_desired()
    events = await world.region.events.events_after(0, 1000)
    assert [event.actor for event in events if event.code == "ROLLBACK_ALLOWED"] == ["operator"]
    # A newer version ends the leave.
    newest = "sha256:" + hashlib.sha256(b"newest").hexdigest()
    await push(world, newest, SHOP.sign_digest(newest, model="ocr", version=3), "ocr-3")
    assert await apply(world, reader("ocr-3")) == []
    assert await apply(world, reader("ocr-1")) == [Code.MODEL_ROLLBACK]


@pytest.mark.parametrize(("model", "version", "code"), [
    ("nothing", 1, Code.MODEL_UNKNOWN), ("ocr", 2, Code.INVALID_ARGUMENT), ("ocr", 9, Code.INVALID_ARGUMENT),
    ("ocr", -1, Code.INVALID_ARGUMENT),
])  # fmt: skip
async def test_leave_is_for_older_versions_of_known_models(
    world: RegionFixture, model: str, version: int, code: Code
) -> None:
    await push(world, OLD, SHOP.sign_digest(OLD, model="ocr", version=2))
    with pytest.raises(ShoalError) as caught:
        await world.region.models.allow_rollback(model, version, "operator")
    assert caught.value.code is code


async def test_a_model_keeps_one_signature_of_each_key(world: RegionFixture) -> None:
    for bundle in (SHOP.sign_digest(OLD), OTHER.sign_digest(OLD), SHOP.sign_digest(OLD, model="ocr", version=1)):
        await push(world, OLD, bundle)
    record = world.region.workloads.catalog.models[OLD]
    seen = world.region.workloads.catalog.signature_checks("eu", record, verify_bundle)
    assert [(each.key, each.statement.version if each.statement else None) for each in seen] == [
        ("other", 0),
        ("shop-release", 1),
    ]
    assert (await push(world, OLD, record.signatures[1])).was_known


async def test_a_signature_in_the_store_that_was_changed_places_nothing(world: RegionFixture) -> None:
    """The store was written to behind the coordinator's back: another model's bundle, or none that verifies."""
    await push(world, OLD, SHOP.sign_digest(OLD))
    assert await apply(world, reader()) == []
    await join_agent(world)
    catalog = world.region.workloads.catalog
    for planted in (SHOP.sign_digest(NEW), b"{}"):
        record = replace(catalog.models[OLD], signatures=(planted,))
        world.region.workloads.adopt(replace(catalog, models={OLD: record}))
        found = await plan(world)
        assert found.refusal is not None
        assert found.refusal.code is Code.SIGNATURE_REQUIRED
