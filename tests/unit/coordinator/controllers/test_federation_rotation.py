"""A federation's own CA is followed by another: who is waited for, at which stage, by which replica."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from harness.builders.federation_members import advertisement, member
from harness.fakes.region import CountingIds, SteppedClock
from harness.wait import until
from shoal.coordinator.api.federation import FederationService
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.controllers.federation import rotation as module
from shoal.coordinator.controllers.federation.rotation import SHARED_STAGE_S, FederationRotation
from shoal.coordinator.controllers.federation.service import FederationController
from shoal.coordinator.controllers.identity.enrolment import LIFETIME_S, Enrolment
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.log.events import EventLog
from shoal.coordinator.controllers.region.region import NoMeter
from shoal.coordinator.identity import roots
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.ports import VerifiedMessage
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.host.private_files import write_private
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.identity import uri_of
from shoal.types.units import Seconds
from shoal.wire.enrol import new_key, request_pem

ROLES = {role: LIFETIME_S[role] for role in (Role.OPERATOR, Role.VIEWER)}


def uri(region: str) -> str:
    return uri_of(region, Role.COORDINATOR, "coordinator")


CLOCK = CoordinatorClock()
LOOK_S = Seconds(0.02)
LEASE_LOOKS = 10
"""How often a candidate looks before the lease ends of a holder that does not renew it. Counted in looks and not in
seconds: a test machine that stands still ends no lease."""


@dataclass
class Seat:
    """What the store of several replicas knows of their election."""

    holder: object | None = None
    looks_left: int = 0

    def is_taken_by(self, who: object) -> bool:
        if self.holder in (None, who):
            self.holder, self.looks_left = who, LEASE_LOOKS
        else:
            self.age()
        return self.holder is who

    def age(self) -> None:
        self.looks_left -= 1
        if self.looks_left <= 0:
            self.holder = None


@dataclass(eq=False)
class SharedElection:
    """ports.Election of several replicas: one holds it at a time, as long as it renews its lease."""

    seat: Seat
    is_shared: bool = True
    # False: it is cut off from the store, and renews nothing.
    renews: bool = True

    @property
    def is_held(self) -> bool:
        return self.seat.holder is self

    async def campaign(self) -> None:
        while not self.seat.is_taken_by(self):
            await CLOCK.sleep(LOOK_S)

    async def wait_lost(self) -> None:
        while self.is_held:
            if self.renews:
                self.seat.is_taken_by(self)
            else:
                self.seat.age()
            await CLOCK.sleep(LOOK_S)

    async def leader(self) -> bytes | None:
        return None

    async def resign(self) -> None:
        if self.is_held:
            self.seat.holder = None


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
    seat: Seat = field(default_factory=Seat)
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
        election, stages = SharedElection(self.seat, is_shared), list[str]()
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
    other = SharedElection(world.seat)
    await other.campaign()
    with pytest.raises(ShoalError) as error:
        await replica.rotation.rotate("", "ann")
    assert error.value.code is Code.CONFLICT
    await other.resign()
    assert replica.authority.stage == "idle"
    await replica.rotation.rotate("", "ann")
    assert replica.authority.stage == "trust"


@contextmanager
def slow_disk() -> Iterator[tuple[threading.Event, threading.Event]]:
    """The first CA's certificate to be written waits until the second event; the first one tells that it waits."""
    waits, may_go_on = threading.Event(), threading.Event()

    def write(path: Path, content: bytes) -> None:
        if path.name == "cert.pem" and not waits.is_set():
            waits.set()
            may_go_on.wait(30.0)
        write_private(path, content)

    with mock.patch.object(roots, "write_private", write):
        try:
            yield waits, may_go_on
        finally:
            may_go_on.set()


async def test_f42_a_replica_whose_disk_is_slow_is_the_only_one_until_it_has_written(world: World) -> None:
    first, second = await world.replica(is_shared=True), await world.replica(is_shared=True)
    with slow_disk() as (waits, may_go_on):
        one = asyncio.create_task(first.rotation.rotate("", "ann"))
        await until(waits.is_set, 10, "the first one to write")
        two = asyncio.create_task(second.rotation.rotate("", "bob"))
        await asyncio.wait([two], timeout=LOOK_S * LEASE_LOOKS * 4)
        assert not two.done(), "it waits for the election"
        may_go_on.set()
        await one
        with pytest.raises(ShoalError) as error:
            await two
    assert error.value.code is Code.CONFLICT
    assert second.authority.fingerprints == first.authority.fingerprints
    assert (await world.replica(is_shared=True)).authority.stage == "trust", "after a restart"


async def test_f42_of_two_replicas_that_change_the_ca_at_once_one_does_and_its_files_stay_whole(world: World) -> None:
    """The first one loses the election while its disk is slow. Nothing can stop what it has begun to write."""
    first, second = await world.replica(is_shared=True), await world.replica(is_shared=True)
    with slow_disk() as (waits, may_go_on):
        one = asyncio.create_task(first.rotation.rotate("", "ann"))
        await until(waits.is_set, 10, "the first one to write")
        first.election.renews = False
        with pytest.raises(ShoalError) as error:
            await asyncio.wait_for(one, 10.0)
        assert error.value.code is Code.CONFLICT
        await second.rotation.rotate("", "bob")
        may_go_on.set()
    folder = world.folder / "ca"
    await until(lambda: [each.name for each in folder.glob("*/")] == ["3"], 10, "the first one to take back its CA")
    await first.authority.reload()
    assert first.authority.fingerprints == second.authority.fingerprints
    again = await world.replica(is_shared=True)
    assert (again.authority.stage, again.authority.fingerprints) == ("trust", second.authority.fingerprints)
    await again.rotation.rotate("issue", "ann")
    await again.rotation.rotate("retire", "ann")
    assert (await world.replica()).authority.stage == "idle"


async def test_f42_a_ca_restored_from_a_copy_made_while_it_was_followed_ends_its_rotation(world: World) -> None:
    replica = await world.replica()
    await replica.controller.admit(member("eu"))
    await world.advertise(replica, "eu", replica.authority.fingerprint)
    await replica.rotation.rotate("", "ann")
    await replica.rotation.rotate("issue", "ann")
    folder, copy = world.folder / "ca", world.folder / "copy"
    shutil.copytree(folder, copy)
    await replica.rotation.rotate("retire", "ann")
    await world.advertise(replica, "eu", replica.authority.fingerprint)
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    restored = await world.replica()
    assert restored.authority.stage == "issue"
    await world.advertise(restored, "eu", restored.authority.fingerprint)
    assert await restored.laggards() == {}, "it trusts the one that issues, and no older word"
    await restored.tick()
    assert restored.authority.stage == "idle"


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
