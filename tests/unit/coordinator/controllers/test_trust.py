"""Revoking, settling, and following one CA by another: what is stored, told and waited for."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509 import DNSName, IPAddress, SubjectAlternativeName, load_pem_x509_certificate

from harness.fakes.region import FakeAgent, RecordedLinks, RegionFixture
from shoal.coordinator.controllers.identity.certificates import GRACE_S, IDENTITIES
from shoal.coordinator.controllers.identity.enrolment import LIFETIME_S, Enrolment
from shoal.coordinator.controllers.identity.revocation import ORDERS, REVOKED, RevocationKind, RevokedItem
from shoal.coordinator.controllers.region.doctor import HealthCheck, examine_certificates
from shoal.coordinator.controllers.region.region import RegionalCoordinator, RegionConfig
from shoal.coordinator.controllers.region.trust import TrustController
from shoal.coordinator.core.fleet.state import DuplicateIdentity, Liveness
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.ports import Transaction
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.link import Welcome
from shoal.types.units import Seconds
from shoal.wire.certificates import identity_of_pem
from shoal.wire.enrol import new_key, request_pem

DAY = 86400.0


class Broker:
    """ports.Broker that shows whatever certificate it was given."""

    def __init__(self, shown: bytes | None) -> None:
        self.shown = shown
        self.expelled: list[str] = []

    async def admit(self, node: str) -> None:
        pass

    async def expel(self, node: str) -> None:
        self.expelled.append(node)

    async def certificate(self) -> bytes | None:
        return self.shown


@dataclass
class Membership:
    """A region with its CA, and who was told what."""

    world: RegionFixture
    authority: FileAuthority
    members: TrustController
    enrolment: Enrolment
    ended: list[frozenset[str]] = field(default_factory=list)
    turned: int = 0
    # Whether its federation knows all its CAs.
    is_listed: bool = True

    @classmethod
    async def open(cls, folder: Path, before: "Membership | None" = None, broker: Broker | None = None) -> "Membership":
        world = await RegionFixture.open(folder / "store", before.world if before else None)
        return await cls.start(world, folder / "ca", broker, may_create=before is None)

    async def elect_next(self, folder: Path) -> "Membership":
        """The coordinator that leads while this one is paused: it has the same store and CA."""
        world, sent = self.world, RecordedLinks()
        config = RegionConfig("eu")
        region = RegionalCoordinator(world.store, sent, world.models, world.models, world.clock, world.ids, config)
        await region.start(elected=True)
        return await self.start(replace(world, region=region, links=sent), folder / "ca", may_create=False)

    @classmethod
    async def start(
        cls, world: RegionFixture, folder: Path, broker: Broker | None = None, *, may_create: bool
    ) -> "Membership":
        authority = FileAuthority.open(folder, "eu", wall=world.clock.wall(), may_create=may_create)
        enrolment = Enrolment(world.region.context, authority)
        told: list[Membership] = []
        members = TrustController(
            world.region,
            world.store,
            authority,
            world.clock,
            broker=broker,
            on_serials_revoked=lambda serials: told[0].ended.append(serials),
            on_rotation=lambda: told[0].turn(),
            is_listed=lambda: told[0].is_listed,
        )
        told.append(cls(world, authority, members, enrolment))
        await members.start()
        return told[0]

    def turn(self) -> None:
        self.turned += 1

    async def enrol(self, name: str, role: Role = Role.AGENT, maker: str = "ann") -> Identity:
        token = await self.enrolment.create(role, name, 60.0, maker)
        return await self.redeem(token.text, name)

    async def redeem(self, text: str, name: str) -> Identity:
        redeemed = await self.enrolment.redeem(text, request_pem(new_key(), name), name, peer="10.0.0.1")
        return identity_of_pem(redeemed.certificate_pem)

    async def forget_makers(self) -> None:
        """Identities as a version without `made_by` stored them."""
        for each in await self.world.store.scan(IDENTITIES):
            known = json.loads(each.value)
            del known["made_by"]
            await self.world.store.commit(Transaction({each.key: json.dumps(known).encode()}))

    async def node(self, name: str) -> tuple[FakeAgent, Identity]:
        """Enrolled and connected; it says what it holds."""
        identity = await self.enrol(name)
        agent = FakeAgent(self.world, name, serial=identity.serial, roots=self.authority.fingerprints)
        assert isinstance(await agent.connect(), Welcome)
        return agent, identity

    async def waits_for(self) -> list[str]:
        return [each.uri.removeprefix("shoal://eu/") for each in (await self.members.rotation()).laggards]

    async def doctor(self) -> list[HealthCheck]:
        return [check async for check in examine_certificates(self.members) if check.refusal is not None]

    async def close(self) -> None:
        await self.world.store.close()


@pytest.fixture
async def region(tmp_path: Path) -> AsyncIterator[Membership]:
    found = await Membership.open(tmp_path)
    yield found
    await found.close()


def serials_of(ended: tuple[RevokedItem, ...]) -> tuple[str, ...]:
    return tuple(serial for each in ended for serial in each.serials)


async def expect_refusal(code: Code, work: object) -> None:
    with pytest.raises(ShoalError) as error:
        await work  # type: ignore[misc]
    assert error.value.code is code, str(error.value)
    assert error.value.refusal.remedy


async def codes(region: Membership) -> list[str]:
    return [event.code for event in await region.world.region.events.events_after(0, 1000)]


# revoking


async def test_revoking_a_node_refuses_all_that_it_holds_ends_its_session_and_tells_every_front(
    region: Membership,
) -> None:
    agent, first = await region.node("edge-1")
    second = await region.enrol("edge-1")  # a second token for the same name: two certificates
    await region.node("edge-2")
    serials = serials_of(await region.members.revoke("edge-1", "", "stolen", "ann"))
    assert set(serials) == {first.serial, second.serial}
    assert region.ended == [frozenset(serials)]
    for identity in (first, second):
        refusal = region.members.check(identity.serial)
        assert refusal is not None
        assert refusal.code is Code.CERT_REVOKED
        assert region.members.forbids(identity) == refusal, "nor may it be renewed"
    assert [name for name, refusal in region.world.links.ended_sessions if refusal.code is Code.CERT_REVOKED] == [
        "edge-1"
    ]
    assert await agent.report() is not None, "what the old session says counts no more"
    await region.world.step()
    told = region.world.links.desired_sets("edge-2")[-1]
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
        assert [each.reason for each in again.members.revocation_list] == ["stolen"]
        fresh = await again.enrol("edge-1")
        assert again.members.check(fresh.serial) is None
        assert again.members.forbids(fresh) is None
        assert again.members.check(old.serial) is not None
    finally:
        await again.close()


async def test_a_person_is_revoked_by_role_and_a_stranger_not_at_all(region: Membership) -> None:
    ann = await region.enrol("ann", Role.OPERATOR)
    await expect_refusal(Code.NODE_UNKNOWN, region.members.revoke("ann", "", "left", "bob"))
    await expect_refusal(Code.NODE_UNKNOWN, region.members.revoke("ann", "viewer", "left", "bob"))
    await expect_refusal(Code.FIELD_INVALID, region.members.revoke("ann", "coordinator", "left", "bob"))
    await expect_refusal(Code.FIELD_INVALID, region.members.revoke("ann", "boss", "left", "bob"))
    assert region.ended == []
    await region.enrol("bob", Role.OPERATOR)
    assert serials_of(await region.members.revoke("ann", "operator", "left", "bob")) == (ann.serial,)
    assert region.members.check(ann.serial) is not None


BOB = "shoal://eu/operator/bob"
ADMIN = "shoal://eu/operator/admin"


async def test_a60_whatever_an_operator_made_ends_with_it_to_the_last_descendant(region: Membership) -> None:
    """admin lets bob in, bob lets carol in, carol lets a node in: revoking bob ends all but admin."""
    await region.enrol("admin", Role.OPERATOR)
    held = {
        "bob": await region.enrol("bob", Role.OPERATOR, ADMIN),
        "carol": await region.enrol("carol", Role.OPERATOR, BOB),
        "edge-1": await region.enrol("edge-1", Role.AGENT, "shoal://eu/operator/carol"),
    }
    unused = await region.enrolment.create("operator", "", 60.0, "shoal://eu/operator/carol")
    bearer = await region.enrolment.create("bearer", "shop", 60.0, BOB)
    bound = await region.enrolment.create("operator", "bob", 60.0, ADMIN)
    other = await region.enrolment.create("bearer", "shop", 60.0, ADMIN)
    before = await region.members.preview_revocation("bob", "operator")
    assert region.members.check(held["bob"].serial) is None, "a look ends nothing"
    ended = await region.members.revoke("bob", "operator", "left", ADMIN)
    assert (
        {(each.kind, each.name) for each in ended}
        == {
            *((RevocationKind.IDENTITY, identity.uri) for identity in held.values()),
            (RevocationKind.TOKEN, unused.id),
            (RevocationKind.TOKEN, bound.id),
            (RevocationKind.BEARER, bearer.id),
        }
        == {(each.kind, each.name) for each in before}
    )
    assert set(serials_of(ended)) == {identity.serial for identity in held.values()}
    for identity in held.values():
        assert region.members.check(identity.serial) is not None
    for token in (unused, bound):
        await expect_refusal(Code.TOKEN_INVALID, region.redeem(token.text, "eve"))
    assert [each.token_sha256[:12] for each in region.world.region.workloads.credentials] == [other.id]
    await expect_refusal(Code.CERT_REVOKED, region.enrolment.create("agent", "late", 60.0, BOB))


async def test_a60_a_tenant_ends_with_its_bearer_tokens_whoever_made_them(region: Membership) -> None:
    await region.enrolment.create("bearer", "shop", 60.0, ADMIN)
    assert [each.kind for each in await region.members.revoke("shop", "tenant", "left", ADMIN)] == [
        RevocationKind.BEARER
    ]
    assert region.world.region.workloads.credentials == ()
    await expect_refusal(Code.NODE_UNKNOWN, region.members.revoke("shop", "tenant", "left", ADMIN))


async def test_a60_who_enrolled_may_stay_and_is_then_somebody_elses(region: Membership) -> None:
    await region.enrol("admin", Role.OPERATOR)
    await region.enrol("bob", Role.OPERATOR, ADMIN)
    node = await region.enrol("edge-1", Role.AGENT, BOB)
    bearer = await region.enrolment.create("bearer", "shop", 60.0, BOB)
    ended = await region.members.revoke("bob", "operator", "left", ADMIN, keep_enrolled=True)
    assert [each.name for each in ended] == [BOB, bearer.id], "a secret that it has seen is not kept"
    assert region.members.check(node.serial) is None
    await region.enrol("bob", Role.OPERATOR, ADMIN)
    assert len(await region.members.revoke("bob", "operator", "again", ADMIN)) == 1
    assert region.members.check(node.serial) is None


async def test_a60_the_last_operator_is_revoked_by_force_alone(region: Membership) -> None:
    first = await region.enrol("admin", Role.OPERATOR)
    await region.enrol("bob", Role.OPERATOR, ADMIN)
    await expect_refusal(Code.LAST_OPERATOR, region.members.revoke("admin", "operator", "left", BOB))
    assert region.members.check(first.serial) is None
    assert len(await region.members.revoke("admin", "operator", "left", BOB, force=True)) == 2
    assert region.members.check(first.serial) is not None


async def test_a60_what_a_coordinator_did_not_finish_it_resumes(
    region: Membership, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies after the first of many transactions; a store of an older version knows no makers but of tokens."""
    monkeypatch.setattr("shoal.coordinator.controllers.identity.revocation.OPERATIONS", 1)
    await region.enrol("admin", Role.OPERATOR)
    await region.enrol("bob", Role.OPERATOR, ADMIN)
    nodes = [await region.enrol(f"edge-{number}", Role.AGENT, BOB) for number in range(3)]
    await region.forget_makers()
    commit, done = region.world.region.events.commit, list[int]()

    async def dies(*given: Any, **named: Any) -> int:
        if done:
            raise ShoalError(Refusal(Code.STORE_UNAVAILABLE, "gone", "", "look"))
        done.append(1)
        return await commit(*given, **named)

    monkeypatch.setattr(region.world.region.events, "commit", dies)
    await expect_refusal(Code.STORE_UNAVAILABLE, region.members.revoke("bob", "operator", "left", ADMIN))
    await region.close()
    again = await Membership.open(tmp_path, region)
    try:
        assert [again.members.check(each.serial) is None for each in nodes] == [True] * 3
        await again.members.revocations.resume()
        assert [again.members.check(each.serial) is None for each in nodes] == [False] * 3
        assert await again.world.store.scan(ORDERS) == ()
    finally:
        await again.close()


async def test_a_devices_certificate_is_good_for_its_name_and_no_shared_address(region: Membership) -> None:
    for role, addresses in ((Role.AGENT, set[str]()), (Role.GATEWAY, {"10.0.0.1"})):
        token = await region.enrolment.create(role, f"{role}-1", 60.0, "ann")
        csr = request_pem(new_key(), f"{role}-1")
        redeemed = await region.enrolment.redeem(token.text, csr, f"{role}-1", peer="10.0.0.1")
        certificate = load_pem_x509_certificate(redeemed.certificate_pem)
        names = certificate.extensions.get_extension_for_class(SubjectAlternativeName).value
        found = {str(each) for each in names.get_values_for_type(IPAddress)}
        assert found - {"127.0.0.1", "127.0.0.2", "::1"} == addresses
        assert f"{role}-1.{role}.eu.shoal" in names.get_values_for_type(DNSName)


async def test_a_revocation_is_kept_until_the_certificate_could_not_be_renewed_any_more(region: Membership) -> None:
    _, identity = await region.node("edge-1")
    await region.members.revoke("edge-1", "", "stolen", "ann")
    clock = region.world.clock
    for left_s, kept in ((10.0, True), (0.0, False)):
        clock.advance(identity.not_after + GRACE_S - left_s - clock.wall())
        await region.members.revocations.prune()
        assert (region.members.check(identity.serial) is not None) is kept
        assert bool(await region.world.store.scan(REVOKED)) is kept


# duplicate


async def test_settling_needs_a_mark_and_one_of_two_words(region: Membership) -> None:
    _, identity = await region.node("edge-1")
    await expect_refusal(Code.CONFLICT, region.members.resolve_duplicate("edge-1", "running", "ann"))
    await expect_refusal(Code.FIELD_INVALID, region.members.resolve_duplicate("edge-1", "other", "ann"))
    await expect_refusal(Code.NODE_UNKNOWN, region.members.resolve_duplicate("edge-9", "running", "ann"))
    fleet = region.world.region.fleet
    duplicate = DuplicateIdentity("10.0.0.1", "10.0.0.2", region.world.clock.wall())
    fleet.fleet = fleet.fleet.with_node(replace(fleet.fleet.nodes["edge-1"], duplicate=duplicate))
    refusal = region.members.forbids(identity)
    assert refusal is not None
    assert refusal.code is Code.DUPLICATE_IDENTITY, "neither of the two renews meanwhile"
    await region.members.resolve_duplicate("edge-1", "running", "ann")
    assert region.members.forbids(identity) is None
    fleet.fleet = fleet.fleet.with_node(replace(fleet.fleet.nodes["edge-1"], duplicate=duplicate))
    await region.members.resolve_duplicate("edge-1", "none", "ann")
    assert region.members.check(identity.serial) is not None


# the authority


async def test_a_rotation_waits_for_every_node_at_each_stage_and_goes_on_by_itself(region: Membership) -> None:
    first, _ = await region.node("edge-1")
    second, _ = await region.node("edge-2")
    old = region.authority.fingerprint
    await expect_refusal(Code.CONFLICT, region.members.rotate("issue", "ann"))
    await expect_refusal(Code.FIELD_INVALID, region.members.rotate("backwards", "ann"))
    await region.members.rotate("", "ann")
    assert (await region.members.rotation()).stage == "trust"
    assert await region.waits_for() == ["agent/edge-1", "agent/edge-2"]
    await region.world.step()
    told = region.world.links.desired_sets("edge-1")[-1].trust
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


async def test_f08_a_replaced_leader_leaves_the_ca_as_it_is(region: Membership, tmp_path: Path) -> None:
    await region.members.rotate("", "ann")
    later = await region.elect_next(tmp_path)
    for stage in ("issue", "retire", ""):
        await expect_refusal(Code.NOT_LEADER, region.members.rotate(stage, "ann"))
    await expect_refusal(Code.NOT_LEADER, region.members._advance())
    assert region.world.region.leadership_loss.is_set()
    await later.members.rotate("issue", "bob")
    assert (later.authority.stage, region.authority.stage) == ("issue", "trust")


async def test_f08_a_leader_goes_on_from_what_a_replaced_one_wrote_after_its_last_commit(
    region: Membership, tmp_path: Path
) -> None:
    await region.members.rotate("", "ann")
    later = await region.elect_next(tmp_path)
    await region.authority.promote(region.world.clock.wall())  # paused between its commit and this
    later.is_listed = False
    await later.enrol("ann", Role.OPERATOR)
    later_turned = later.turned
    await expect_refusal(Code.CONFLICT, later.members.rotate("issue", "bob"))
    assert (later.authority.fingerprint, later.turned) == (region.authority.fingerprint, later_turned + 1)
    await region.authority.retire(region.world.clock.wall())
    await later.members._advance()
    assert (later.authority.stage, later.turned) == ("idle", later_turned + 2)
    published = later.world.region.workloads.trust
    assert published is not None
    assert published.roots == later.authority.roots
    await later.members._advance()
    assert later.turned == later_turned + 2


async def test_a_rotation_waits_until_the_federation_knows_the_next_ca(region: Membership) -> None:
    """Else it would refuse the very call that tells of it, and every other."""
    region.is_listed = False
    await region.members.rotate("", "ann")
    await region.members._advance()
    assert (region.authority.stage, await region.waits_for()) == ("trust", ["federation/federation"])
    region.is_listed = True
    await region.members._advance()
    assert region.authority.stage == "issue"


async def test_nobody_waits_for_who_was_lost_or_revoked(region: Membership) -> None:
    await region.node("lost")
    await region.node("revoked")
    await region.members.revoke("revoked", "", "gone", "ann")
    fleet = region.world.region.fleet
    fleet.fleet = fleet.fleet.with_node(replace(fleet.fleet.nodes["lost"], liveness=Liveness.LOST))
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

        def new_certificate() -> bytes:
            wall = region.world.clock.wall()
            made = region.authority.enrol_self(Role.BROKER, "broker", lifetime_s=Seconds(90 * DAY), wall=wall)
            return made.certificate_pem

        broker.shown = new_certificate()
        await region.members.rotate("", "ann")
        assert await region.waits_for() == [], "it needs nothing yet"
        await region.members._advance()
        assert await region.waits_for() == ["broker/broker"]
        broker.shown = None
        assert await region.waits_for() == ["broker/broker"], "nor is one that is away taken for ready"
        await region.members._advance()
        assert region.authority.stage == "issue"
        broker.shown = new_certificate()
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
