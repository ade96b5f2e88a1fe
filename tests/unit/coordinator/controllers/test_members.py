"""Revoking, settling, and following one CA by another: what is stored, told and waited for."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from cryptography.x509 import Certificate, load_pem_x509_certificate

from harness.region import Agent, World
from shoal.coordinator.controllers.doctor import Check, examine_members
from shoal.coordinator.controllers.enrolment import LIFETIME_S, Enrolment
from shoal.coordinator.controllers.identities import GRACE_S
from shoal.coordinator.controllers.members import REVOKED, Members
from shoal.coordinator.core.fleet.state import Liveness, Twins
from shoal.coordinator.identity.authority import FileAuthority
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.link import Welcome
from shoal.types.units import Seconds
from shoal.wire.enrol import new_key, request_pem
from shoal.wire.identity import Identity, identity_of_pem

DAY = 86400.0


class Uncounted:
    """ports.Meter."""

    def count(self, name: str, **labels: str) -> None:
        pass

    def add(self, name: str, amount: float, **labels: str) -> None:
        pass


class Broker:
    """ports.Broker that shows whatever certificate it was given."""

    def __init__(self, shown: Certificate | None) -> None:
        self.shown = shown
        self.expelled: list[str] = []

    async def admit(self, node: str) -> None:
        pass

    async def expel(self, node: str) -> None:
        self.expelled.append(node)

    async def certificate(self) -> Certificate | None:
        return self.shown


@dataclass
class Membership:
    """A region with its CA, and who was told what."""

    world: World
    authority: FileAuthority
    members: Members
    enrolment: Enrolment
    ended: list[frozenset[str]] = field(default_factory=list)
    turned: int = 0

    @classmethod
    async def open(cls, folder: Path, before: "Membership | None" = None, broker: Broker | None = None) -> "Membership":
        world = await World.open(folder / "store", before.world if before else None)
        authority = FileAuthority.open(folder / "ca", "eu", wall=world.clock.wall(), may_create=before is None)
        enrolment = Enrolment("eu", world.store, authority, world.region.events, world.clock, world.ids, Uncounted())
        told: list[Membership] = []
        members = Members(
            world.region,
            world.store,
            authority,
            world.clock,
            broker=broker,
            ended=lambda serials: told[0].ended.append(serials),
            turned=lambda: told[0].turn(),
        )
        told.append(cls(world, authority, members, enrolment))
        await members.start()
        return told[0]

    def turn(self) -> None:
        self.turned += 1

    async def enrol(self, name: str, role: Role = Role.AGENT) -> Identity:
        token = await self.enrolment.create(role, name, 60.0, "ann")
        redeemed = await self.enrolment.redeem(token.text, request_pem(new_key(), name), name, peer="10.0.0.1")
        return identity_of_pem(redeemed.certificate_pem)

    async def node(self, name: str) -> tuple[Agent, Identity]:
        """Enrolled and connected; it says what it holds."""
        identity = await self.enrol(name)
        agent = Agent(self.world, name, serial=identity.serial, roots=self.authority.fingerprints)
        assert isinstance(await agent.connect(), Welcome)
        return agent, identity

    async def waits_for(self) -> list[str]:
        return [each.uri.removeprefix("shoal://eu/") for each in (await self.members.rotation()).laggards]

    async def doctor(self) -> list[Check]:
        return [check async for check in examine_members(self.members) if check.refusal is not None]

    async def close(self) -> None:
        await self.world.store.close()


@pytest.fixture
async def region(tmp_path: Path) -> AsyncIterator[Membership]:
    found = await Membership.open(tmp_path)
    yield found
    await found.close()


async def refused(code: Code, work: object) -> None:
    with pytest.raises(ShoalError) as error:
        await work  # type: ignore[misc]
    assert error.value.code is code, str(error.value)
    assert error.value.refusal.remedy


async def codes(region: Membership) -> list[str]:
    return [event.code for event in await region.world.region.events.past(0, 1000)]


# revoking


async def test_revoking_a_node_refuses_all_that_it_holds_ends_its_session_and_tells_every_front(
    region: Membership,
) -> None:
    agent, first = await region.node("edge-1")
    second = await region.enrol("edge-1")  # a second token for the same name: two certificates
    await region.node("edge-2")
    serials = await region.members.revoke("edge-1", "", "stolen", "ann")
    assert set(serials) == {first.serial, second.serial}
    assert region.ended == [frozenset(serials)]
    for identity in (first, second):
        refusal = region.members.check(identity.serial)
        assert refusal is not None
        assert refusal.code is Code.CERT_REVOKED
        assert region.members.forbids(identity) == refusal, "nor may it be renewed"
    assert [name for name, refusal in region.world.sent.ended if refusal.code is Code.CERT_REVOKED] == ["edge-1"]
    assert await agent.report() is not None, "what the old session says counts no more"
    await region.world.step()
    told = region.world.sent.desired("edge-2")[-1]
    assert told.trust is not None
    assert set(told.trust.revoked) == set(serials)
    assert "NODE_REVOKED" in await codes(region)


async def test_other_regions_are_told_of_gateways_alone(region: Membership) -> None:
    await region.node("edge-1")
    (gateway, known) = (await region.enrol("gw-1", Role.GATEWAY), region.world.region.workloads)
    await region.members.revoke("edge-1", "", "stolen", "ann")
    assert list(known.revoked_gateways) == []
    await region.members.revoke("gw-1", "", "stolen", "ann")
    assert list(known.revoked_gateways) == [gateway.serial]


async def test_a_revocation_is_known_after_a_restart_and_a_new_token_begins_anew(
    region: Membership, tmp_path: Path
) -> None:
    _, old = await region.node("edge-1")
    await region.members.revoke("edge-1", "", "stolen", "ann")
    await region.close()
    again = await Membership.open(tmp_path, region)
    try:
        assert again.members.check(old.serial) is not None
        assert [each.reason for each in again.members.revoked] == ["stolen"]
        fresh = await again.enrol("edge-1")
        assert again.members.check(fresh.serial) is None
        assert again.members.forbids(fresh) is None
        assert again.members.check(old.serial) is not None
    finally:
        await again.close()


async def test_a_person_is_revoked_by_role_and_a_stranger_not_at_all(region: Membership) -> None:
    ann = await region.enrol("ann", Role.OPERATOR)
    await refused(Code.NODE_UNKNOWN, region.members.revoke("ann", "", "left", "bob"))
    await refused(Code.NODE_UNKNOWN, region.members.revoke("ann", "viewer", "left", "bob"))
    await refused(Code.FIELD_INVALID, region.members.revoke("ann", "coordinator", "left", "bob"))
    await refused(Code.FIELD_INVALID, region.members.revoke("ann", "boss", "left", "bob"))
    assert region.ended == []
    assert await region.members.revoke("ann", "operator", "left", "bob") == (ann.serial,)
    assert region.members.check(ann.serial) is not None


async def test_a_revocation_is_kept_until_the_certificate_could_not_be_renewed_any_more(region: Membership) -> None:
    _, identity = await region.node("edge-1")
    await region.members.revoke("edge-1", "", "stolen", "ann")
    clock = region.world.clock
    for left_s, kept in ((10.0, True), (0.0, False)):
        clock.advance(identity.not_after + GRACE_S - left_s - clock.wall())
        await region.members._prune()
        assert (region.members.check(identity.serial) is not None) is kept
        assert bool(await region.world.store.scan(REVOKED)) is kept


# twins


async def test_settling_needs_a_mark_and_one_of_two_words(region: Membership) -> None:
    _, identity = await region.node("edge-1")
    await refused(Code.CONFLICT, region.members.settle("edge-1", "running", "ann"))
    await refused(Code.FIELD_INVALID, region.members.settle("edge-1", "other", "ann"))
    await refused(Code.NODE_UNKNOWN, region.members.settle("edge-9", "running", "ann"))
    fleet = region.world.region.fleet
    twins = Twins("10.0.0.1", "10.0.0.2", region.world.clock.wall())
    fleet.fleet = fleet.fleet.put(replace(fleet.fleet.nodes["edge-1"], twins=twins))
    refusal = region.members.forbids(identity)
    assert refusal is not None
    assert refusal.code is Code.TWIN_REFUSED, "neither of the two renews meanwhile"
    await region.members.settle("edge-1", "running", "ann")
    assert region.members.forbids(identity) is None
    fleet.fleet = fleet.fleet.put(replace(fleet.fleet.nodes["edge-1"], twins=twins))
    await region.members.settle("edge-1", "none", "ann")
    assert region.members.check(identity.serial) is not None


# the authority


async def test_a_rotation_waits_for_every_node_at_each_stage_and_goes_on_by_itself(region: Membership) -> None:
    first, _ = await region.node("edge-1")
    second, _ = await region.node("edge-2")
    old = region.authority.fingerprint
    await refused(Code.CONFLICT, region.members.rotate("issue", "ann"))
    await refused(Code.FIELD_INVALID, region.members.rotate("backwards", "ann"))
    await region.members.rotate("", "ann")
    assert (await region.members.rotation()).stage == "trust"
    assert await region.waits_for() == ["agent/edge-1", "agent/edge-2"]
    await region.world.step()
    told = region.world.sent.desired("edge-1")[-1].trust
    assert told is not None
    assert len(told.roots) == 2, "in its desired set"
    for agent in (first, second):
        await region.members._advance()
        assert region.authority.stage == "trust"
        agent.roots = region.authority.fingerprints
        await agent.report()
    await region.members._advance()
    assert region.authority.stage == "issue"
    assert region.authority.fingerprint != old
    assert await region.waits_for() == ["agent/edge-1", "agent/edge-2"]
    for agent in (first, second):
        await region.members._advance()
        assert region.authority.stage == "issue"
        agent.serial = (await region.enrol(agent.name)).serial
        await agent.report()
    await region.members._advance()
    assert region.authority.stage == "idle"
    assert old not in region.authority.fingerprints
    assert region.turned == 3
    assert [code for code in await codes(region) if code.startswith("CA_")] == [
        "CA_FOLLOWED",
        "CA_ISSUES",
        "CA_RETIRED",
    ]


async def test_nobody_waits_for_who_was_lost_or_revoked(region: Membership) -> None:
    await region.node("lost")
    await region.node("revoked")
    await region.members.revoke("revoked", "", "gone", "ann")
    fleet = region.world.region.fleet
    fleet.fleet = fleet.fleet.put(replace(fleet.fleet.nodes["lost"], liveness=Liveness.LOST))
    await region.members.rotate("", "ann")
    for stage in ("issue", "idle"):
        await region.members._advance()
        assert region.authority.stage == stage


async def test_people_are_waited_for_until_they_renew_or_their_certificate_ends(region: Membership) -> None:
    ann, bob = await region.enrol("ann", Role.OPERATOR), await region.enrol("bob", Role.TENANT)
    await region.members.rotate("", "eve")
    await region.members._advance()
    assert await region.waits_for() == ["operator/ann", "tenant/bob"]
    await region.enrol("ann", Role.OPERATOR)
    assert await region.waits_for() == ["tenant/bob"]
    region.world.clock.advance(bob.not_after - region.world.clock.wall() + 1.0)
    assert ann.not_after < region.world.clock.wall()
    await region.members._advance()
    assert region.authority.stage == "idle"


async def test_a_broker_is_waited_for_until_it_shows_a_certificate_of_the_ca_that_issues(tmp_path: Path) -> None:
    broker = Broker(None)
    region = await Membership.open(tmp_path, broker=broker)
    try:

        def shown() -> Certificate:
            wall = region.world.clock.wall()
            made = region.authority.enrol_self(Role.BROKER, "broker", lifetime_s=Seconds(90 * DAY), wall=wall)
            return load_pem_x509_certificate(made.certificate_pem)

        broker.shown = shown()
        await region.members.rotate("", "ann")
        assert await region.waits_for() == [], "it needs nothing yet"
        await region.members._advance()
        assert await region.waits_for() == ["broker/broker"]
        broker.shown = None
        assert await region.waits_for() == ["broker/broker"], "nor is one that is away taken for ready"
        await region.members._advance()
        assert region.authority.stage == "issue"
        broker.shown = shown()
        await region.members._advance()
        assert region.authority.stage == "idle"
        await region.node("edge-1")
        await region.members.revoke("edge-1", "", "gone", "ann")
        assert broker.expelled == ["edge-1"]
    finally:
        await region.close()


async def test_an_operator_may_go_on_without_those_that_are_waited_for(region: Membership) -> None:
    await region.node("edge-1")
    for stage, after in (("", "trust"), ("issue", "issue"), ("retire", "idle")):
        await region.members.rotate(stage, "ann")
        assert region.authority.stage == after


# what doctor says of it


async def test_doctor_names_certificates_that_should_have_been_renewed(region: Membership) -> None:
    await region.node("edge-1")
    await region.enrol("ann", Role.OPERATOR)
    assert await region.doctor() == []
    clock, life = region.world.clock, LIFETIME_S[Role.AGENT]
    clock.advance(life * 0.8)
    assert await region.doctor() == [], "it has yet some time to renew"
    clock.advance(life * 0.1)
    (check,) = await region.doctor()
    assert check.name == "certificate of shoal://eu/agent/edge-1"
    assert check.refusal is not None
    assert (check.refusal.code, check.refusal.found[:7]) == (Code.CERT_EXPIRED, "ends in")
    clock.advance(life)
    assert [each.refusal.found[:5] for each in await region.doctor() if each.refusal] == ["ended"]
    clock.advance(LIFETIME_S[Role.OPERATOR] - 2.5 * life)
    assert [each.name for each in await region.doctor()] == [
        "certificate of shoal://eu/agent/edge-1",
        "certificate of shoal://eu/operator/ann",
    ]
    clock.advance(life)
    assert [each.name for each in await region.doctor()] == ["certificate of shoal://eu/agent/edge-1"]
    await region.members.revoke("edge-1", "", "gone", "ann")
    assert await region.doctor() == []


async def test_doctor_names_a_rotation_that_waits_too_long_and_a_ca_near_its_end(region: Membership) -> None:
    await region.node("edge-1")
    await region.members.rotate("", "ann")
    assert await region.doctor() == []
    region.world.clock.advance(Seconds(3601.0))
    (check,) = await region.doctor()
    assert "goes on from trust" in check.name
    assert check.refusal is not None
    assert "agent/edge-1" in check.refusal.found
    await region.members.rotate("issue", "ann")
    await region.members.rotate("retire", "ann")
    region.world.clock.advance(9 * 365 * DAY + DAY)
    assert "the CA has time" in [each.name for each in await region.doctor()]
