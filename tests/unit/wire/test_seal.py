"""Envelopes: what was changed, moved, forged or repeated is dropped with a code, and changes nothing."""

from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.crypto.pki import Authority
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.mqtt_frames import Opener, Sealer, Unsealed
from shoal.types.topics import Channel
from shoal.types.units import Wall
from shoal.wire.limits import LINK_BYTES
from shoal.wire.seal import (
    Ephemeral,
    SessionKey,
    SigningIdentity,
    sign,
    verify_signed_message,
)
from shoal.wire.trust import check_certificate

WALL = Wall(1_800_000_000.0)
REGION = "eu"
KEY = SessionKey(b"k" * 32, REGION, "edge-1", 7)
CONTENT = b"what was said"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), REGION, WALL)


@pytest.fixture(scope="module")
def signer(authority: Authority) -> SigningIdentity:
    certificate, key, _ = authority.issue(Role.AGENT, "edge-1").read()
    return SigningIdentity.from_pem(key, certificate)


class Trusting:
    def __init__(self, *authorities: Authority, wall: Wall = WALL) -> None:
        self._authorities = [x509.load_pem_x509_certificate(each.certificate.read_bytes()) for each in authorities]
        self._wall = wall

    def __call__(self, certificate: x509.Certificate) -> None:
        roles = frozenset({Role.AGENT})
        check_certificate(certificate, self._authorities, region=REGION, roles=roles, wall=self._wall)


def outcome(opener: Opener, data: bytes) -> Unsealed | Code:
    try:
        return opener.open(Channel.STATUS, data)
    except ShoalError as error:
        return error.code


def refusal_code(channel: Channel, data: bytes, opener: Opener) -> Code:
    with pytest.raises(ShoalError) as caught:
        opener.open(channel, data)
    return caught.value.code


def test_signed_content_comes_back_with_its_signer(authority: Authority, signer: SigningIdentity) -> None:
    data = sign(signer, REGION, "edge-1", Channel.HELLO, CONTENT)
    content, certificate = verify_signed_message(data, Trusting(authority), REGION, "edge-1", Channel.HELLO)
    assert content == CONTENT
    assert certificate == x509.load_der_x509_certificate(signer.certificate)


@pytest.mark.parametrize(
    ("region", "node", "channel"),
    [("us", "edge-1", Channel.HELLO), (REGION, "edge-2", Channel.HELLO), (REGION, "edge-1", Channel.ONLINE)],
)
def test_a11_signed_content_cannot_be_moved(
    authority: Authority, signer: SigningIdentity, region: str, node: str, channel: Channel
) -> None:
    data = sign(signer, REGION, "edge-1", Channel.HELLO, CONTENT)
    with pytest.raises(ShoalError) as caught:
        verify_signed_message(data, Trusting(authority), region, node, channel)
    assert caught.value.code is Code.SIGNATURE_INVALID


def test_a02_a_signer_of_another_authority(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, REGION, WALL)
    certificate, key, _ = other.issue(Role.AGENT, "edge-1").read()
    data = sign(SigningIdentity.from_pem(key, certificate), REGION, "edge-1", Channel.HELLO, CONTENT)
    with pytest.raises(ShoalError) as caught:
        verify_signed_message(data, Trusting(authority), REGION, "edge-1", Channel.HELLO)
    assert caught.value.code is Code.CERT_UNTRUSTED


@pytest.mark.parametrize(
    ("role", "region", "later_s", "code"),
    [
        (Role.OPERATOR, REGION, 0.0, Code.ROLE_DENIED),
        (Role.AGENT, "us", 0.0, Code.REGION_MISMATCH),
        (Role.AGENT, REGION, 7200.0, Code.CERT_EXPIRED),
        (Role.AGENT, REGION, -7200.0, Code.CERT_NOT_YET_VALID),
    ],
)
def test_a_signer_that_may_not_sign_here(
    authority: Authority, role: Role, region: str, later_s: float, code: Code
) -> None:
    certificate, key, _ = authority.issue(role, "edge-1", region=region).read()
    data = sign(SigningIdentity.from_pem(key, certificate), REGION, "edge-1", Channel.HELLO, CONTENT)
    with pytest.raises(ShoalError) as caught:
        verify_signed_message(data, Trusting(authority, wall=Wall(WALL + later_s)), REGION, "edge-1", Channel.HELLO)
    assert caught.value.code is code


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 2**20))
def test_a11_any_bit_of_a_signed_message(authority: Authority, signer: SigningIdentity, position: int) -> None:
    """Dropped; or, where a bit of a certificate's encoding means nothing, just what was sent by whom it was sent."""
    message = bytearray(sign(signer, REGION, "edge-1", Channel.HELLO, CONTENT))
    bit = position % (len(message) * 8)
    message[bit // 8] ^= 1 << bit % 8
    try:
        content, certificate = verify_signed_message(
            bytes(message), Trusting(authority), REGION, "edge-1", Channel.HELLO
        )
    except ShoalError:
        return
    assert content == CONTENT
    assert certificate.public_key() == signer.key.public_key()


def test_both_ends_agree_and_nobody_else() -> None:
    agent, coordinator, broker = Ephemeral(), Ephemeral(), Ephemeral()
    key = agent.agree(coordinator.public, region=REGION, node="edge-1", nonce="n")
    assert coordinator.agree(agent.public, region=REGION, node="edge-1", nonce="n") == key
    assert broker.agree(agent.public, region=REGION, node="edge-1", nonce="n") != key
    assert coordinator.agree(agent.public, region=REGION, node="edge-2", nonce="n") != key
    assert coordinator.agree(agent.public, region=REGION, node="edge-1", nonce="m") != key


@pytest.mark.parametrize("public", [b"", b"\x04" + bytes(64), b"x" * 65, bytes(1000)])
def test_a_half_that_is_no_point(public: bytes) -> None:
    with pytest.raises(ShoalError) as caught:
        Ephemeral().agree(public, region=REGION, node="edge-1", nonce="n")
    assert caught.value.code is Code.MESSAGE_INVALID


@given(st.lists(st.tuples(st.sampled_from(Channel), st.binary(max_size=50), st.booleans()), max_size=20))
def test_sealed_messages_arrive_as_they_were_sent(sent: list[tuple[Channel, bytes, bool]]) -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    for channel, content, last in sent:
        unsealed = opener.open(channel, sealer.seal(channel, content, last=last))
        assert (unsealed.content, unsealed.last) == (content, last)


@given(st.lists(st.integers(0, 9), max_size=40))
def test_i7_replayed_and_reordered_messages_never_go_back(order: list[int]) -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    sealed = [sealer.seal(Channel.STATUS, bytes([number])) for number in range(10)]
    newest = -1
    for number in order:
        found = outcome(opener, sealed[number])
        assert found == (Unsealed(bytes([number]), False) if number > newest else Code.MESSAGE_REPLAYED)
        newest = max(newest, number)


@settings(max_examples=300)
@given(data=st.data(), last=st.booleans())
def test_a11_any_bit_of_a_sealed_message(data: st.DataObject, last: bool) -> None:
    """Dropped; or, where a bit of the encoding means nothing, just what was sent."""
    sealed = bytearray(Sealer(KEY).seal(Channel.STATUS, CONTENT, last=last))
    bit = data.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    dropped = (Code.SIGNATURE_INVALID, Code.EPOCH_STALE, Code.MESSAGE_INVALID)
    assert outcome(Opener(KEY), bytes(sealed)) in (Unsealed(CONTENT, last), *dropped)


def test_a11_a_sealed_message_cannot_be_moved() -> None:
    sealed = Sealer(KEY).seal(Channel.STATUS, CONTENT)
    assert refusal_code(Channel.CAPABILITY, sealed, Opener(KEY)) is Code.SIGNATURE_INVALID
    for other in (SessionKey(KEY.key, "us", "edge-1", 7), SessionKey(KEY.key, REGION, "edge-2", 7)):
        assert refusal_code(Channel.STATUS, sealed, Opener(other)) is Code.SIGNATURE_INVALID
    assert (
        refusal_code(Channel.STATUS, sealed, Opener(SessionKey(b"o" * 32, REGION, "edge-1", 7)))
        is Code.SIGNATURE_INVALID
    )
    assert refusal_code(Channel.STATUS, sealed, Opener(SessionKey(KEY.key, REGION, "edge-1", 8))) is Code.EPOCH_STALE


def test_a_refused_message_does_not_hide_the_real_one() -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    forged = Sealer(SessionKey(b"o" * 32, REGION, "edge-1", 7))
    for _ in range(5):
        assert refusal_code(Channel.STATUS, forged.seal(Channel.STATUS, b"junk"), opener) is Code.SIGNATURE_INVALID
    assert opener.open(Channel.STATUS, sealer.seal(Channel.STATUS, CONTENT)).content == CONTENT


def test_a14_one_byte_too_many() -> None:
    assert Opener(KEY).open(Channel.STATUS, Sealer(KEY).seal(Channel.STATUS, bytes(LINK_BYTES))).content
    with pytest.raises(ShoalError) as caught:
        Sealer(KEY).seal(Channel.STATUS, bytes(LINK_BYTES + 1))
    assert caught.value.code is Code.TOO_LARGE
    assert refusal_code(Channel.STATUS, bytes(LINK_BYTES + 5000), Opener(KEY)) is Code.TOO_LARGE


@given(st.binary(max_size=300))
def test_bytes_that_are_no_message(junk: bytes) -> None:
    assert refusal_code(Channel.STATUS, junk, Opener(KEY)) in (
        Code.MESSAGE_INVALID,
        Code.EPOCH_STALE,
        Code.SIGNATURE_INVALID,
    )
