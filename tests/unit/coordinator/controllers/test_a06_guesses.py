"""A06: guessed join tokens. A hundred thousand guesses, on the real controller, CA and store; none succeeds."""

import base64
from pathlib import Path

import numpy as np
import pytest

from harness.fakes.meter import RecordedMeter
from harness.fakes.region import CountingIds, SteppedClock
from harness.report import IN_PROCESS, record
from shoal.coordinator import metrics
from shoal.coordinator.codec import load
from shoal.coordinator.controllers.identity import enrolment as enrolment_module
from shoal.coordinator.controllers.identity.enrolment import BEARER, GUESSES, REGION, TOKENS, Enrolment, Token
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.log.events import AUDIT, EventLog
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.codes import Code, ShoalError
from shoal.types.token import SECRET_BYTES, JoinToken, parse_join_token
from shoal.wire.enrol import new_key, request_pem

SEED = 6
ADDRESSES = 1000
EACH = 100


@pytest.mark.parametrize("role", ["tenant", "bearer"])
async def test_a06_nobody_becomes_the_tenant_of_other_regions_work(tmp_path: Path, role: str) -> None:
    clock = SteppedClock()
    store = await SqliteStore.open(tmp_path / "store", reserve_bytes=0)
    authority = FileAuthority.open(tmp_path / "ca", "eu", wall=clock.wall(), may_create=True)
    events = EventLog(store, clock, kept=1000, audit_kept=1000)
    enrolment = Enrolment(ControllerContext("eu", store, events, clock, CountingIds(), RecordedMeter()), authority)
    with pytest.raises(ShoalError, match=Code.NAME_INVALID):
        await enrolment.create(role, "guests", 3600.0, "ann")
    assert (await enrolment.create(role, "guest", 3600.0, "ann")).text
    await store.close()


async def test_tokens_are_counted_by_what_their_holder_may_do(tmp_path: Path) -> None:
    clock, meter = SteppedClock(), RecordedMeter()
    store = await SqliteStore.open(tmp_path / "store", reserve_bytes=0)
    authority = FileAuthority.open(tmp_path / "ca", "eu", wall=clock.wall(), may_create=True)
    events = EventLog(store, clock, kept=1000, audit_kept=1000)
    context = ControllerContext("eu", store, events, clock, CountingIds(), meter)
    enrolment = Enrolment(context, authority, words=(BEARER, REGION))
    for role in ("agent", "agent", "bearer", "region"):
        await enrolment.create(role, "shop", 3600.0, "ann")
    with pytest.raises(ShoalError, match=Code.FIELD_INVALID):
        await enrolment.create("agent", "shop", -1.0, "ann")
    assert meter.counts == {
        (metrics.TOKENS_CREATED, ("agent",)): 2.0,
        (metrics.TOKENS_CREATED, ("bearer",)): 1.0,
        (metrics.TOKENS_CREATED, ("region",)): 1.0,
    }
    await store.close()


@pytest.mark.timeout(200)
async def test_a06_a_hundred_thousand_guesses(tmp_path: Path) -> None:
    """From a thousand addresses at once, random ones and the prize with one bit changed; then its owner redeems it."""
    clock, meter = SteppedClock(), RecordedMeter()
    store = await SqliteStore.open(tmp_path / "store", reserve_bytes=0)
    authority = FileAuthority.open(tmp_path / "ca", "eu", wall=clock.wall(), may_create=True)
    events = EventLog(store, clock, kept=1000, audit_kept=10_000)
    enrolment = Enrolment(ControllerContext("eu", store, events, clock, CountingIds(), meter), authority)
    prize = parse_join_token((await enrolment.create("agent", "edge-1", 3600.0, "ann")).text)
    held = {each.key: each.value for each in await store.scan("")}
    csr = request_pem(new_key(), "edge-1")
    rng = np.random.default_rng(SEED)
    near = _near(prize)
    for number in range(ADDRESSES * EACH):
        guess = near[number] if number < len(near) else _guess(prize, rng.bytes(SECRET_BYTES))
        with pytest.raises(ShoalError) as refused:
            await enrolment.redeem(guess, csr, "edge-1", peer=f"10.0.{number % ADDRESSES // 250}.{number % 250}")
        assert refused.value.code in (Code.TOKEN_INVALID, Code.OVERLOADED)
        assert not any(part in str(refused.value) for part in (prize.secret, prize.ca_sha256, "edge-1", "10.0."))
    assert meter.counts == {
        (metrics.TOKENS_CREATED, ("agent",)): 1,
        (metrics.ENROLMENTS_REFUSED, (Code.TOKEN_INVALID,)): ADDRESSES * GUESSES,
        (metrics.ENROLMENTS_REFUSED, (Code.OVERLOADED,)): ADDRESSES * (EACH - GUESSES),
    }
    left = {each.key: each.value for each in await store.scan("") if not each.key.startswith(AUDIT)}
    assert left == held, "nothing is stored of a guess"
    audited = len(await store.scan(AUDIT))
    assert audited == ADDRESSES, "one entry a minute for an address"
    kept = [load(Token, each.value) for each in await store.scan(TOKENS)]
    assert not any(prize.secret in str(each) for each in kept), "a secret is kept as its hash"
    assert (await enrolment.redeem(prize.text, csr, "edge-1", peer="10.9.9.9")).name == "edge-1"
    record("A06", IN_PROCESS, ADDRESSES * EACH, seed=SEED, redeemed=0, audit_entries=audited, addresses=ADDRESSES)
    await store.close()


async def test_a06_who_guesses_locks_nobody_out_behind_the_same_address(tmp_path: Path) -> None:
    clock, meter = SteppedClock(), RecordedMeter()
    store = await SqliteStore.open(tmp_path / "store", reserve_bytes=0)
    authority = FileAuthority.open(tmp_path / "ca", "eu", wall=clock.wall(), may_create=True)
    events = EventLog(store, clock, kept=1000, audit_kept=1000)
    enrolment = Enrolment(ControllerContext("eu", store, events, clock, CountingIds(), meter), authority)
    token = await enrolment.create("agent", "edge-1", 3600.0, "ann")
    csr = request_pem(new_key(), "edge-1")
    for _ in range(5 * GUESSES):
        with pytest.raises(ShoalError):
            await enrolment.redeem("nonsense", csr, "edge-1", peer="10.0.0.1")
    slowed_down = meter.with_code(metrics.ENROLMENTS_REFUSED, Code.OVERLOADED)
    assert slowed_down == 4 * GUESSES, "the guesser is slowed down"
    with pytest.raises(ShoalError, match=Code.CSR_DENIED):
        await enrolment.redeem(token.text, b"no request", "edge-1", peer="10.0.0.2")
    assert (await enrolment.redeem(token.text, csr, "edge-1", peer="10.0.0.1")).name == "edge-1"
    await store.close()


async def test_a06_addresses_are_remembered_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The busiest guesser stays slowed down while others come and go; those that were quiet for longest go first."""
    monkeypatch.setattr(enrolment_module, "MOST_ADDRESSES", 8)
    clock = SteppedClock()
    store = await SqliteStore.open(tmp_path / "store", reserve_bytes=0)
    authority = FileAuthority.open(tmp_path / "ca", "eu", wall=clock.wall(), may_create=True)
    events = EventLog(store, clock, kept=10, audit_kept=1000)
    enrolment = Enrolment(ControllerContext("eu", store, events, clock, CountingIds(), RecordedMeter()), authority)

    async def guess(peer: str) -> Code:
        with pytest.raises(ShoalError) as refused:
            await enrolment.redeem("nonsense", b"", "edge-1", peer=peer)
        return refused.value.code

    for _ in range(GUESSES):
        assert await guess("10.0.0.1") is Code.TOKEN_INVALID
    for number in range(50):
        assert await guess(f"10.0.1.{number}") is Code.TOKEN_INVALID
        assert await guess("10.0.0.1") is Code.OVERLOADED
    for number in range(8):
        await guess(f"10.0.2.{number}")
    assert await guess("10.0.0.1") is Code.TOKEN_INVALID, "forgotten once eight others had called since"
    await store.close()


def _guess(prize: JoinToken, secret: bytes) -> str:
    return JoinToken(prize.region, prize.ca_sha256, _text(secret)).text


def _near(prize: JoinToken) -> list[str]:
    """Every secret that differs from the prize by one bit."""
    secret = _bytes(prize.secret)
    return [
        _guess(prize, bytes(byte ^ (1 << bit) if at == place else byte for at, byte in enumerate(secret)))
        for place in range(len(secret))
        for bit in range(8)
    ]


def _text(secret: bytes) -> str:
    return base64.urlsafe_b64encode(secret).rstrip(b"=").decode()


def _bytes(secret: str) -> bytes:
    return base64.urlsafe_b64decode(secret + "=" * (-len(secret) % 4))
