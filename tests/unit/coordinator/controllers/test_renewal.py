"""What a certificate that is held may buy, on the real controller, CA and store; the clock moves when told (A12)."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.fakes.region import CountingIds, SteppedClock
from harness.report import IN_PROCESS, record
from shoal.coordinator import codec
from shoal.coordinator.controllers.identity.certificates import (
    EXPIRED_KEPT,
    GRACE_S,
    IdentityRecord,
    key_of,
    with_issued_certificate,
)
from shoal.coordinator.controllers.identity.renewal import (
    FAILURE_BURST,
    NONCE_S,
    RENEWAL_BURST,
    RENEWALS_PER_S,
    CertificateRenewal,
    RenewedCertificate,
)
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.log.events import AUDIT, EventLog
from shoal.coordinator.controllers.region.region import NoMeter
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.ports import IssuedCertificate
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.units import Seconds, Wall
from shoal.wire.certificates import identity_of_pem
from shoal.wire.enrol import RENEWAL, new_key, request_pem
from shoal.wire.signing import sign

LIFE_S = Seconds(86400.0)


@dataclass
class Counter:
    """Where renewals are asked for."""

    store: SqliteStore
    clock: SteppedClock
    authority: FileAuthority
    renewal: CertificateRenewal
    forbidden: dict[str, Refusal]

    @classmethod
    async def open(cls, folder: Path) -> "Counter":
        clock = SteppedClock()
        store = await SqliteStore.open(folder / "store", reserve_bytes=0)
        authority = FileAuthority.open(folder / "ca", "eu", wall=clock.wall(), may_create=True)
        forbidden: dict[str, Refusal] = {}
        events = EventLog(store, clock, kept=1000, audit_kept=1000)
        context = ControllerContext("eu", store, events, clock, CountingIds(), NoMeter())
        renewal = CertificateRenewal(context, authority, lambda identity: forbidden.get(identity.serial))
        return cls(store, clock, authority, renewal, forbidden)

    def holder(self, name: str = "edge-1", role: Role = Role.AGENT) -> "Holder":
        key = new_key()
        made = self.authority.issue(
            request_pem(key, name), role, name, hosts=(), lifetime_s=LIFE_S, wall=self.clock.wall()
        )
        return Holder(self, key, made.pem)


@dataclass
class Holder:
    """Whoever has this key and this certificate."""

    counter: Counter
    key: EllipticCurvePrivateKey
    pem: bytes

    @property
    def identity(self) -> Identity:
        return identity_of_pem(self.pem)

    async def renews(self, nonce: str = "", *, peer: str = "10.0.0.1") -> "Holder":
        nonce = nonce or self.counter.renewal.challenge()
        key = new_key()
        csr = request_pem(key, "")
        signature = sign(self.key, "eu", self.identity.name, RENEWAL, nonce.encode() + csr)
        renewed: RenewedCertificate = await self.counter.renewal.renew(self.pem, csr, nonce, signature, peer=peer)
        assert renewed.identity.uri == self.identity.uri
        return Holder(self.counter, key, renewed.certificate_pem)

    async def is_denied(self, nonce: str = "", *, peer: str = "10.0.0.1") -> str:
        with pytest.raises(ShoalError) as error:
            await self.renews(nonce, peer=peer)
        assert error.value.code is Code.RENEW_DENIED, str(error.value)
        return error.value.refusal.found


@pytest.fixture
async def counter(tmp_path: Path) -> AsyncIterator[Counter]:
    found = await Counter.open(tmp_path)
    yield found
    await found.store.close()


async def test_a12_within_its_grace_to_the_second(counter: Counter) -> None:
    in_time, late = counter.holder("in-time"), counter.holder("late")
    counter.clock.advance(LIFE_S + GRACE_S)
    fresh = await in_time.renews()
    assert fresh.identity.not_after == pytest.approx(counter.clock.wall() + LIFE_S, abs=1.0)
    counter.clock.advance(2.0)
    assert "ended" in await late.is_denied()


async def test_a12_a_nonce_is_good_once_for_a_minute_and_only_as_it_was_made(counter: Counter) -> None:
    holder, nonce = counter.holder(), counter.renewal.challenge()
    await holder.renews(nonce)
    await holder.is_denied(nonce)
    old = counter.renewal.challenge()
    counter.clock.advance(NONCE_S)
    await holder.is_denied(old)
    counter.clock.advance(3600.0)
    await holder.renews()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 10_000),
    st.one_of(st.none(), st.sampled_from("0123456789abcdef.-x")),
    st.text(st.characters(codec="ascii"), max_size=80),
    st.integers(0, 65535),
)
async def test_a12_no_nonce_but_ours(counter: Counter, at: int, mark: str | None, text: str, address: int) -> None:
    """Made up, or one of ours with any character changed or from there on another."""
    holder, ours = counter.holder(), counter.renewal.challenge()
    place = at % len(ours)
    other = ours[:place] + (text if mark is None else mark + ours[place + 1 :])
    if other not in (ours, ""):
        await holder.is_denied(other, peer=f"10.0.{address // 256}.{address % 256}")


async def test_a12_whoever_is_forbidden_to_stays_so(counter: Counter) -> None:
    holder = counter.holder()
    counter.forbidden[holder.identity.serial] = Refusal(Code.CERT_REVOKED, "it was stolen", "", "enrol again")
    assert "CERT_REVOKED" in await holder.is_denied()
    del counter.forbidden[holder.identity.serial]
    await holder.renews()


async def test_a12_a_key_gathers_no_certificates(counter: Counter) -> None:
    holder, other = counter.holder(), counter.holder("edge-2")
    for _ in range(RENEWAL_BURST):
        await holder.renews()
    assert "renewed" in await holder.is_denied()
    await other.renews()
    counter.clock.advance(1 / RENEWALS_PER_S)
    await holder.renews()


async def test_a12_failures_of_one_address_cost_nobody_else_there_and_leave_one_trace(counter: Counter) -> None:
    honest, liar = counter.holder("honest"), counter.holder("liar")
    for _ in range(5 * FAILURE_BURST):
        await liar.is_denied("made.up", peer="10.0.0.66")
    assert "too many" in await liar.is_denied("made.up", peer="10.0.0.66")
    await honest.renews(peer="10.0.0.66")
    assert len(await counter.store.scan(AUDIT)) == 1
    record("A12", IN_PROCESS, 5 * FAILURE_BURST, audit_entries=1)


async def test_an_older_certificate_is_followed_by_the_newest_but_a_lost_reply_locks_nobody_out(
    counter: Counter,
) -> None:
    first = counter.holder()
    second = await first.renews()
    third = await first.renews()  # the reply that brought the second was lost
    counter.clock.advance(LIFE_S + 3600.0)
    for holder in (second, third):
        await holder.renews()
    assert "newer" in await first.is_denied()


async def test_a_store_that_was_lost_since_locks_nobody_out(counter: Counter) -> None:
    """It names older certificates than the node holds: the newer one was issued by the store that is gone."""
    first = counter.holder()
    second = await first.renews()
    key = key_of(Role.AGENT, "edge-1")
    kept = await counter.store.read(key)
    assert kept is not None
    counter.clock.advance(3600.0)
    third = await second.renews()
    stored = codec.load(IdentityRecord, kept.value)
    assert third.identity.serial not in [each.serial for each in stored.held]
    now = await counter.store.read(key)
    assert now is not None
    await counter.renewal._events.commit({key: kept.value}, expect={key: now.revision})
    assert (await third.renews()).identity.name == "edge-1"


async def test_a12_who_was_away_over_a_rotation_comes_back_and_who_has_the_old_ca_s_key_does_not(
    counter: Counter,
) -> None:
    away = await counter.holder("away").renews()
    thief = counter.holder("away")
    stranger, boss = counter.holder("stranger"), counter.holder("boss", Role.OPERATOR)
    counter.clock.advance(3600.0)
    late_thief = counter.holder("away")  # what a key that was stolen could sign at any time, with any date
    wall = counter.clock.wall()
    for step in (counter.authority.begin, counter.authority.promote):
        await step(wall)
        assert counter.authority.fingerprints
    await counter.authority.retire(wall)
    for number, forged in enumerate((thief, stranger, boss, late_thief)):
        assert "retired" in await forged.is_denied(peer=f"10.0.1.{number}")
    back = await away.renews()
    assert counter.authority.recognise(back.pem).issuer == counter.authority.fingerprint


@given(st.lists(st.tuples(st.floats(0.0, 40 * 86400.0), st.floats(60.0, 30 * 86400.0)), max_size=30))
def test_a_record_holds_what_may_be_shown_and_few_that_may_only_be_renewed(steps: list[tuple[float, float]]) -> None:
    """Whatever is issued whenever: it does not grow with the certificates that are over."""
    wall, known = Wall(1e9), None
    for number, (pause, life) in enumerate(steps):
        wall = Wall(wall + pause)
        made = IssuedCertificate(b"", str(number), Wall(wall + life), "ca")
        known = with_issued_certificate(known, "shoal://eu/agent/n", made, "token", wall, made_by="")
        held = known.certificates(wall)
        assert held[-1].serial == str(number)
        ended = [each for each in held if each.not_after <= wall]
        assert len(ended) <= EXPIRED_KEPT
        assert all(wall < each.not_after + GRACE_S for each in held)
        good = {str(at) for at, ends in _expiries(steps[: number + 1]).items() if ends > wall}
        assert {each.serial for each in held if each.not_after > wall} == good


def _expiries(steps: list[tuple[float, float]]) -> dict[int, float]:
    found, wall = {}, 1e9
    for number, (pause, life) in enumerate(steps):
        wall += pause
        found[number] = wall + life
    return found
