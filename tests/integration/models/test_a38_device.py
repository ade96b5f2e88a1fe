"""A38: a rollback to an older signed version of a model. A real agent under a hostile coordinator loads no old
version, and nothing that no publisher signed (A37)."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from harness.clients.oip import InferenceError, Tensor
from harness.cluster.agent_host import REGION, AgentHost, FakeCoordinator, assignment, ready
from harness.crypto.pki import Authority
from harness.crypto.signatures import Publisher
from harness.models.synthetic import relu
from harness.report import record
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.types.assignment import Assignment, Phase
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.signature import SignedModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHOP = Publisher(ed25519.Ed25519PrivateKey.generate(), "shop-release")
THIEF = Publisher(ec.generate_private_key(ec.SECP256R1()), "thief")


def model(producer: str) -> bytes:
    """The same graph in other bytes."""
    found = relu()
    found.producer_name = producer
    return found.SerializeToString()


MODELS = {f"sha256:{hashlib.sha256(content).hexdigest()}": content for content in map(model, ("v1", "v2", "evil"))}
OLD, NEW, EVIL = MODELS


@dataclass
class Scene:
    coordinator: FakeCoordinator
    machine: AgentHost
    generation: int = 0

    def want(self, *assignments: Assignment) -> None:
        self.generation += 1
        self.coordinator.want(*assignments, generation=self.generation)

    async def wait_refused(self, asked: Assignment, code: Code) -> None:
        """It fails for that reason, and none of its bytes were fetched or lie there."""
        self.want(asked)
        await until(
            lambda: (found := self.coordinator.observed.get(asked.id)) is not None and found.phase is Phase.FAILED,
            20.0,
            f"{asked.id} to fail",
        )
        assert self.coordinator.observed[asked.id].code is code
        await until(lambda: any(event.code == code for event in self.coordinator.events), 10.0, f"word of {code}")

    def was_fetched(self, digest: str) -> bool:
        return any(found == digest for found, _ in self.coordinator.fetched)


def signed_assignment(
    name: str, digest: str, version: int, *, by: Publisher = SHOP, key: Publisher = SHOP, allow: int = 0
) -> Assignment:
    bundle = by.sign_digest(digest, model="relu", version=version)
    plain = assignment(name, name, digest, len(MODELS[digest]))
    return replace(plain, signed=SignedModel(bundle, (key.key,), allow))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder = tmp_path_factory.mktemp("region")
    authority = Authority(folder / "ca", REGION, SystemClock().wall())
    coordinator = FakeCoordinator(authority.issue(Role.COORDINATOR, "coordinator"), MODELS)
    await coordinator.start()
    machine = AgentHost(folder / "edge-1", authority, coordinator.address)
    try:
        await asyncio.to_thread(machine.start)
        yield Scene(coordinator, machine)
    finally:
        await asyncio.to_thread(machine.lose_power)
        await coordinator.stop()


async def test_a37_what_the_publisher_did_not_sign_is_not_even_fetched(scene: Scene) -> None:
    """The store's digest was changed: the publisher's signature is of another model, or another's signature came."""
    swapped = replace(
        signed_assignment("swapped", NEW, 2), model=EVIL, model_bytes=signed_assignment("x", EVIL, 2).model_bytes
    )
    for bad in (swapped, signed_assignment("stolen", EVIL, 2, by=THIEF)):
        await scene.wait_refused(bad, Code.SIGNATURE_INVALID)
    assert not scene.was_fetched(EVIL)
    assert not list(scene.machine.folder.glob(f"**/{EVIL.removeprefix('sha256:')}*"))
    record("A37", "P", runs=2)


async def test_a38_an_older_version_does_not_come_back_over_a_power_cut(scene: Scene) -> None:
    """A coordinator that was restored from an old copy asks for version 1 of what this device ran as version 2."""
    scene.want(signed_assignment("new", NEW, 2))
    await ready(scene.coordinator, "new")
    await scene.wait_refused(signed_assignment("old", OLD, 1), Code.MODEL_ROLLBACK)
    assert not scene.was_fetched(OLD)

    await asyncio.to_thread(scene.machine.lose_power)
    scene.want(signed_assignment("older", OLD, 1), signed_assignment("new-again", NEW, 2))
    await asyncio.to_thread(scene.machine.start)
    await ready(scene.coordinator, "new-again")
    await scene.wait_refused(signed_assignment("older", OLD, 1), Code.MODEL_ROLLBACK)
    assert not scene.was_fetched(OLD)

    scene.want(signed_assignment("allowed", OLD, 1, allow=1))
    await ready(scene.coordinator, "allowed")
    await scene.wait_refused(signed_assignment("not-again", OLD, 1), Code.MODEL_ROLLBACK)
    record("A38", "P", runs=3)


async def test_a38_cut_off_and_without_power_the_signed_model_answers_again(scene: Scene) -> None:
    """The signature and its key lie with the desired set: no coordinator is needed to judge them."""
    scene.want(signed_assignment("island", NEW, 2))
    await ready(scene.coordinator, "island")
    await scene.coordinator.stop()
    await asyncio.to_thread(scene.machine.lose_power)
    await asyncio.to_thread(scene.machine.start)
    client = scene.machine.client()
    x = Tensor("x", "FP32", (1, 4), bytes(16))

    async def answers() -> bool:
        try:
            return bool((await client.infer("island", [x], timeout=2.0)).outputs)
        except InferenceError:
            return False

    try:
        await until(answers, 20.0, "an answer without a coordinator", every_s=0.1)
    finally:
        await client.close()
        await scene.coordinator.start()


async def test_a37_a_device_with_keys_of_its_own_believes_no_coordinator(scene: Scene, tmp_path: Path) -> None:
    """The coordinator names the thief's key, or asks for no signature at all."""
    (tmp_path / "shop.pem").write_text(SHOP.key.pem)
    await asyncio.to_thread(scene.machine.lose_power)
    scene.want()
    await asyncio.to_thread(scene.machine.start, "--publisher-keys", str(tmp_path))
    await scene.wait_refused(signed_assignment("theirs", EVIL, 3, by=THIEF, key=THIEF), Code.SIGNATURE_INVALID)
    unsigned = assignment("unsigned", "unsigned", EVIL, len(MODELS[EVIL]))
    await scene.wait_refused(unsigned, Code.SIGNATURE_REQUIRED)
    assert not scene.was_fetched(EVIL)
    scene.want(signed_assignment("ours", NEW, 2))
    await ready(scene.coordinator, "ours")
    record("A37", "P", runs=2)
