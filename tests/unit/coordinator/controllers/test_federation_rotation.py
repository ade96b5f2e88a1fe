"""A federation's own CA is followed by another: who is waited for, at which stage, by which replica."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness.builders.federation_members import advertisement, member
from harness.fakes.region import CountingIds, SteppedClock
from shoal.coordinator.api.federation import FederationService
from shoal.coordinator.controllers.federation import rotation as module
from shoal.coordinator.controllers.federation.rotation import SHARED_STAGE_S, FederationRotation
from shoal.coordinator.controllers.federation.service import FederationController
from shoal.coordinator.controllers.identity.enrolment import LIFETIME_S, Enrolment
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.log.events import EventLog
from shoal.coordinator.controllers.region.region import NoMeter
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.ports import VerifiedMessage
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.identity import uri_of
from shoal.wire.enrol import new_key, request_pem

ROLES = {role: LIFETIME_S[role] for role in (Role.OPERATOR, Role.VIEWER)}


def uri(region: str) -> str:
    return uri_of(region, Role.COORDINATOR, "coordinator")


@dataclass
class SharedElection:
    """ports.Election of several replicas: one holds it at a time."""

    lock: asyncio.Lock
    is_shared: bool = True
    is_held: bool = False

    async def campaign(self) -> None:
        await self.lock.acquire()
        self.is_held = True

    async def wait_lost(self) -> None:
        await asyncio.Event().wait()

    async def leader(self) -> bytes | None:
        return None

    async def resign(self) -> None:
        if self.is_held:
            self.is_held = False
            self.lock.release()


@dataclass
class Replica:
    """One process of the federation, whose CA and store others may share."""

    controller: FederationController
    authority: FileAuthority
    rotation: FederationRotation
    enrolment: Enrolment
    election: SharedElection
    stages: list[str]

    async def laggards(self) -> dict[str, str]:
        return {each.uri: each.lacks for each in (await self.rotation.state()).laggards}

    async def tick(self) -> None:
        """One iteration of its `run`."""
        with suppress(ShoalError):
            await self.rotation._step()


@dataclass
class World:
    store: SqliteStore
    clock: SteppedClock
    folder: Path
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    sequence: int = 0

    async def replica(self, *, is_shared: bool = False) -> Replica:
        meter: Any = NoMeter()
        events = EventLog(self.store, self.clock, kept=100, audit_kept=100)
        await events.start()
        candidates: Any = None
        controller = FederationController("fed", self.store, events, self.clock, meter, candidates)
        await controller.start()
        authority = FileAuthority.open(self.folder / "ca", "fed", wall=self.clock.wall(), may_create=True)
        context = ControllerContext("fed", self.store, events, self.clock, CountingIds(), meter)
        election, stages = SharedElection(self.lock, is_shared), list[str]()
        rotation = FederationRotation(
            context,
            authority,
            election,
            advertisements=controller.advertisements,
            roles=ROLES,
            on_stage=lambda: stages.append(authority.stage),
        )
        enrolment = Enrolment(context, authority, lifetimes=ROLES)
        return Replica(controller, authority, rotation, enrolment, election, stages)

    async def advertise(self, replica: Replica, region: str, *trusted: str) -> None:
        """trusted: fingerprints; none: as an older version."""
        self.sequence += 1
        said = advertisement(region, self.sequence, trusted_roots=trusted)
        await replica.controller.advertise(VerifiedMessage(region, said, b""))

    async def enrol(self, replica: Replica, name: str) -> None:
        token = await replica.enrolment.create("operator", name, 60.0, "shoal://fed/operator/admin")
        await replica.enrolment.redeem(token.text, request_pem(new_key(), name), name, peer="10.0.0.1")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    store = await SqliteStore.open(tmp_path / "store", reserve_bytes=0)
    yield World(store, SteppedClock(), tmp_path)
    await store.close()


async def test_f42_it_waits_for_regions_that_advertise_before_it_issues_and_before_it_drops_the_old_ca(
    world: World,
) -> None:
    replica = await world.replica()
    old = replica.authority.fingerprint
    for region in ("eu", "us", "away"):
        await replica.controller.admit(member(region))
    for region in ("eu", "us"):
        await world.advertise(replica, region, old)
    await replica.rotation.rotate("", "ann")
    both = replica.authority.fingerprints
    assert set(await replica.laggards()) == {uri("eu"), uri("us")}, "one that is away learns it when it is back"
    await world.advertise(replica, "eu", *both)
    await replica.tick()
    assert (replica.authority.stage, set(await replica.laggards())) == ("trust", {uri("us")})
    await world.advertise(replica, "us", *both)
    await replica.tick()
    assert replica.authority.stage == "issue"
    assert replica.authority.fingerprint != old

    await world.advertise(replica, "away", old)
    await replica.tick()
    assert (replica.authority.stage, set(await replica.laggards())) == ("issue", {uri("away")})
    await world.advertise(replica, "away", *both)
    await replica.tick()
    assert (replica.authority.stage, replica.stages) == ("idle", ["trust", "issue", "idle"])
    assert replica.authority.fingerprints == (both[1],)
    assert await replica.laggards() == {}, "those that trust the old one too are told"
    codes = [
        event.code for event in await EventLog(world.store, world.clock, kept=9, audit_kept=9).events_after(0, 100)
    ]
    assert [code for code in codes if code.startswith("CA_")] == ["CA_FOLLOWED", "CA_ISSUES", "CA_RETIRED"]


async def test_f42_who_stops_advertising_or_is_removed_is_not_waited_for(world: World) -> None:
    replica = await world.replica()
    for region in ("eu", "us"):
        await replica.controller.admit(member(region))
        await world.advertise(replica, region, replica.authority.fingerprint)
    await replica.rotation.rotate("", "ann")
    await replica.controller.remove("us")
    assert set(await replica.laggards()) == {uri("eu")}
    world.clock.advance(10.0)
    await replica.tick()
    assert replica.authority.stage == "issue"


async def test_f42_an_older_region_is_waited_for_and_the_rotation_says_why(world: World) -> None:
    replica = await world.replica()
    await replica.controller.admit(member("eu"))
    await world.advertise(replica, "eu")
    await replica.rotation.rotate("", "ann")
    await replica.tick()
    assert replica.authority.stage == "trust"
    assert await replica.laggards() == {uri("eu"): module.LACKS_VERSION}
    await replica.rotation.rotate("issue", "ann")
    assert replica.authority.stage == "issue", "an operator may go on without it"


async def test_people_of_the_federation_are_waited_for_as_a_regions_are(world: World) -> None:
    replica = await world.replica()
    await world.enrol(replica, "bob")
    await replica.rotation.rotate("", "ann")
    await replica.tick()
    assert await replica.laggards() == {"shoal://fed/operator/bob": "a certificate of the CA that issues"}
    await replica.tick()
    assert replica.authority.stage == "issue"
    await world.enrol(replica, "bob")
    await replica.tick()
    assert replica.authority.stage == "idle"


async def test_f42_replicas_follow_the_stage_that_one_of_them_reaches(world: World) -> None:
    first, second = await world.replica(is_shared=True), await world.replica(is_shared=True)
    old = first.authority.fingerprint
    await first.rotation.rotate("", "ann")
    assert second.authority.fingerprints == (old,)
    with pytest.raises(ShoalError) as error:
        await second.rotation.rotate("", "ann")
    assert error.value.code is Code.CONFLICT, "it reads what the first one did before it begins another"
    assert second.authority.fingerprints == first.authority.fingerprints
    await asyncio.gather(first.tick(), second.tick())
    assert first.authority.stage == "trust", "until every replica has read the stage"
    for stage in ("issue", "idle"):
        world.clock.advance(SHARED_STAGE_S + 1.0)
        await asyncio.gather(first.tick(), second.tick())
        for each in (first, second):
            await each.authority.reload()
            assert each.authority.stage == stage
            assert not each.election.is_held
    assert first.authority.fingerprints == second.authority.fingerprints != (old,)
    assert second.authority.since == first.authority.since


async def test_a_replica_that_cannot_be_elected_changes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = await world.replica(is_shared=True)
    monkeypatch.setattr(module, "ELECTION_S", 0.05)
    await world.lock.acquire()
    with pytest.raises(ShoalError) as error:
        await replica.rotation.rotate("", "ann")
    assert error.value.code is Code.CONFLICT
    world.lock.release()
    assert replica.authority.stage == "idle"
    await replica.rotation.rotate("", "ann")
    assert replica.authority.stage == "trust"


async def test_a_region_is_sent_the_roots_only_if_it_says_that_it_trusts_others(world: World) -> None:
    replica = await world.replica()
    service = FederationService("fed", replica.controller, world.clock, replica.authority)
    old = replica.authority.fingerprint
    assert service._roots_for((old,)) is None
    await replica.rotation.rotate("", "ann")
    told = service._roots_for((old,))
    assert told is not None
    assert (told.pems, told.since) == (replica.authority.roots, replica.authority.since)
    assert service._roots_for(replica.authority.fingerprints[::-1]) is None
    assert service._roots_for(()) is None, "an older version could not adopt them"
    before = told.since
    await replica.rotation.rotate("issue", "ann")
    await replica.rotation.rotate("retire", "ann")
    told = service._roots_for((old,))
    assert told is not None
    assert told.since > before, "the clock stood still, and later roots count nevertheless"


@pytest.mark.parametrize("trusted", [("x" * 64,), ("",), ("a" * 64,) * 5], ids=["no digest", "empty", "many"])
async def test_a24_what_a_region_cannot_trust_is_refused(world: World, trusted: tuple[str, ...]) -> None:
    replica = await world.replica()
    await replica.controller.admit(member("eu"))
    with pytest.raises(ShoalError) as error:
        await world.advertise(replica, "eu", *trusted)
    assert error.value.code is Code.ADVERT_INVALID
