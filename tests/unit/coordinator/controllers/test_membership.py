"""A region in a federation: what it keeps, what it tells, what it does when nobody answers."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from harness.builders.federation_members import advertisement, capacity, member
from harness.fakes.region import CountingIds, SteppedClock
from harness.wait import until
from shoal.coordinator.controllers.federation.membership import KEY, FederationMembership, LedgerHeads
from shoal.coordinator.controllers.log.context import RegionContext
from shoal.coordinator.controllers.log.events import EventLog
from shoal.coordinator.controllers.log.fencing import RegionFence
from shoal.coordinator.controllers.log.region_clock import RegionClock
from shoal.coordinator.controllers.region.region import NoMeter
from shoal.coordinator.ports import AdvertiseAnswer, JoinedFederation, Transaction
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.offer import Advertisement, Directory, FederationRoots, Member
from shoal.types.units import Seconds, Wall


def set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


def fingerprints_of(pems: tuple[str, ...], federation: str = "fed") -> tuple[str, ...]:
    assert federation == "fed"
    if not all(pem.startswith("CA ") for pem in pems):
        raise refuse(Code.FIELD_INVALID, "no CA")
    return tuple(hashlib.sha256(pem.encode()).hexdigest() for pem in pems)


@dataclass
class Federation:
    """ports.FederationLink, FederationDoor and Peers, as far as a membership calls them. refusal: what it answers."""

    directory: Directory
    told: list[Advertisement] = field(default_factory=list)
    updates: list[Member] = field(default_factory=list)
    left: int = 0
    refusal: Code | None = None
    far: dict[str, float] = field(default_factory=lambda: {"us": 0.08})
    roots: FederationRoots | None = None
    # Not set: what is told is heard, and no answer comes yet.
    answers: asyncio.Event = field(default_factory=set_event)
    # Not set: no other region answers yet.
    measures: asyncio.Event = field(default_factory=set_event)
    measured: list[str] = field(default_factory=list)
    # What it answers an advertisement once `answers` is set.
    late_refusal: Code | None = None

    def _answer(self) -> None:
        if self.refusal is not None:
            raise refuse(self.refusal)

    async def join(self, address: str, token: str, own: Member) -> JoinedFederation:
        self._answer()
        return JoinedFederation("fed", "fed:7443", ("CA of fed",), self.directory)

    async def leave(self) -> None:
        self._answer()
        self.left += 1

    async def update(self, own: Member) -> Directory:
        self._answer()
        self.updates.append(own)
        others = tuple(each for each in self.directory.members if each.region != own.region)
        self.directory = Directory("fed", self.directory.version + 1, (own, *others))
        return self.directory

    async def advertise(self, told: Advertisement) -> AdvertiseAnswer:
        self._answer()
        self.told.append(told)
        directory = self.directory if told.directory != self.directory.version else None
        await self.answers.wait()
        if self.late_refusal is not None:
            raise refuse(self.late_refusal)
        return AdvertiseAnswer(directory, self.roots)

    async def measure(self, region: str) -> Seconds:
        self.measured.append(region)
        await self.measures.wait()
        if region not in self.far:
            raise refuse(Code.PEER_UNREACHABLE, region)
        return Seconds(self.far[region])


@dataclass
class World:
    store: SqliteStore
    clock: SteppedClock
    federation: Federation
    own: Member = field(default_factory=lambda: member("eu"))

    async def start(self) -> FederationMembership:
        events = EventLog(self.store, self.clock, kept=100, audit_kept=100)
        ids, meter = CountingIds(), NoMeter()
        truth = RegionFence("eu", self.store, events, RegionClock(self.clock), ids, meter)
        await truth.start()
        await events.start()
        found: Any = self.federation
        membership = FederationMembership(
            RegionContext("eu", self.store, events, self.clock, ids, meter, truth),
            link=found,
            registry=found,
            peers=found,
            own=lambda: self.own,
            capacity=lambda: (capacity(),),
            fingerprints_of=fingerprints_of,
            heads=lambda: LedgerHeads("a" * 64, {"us": "b" * 64}),
        )
        await membership.start()
        return membership

    async def start_joined(self) -> FederationMembership:
        membership = await self.start()
        await membership.join("fed:7444", "token", "operator")
        return membership


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    store = await SqliteStore.open(tmp_path, reserve_bytes=0)
    known = (member("eu"), member("us", advertisement=advertisement("us")))
    yield World(store, SteppedClock(), Federation(Directory("fed", 7, known)))
    await store.close()


async def test_a_region_that_never_joined_knows_nobody(world: World) -> None:
    membership = await world.start()
    assert membership.current is None
    assert membership.directory is None
    assert membership.roots_of("us") == ()
    await membership.measure()
    assert membership.rtt == {}
    with pytest.raises(ShoalError) as error:
        await membership.leave("operator")
    assert error.value.code is Code.CONFLICT


async def test_membership_and_directory_survive_a_restart(world: World) -> None:
    await world.start_joined()
    again = await world.start()
    assert again.current == JoinedFederation("fed", "fed:7443", ("CA of fed",), world.federation.directory)
    assert again.roots_of("us") == ("CA of us",)
    assert again.roots_of("eu") == (), "itself is nobody's counterpart"
    assert again.roots_of("fed") == ()


async def test_a_region_is_in_one_federation(world: World) -> None:
    membership = await world.start_joined()
    with pytest.raises(ShoalError) as error:
        await membership.join("other:7444", "token", "operator")
    assert error.value.code is Code.CONFLICT


async def test_it_tells_what_it_has_in_numbers_that_grow_over_restarts(world: World) -> None:
    membership = await world.start_joined()
    await membership.measure()
    await membership.step()
    await membership.step()
    world.clock.advance(1.0)
    again = await world.start()
    await again.step()
    told = world.federation.told
    assert told[0].classes == (capacity(),)
    assert told[0].rtt_s == {"us": 0.08}
    assert (told[0].ledger_head, told[0].heads) == ("a" * 64, {"us": "b" * 64})
    assert told[0].sequence < told[1].sequence < told[2].sequence
    assert membership.last_answer_at == world.clock.wall() - 1.0


async def test_a_new_directory_is_kept_and_only_a_new_one_is_sent(world: World) -> None:
    membership = await world.start_joined()
    await membership.step()
    assert world.federation.told[-1].directory == 7
    world.federation.directory = Directory("fed", 8, (member("eu"), member("ap")))
    await membership.step()
    await membership.step()
    assert world.federation.told[-1].directory == 8
    assert membership.roots_of("us") == ()
    assert (await world.start()).roots_of("ap") == ("CA of ap",)


@pytest.mark.parametrize("changes", [{"address": "eu:9"}, {"roots": ("CA of eu", "next CA")}, {"residency": "ch"}])
async def test_what_changes_at_home_is_told(world: World, changes: dict[str, Any]) -> None:
    membership = await world.start_joined()
    await membership.step()
    assert world.federation.updates == []
    assert membership.is_listed
    world.own = replace(world.own, **changes)
    assert not membership.is_listed
    await membership.step()
    assert membership.is_listed
    assert world.federation.updates == [world.own]
    await membership.step()
    assert len(world.federation.updates) == 1


async def test_f42_without_the_federation_it_knows_and_measures_on(world: World) -> None:
    membership = await world.start_joined()
    world.federation.refusal = Code.FEDERATION_UNREACHABLE
    await membership.step()
    await membership.measure()
    assert membership.refusal is not None
    assert membership.refusal.code is Code.FEDERATION_UNREACHABLE
    assert membership.roots_of("us") == ("CA of us",)
    assert membership.rtt == {"us": 0.08}
    assert [refusal is None for _, refusal in membership.examine()] == [False, True]
    world.federation.refusal = None
    await membership.step()
    assert membership.refusal is None
    assert [refusal is None for _, refusal in membership.examine()] == [True, True]


async def test_distances_are_the_least_of_the_newest_and_of_who_answers(world: World) -> None:
    membership = await world.start_joined()
    for seconds in (0.08, 0.05, 0.2):
        world.federation.far["us"] = seconds
        await membership.measure()
        world.clock.advance(60.0)
    assert membership.rtt == {"us": 0.05}
    for _ in range(5):
        world.federation.far["us"] = 0.3
        await membership.measure()
        world.clock.advance(60.0)
    assert membership.rtt == {"us": 0.3}, "it has moved away"
    world.federation.far.clear()
    await membership.measure()
    assert membership.rtt == {}


async def test_between_its_turns_only_who_is_new_is_measured(world: World) -> None:
    membership = await world.start_joined()
    await membership.measure()
    world.federation.far = {"us": 0.5, "ap": 0.1}
    world.federation.directory = Directory("fed", 8, (member("eu"), member("us"), member("ap")))
    await membership.step()
    await membership.measure()
    assert membership.rtt == {"us": 0.08, "ap": 0.1}


async def test_leaving_needs_the_federation_unless_one_says_otherwise(world: World) -> None:
    membership = await world.start_joined()
    world.federation.refusal = Code.FEDERATION_UNREACHABLE
    with pytest.raises(ShoalError) as error:
        await membership.leave("operator")
    assert error.value.code is Code.FEDERATION_UNREACHABLE
    assert membership.current is not None
    await membership.leave("operator", forget=True)
    assert membership.directory is None
    assert (await world.start()).current is None


async def test_who_was_forgotten_there_may_leave_here(world: World) -> None:
    membership = await world.start_joined()
    world.federation.refusal = Code.REGION_UNKNOWN
    await membership.leave("operator")
    assert membership.current is None


def bundle(*pems: str, since: float = 5.0) -> FederationRoots:
    return FederationRoots(pems, Wall(since))


async def test_f42_it_trusts_the_cas_that_its_federation_names_and_says_so_next_time(world: World) -> None:
    membership = await world.start_joined()
    world.federation.roots = bundle("CA of fed", "CA next")
    await membership.step()
    assert world.federation.told[-1].trusted_roots == fingerprints_of(("CA of fed",))
    assert membership.current is not None
    assert membership.current.roots == ("CA of fed", "CA next")
    world.federation.roots = None
    await membership.step()
    assert world.federation.told[-1].trusted_roots == fingerprints_of(("CA of fed", "CA next"))
    again = await world.start()
    assert again.current is not None
    assert (again.current.roots, again.current.roots_since) == (("CA of fed", "CA next"), 5.0), "over a restart"
    world.federation.roots = bundle("CA next", since=9.0)
    await again.step()
    world.federation.roots = bundle("CA of fed", "CA next")
    await again.step()
    assert again.current.roots == ("CA next",), "another replica has yet to read the newest stage"
    assert again.refusal is not None, "or it would never be seen that its ca/ was restored from an older copy"
    world.federation.roots = bundle("CA next", since=9.0)
    await again.step()
    assert again.refusal is None
    events = await EventLog(world.store, world.clock, kept=100, audit_kept=100).events_after(0, 100)
    assert [each.code for each in events].count("FEDERATION_CA_CHANGED") == 2


@pytest.mark.parametrize(
    "told",
    [bundle(), bundle("no certificate"), bundle("CA of fed", "x"), bundle(*(f"CA {n}" for n in range(5)))],
    ids=["none", "no CA", "one that is no CA", "many"],
)
async def test_a21_roots_that_cannot_be_are_refused_and_the_directory_still_counts(
    world: World, told: FederationRoots
) -> None:
    membership = await world.start_joined()
    world.federation.roots = told
    world.federation.directory = Directory("fed", 8, (member("eu"), member("ap")))
    await membership.step()
    assert membership.current is not None
    assert membership.current.roots == ("CA of fed",)
    assert membership.current.directory.version == 8
    assert membership.refusal is not None
    assert membership.refusal.code is Code.FIELD_INVALID
    world.federation.roots = None
    await membership.step()
    assert membership.refusal is None


async def test_a21_what_a_federation_that_it_left_answers_late_is_no_word_of_the_one_that_it_joined(
    world: World,
) -> None:
    membership = await world.start_joined()
    world.federation.roots = bundle("CA of the first")
    world.federation.directory = Directory("fed", 8, (member("eu"), member("ap")))
    world.federation.answers.clear()
    late = asyncio.create_task(membership.step())
    await until(lambda: world.federation.told, 5, "the first federation to be asked")
    await membership.leave("operator")
    world.clock.advance(1.0)
    world.federation.directory = Directory("fed", 9, (member("eu"), member("us")))
    await membership.join("other:7444", "token", "operator")
    world.federation.answers.set()
    await late
    assert membership.current is not None
    assert membership.current.roots == ("CA of fed",)
    assert membership.current.directory.version == 9
    assert (membership.last_answer_at, membership.refusal) == (None, None)


@pytest.mark.parametrize("refusal", [None, Code.FEDERATION_UNREACHABLE])
async def test_a21_what_a_federation_answers_after_it_was_left_is_not_shown_of_the_next_one(
    world: World, refusal: Code | None
) -> None:
    membership = await world.start_joined()
    world.federation.answers.clear()
    late = asyncio.create_task(membership.step())
    await until(lambda: world.federation.told, 5, "the first federation to be asked")
    await membership.leave("operator")
    world.federation.late_refusal = refusal
    world.federation.answers.set()
    await late
    assert (membership.last_answer_at, membership.refusal) == (None, None)
    await membership.join("other:7444", "token", "operator")
    assert (membership.last_answer_at, membership.refusal) == (None, None)


async def test_a21_roots_of_the_far_future_do_not_outlast_those_that_follow(world: World) -> None:
    membership = await world.start_joined()
    world.federation.roots = bundle("CA of a thief", since=1e300)
    await membership.step()
    assert membership.refusal is not None
    assert membership.current is not None
    assert membership.current.roots == ("CA of fed",)
    world.federation.roots = bundle("CA next", since=world.clock.wall())
    await membership.step()
    assert membership.current.roots == ("CA next",)
    assert membership.refusal is None


async def test_what_an_older_version_stored_and_what_it_reads_of_this_one(world: World) -> None:
    membership = await world.start_joined()
    world.federation.roots = bundle("CA of fed", "CA next")
    await membership.step()
    found = await world.store.read(KEY)
    assert found is not None
    known = json.loads(found.value)
    assert known["joined"]["roots"] == ["CA of fed", "CA next"], "which it reads, and nothing else of them"
    del known["joined"]["roots_since"]
    await world.store.commit(Transaction({KEY: json.dumps(known).encode()}))
    again = await world.start()
    assert again.current is not None
    assert (again.current.roots, again.current.roots_since) == (("CA of fed", "CA next"), 0.0)


async def test_a_region_that_does_not_answer_keeps_nobody_from_hearing_the_federation(world: World) -> None:
    """A region that was expelled stayed trusted for as long as others took to measure."""
    membership = await world.start_joined()
    world.federation.measures.clear()
    running = asyncio.create_task(membership.run())
    await until(lambda: world.federation.measured, 5.0, "an advertisement")
    world.federation.directory = Directory("fed", 8, (member("eu"),))
    await until(lambda: membership.roots_of("us") == (), 5.0, "the directory without it")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_what_was_measured_of_a_federation_that_it_left_counts_for_nothing(world: World) -> None:
    membership = await world.start_joined()
    world.federation.measures.clear()
    measuring = asyncio.create_task(membership.measure())
    await until(lambda: world.federation.measured, 5.0, "a call")
    await membership.leave("operator")
    world.federation.measures.set()
    await measuring
    assert membership.rtt == {}
