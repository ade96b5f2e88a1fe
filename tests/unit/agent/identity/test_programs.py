"""What the program of the identity does, and what the supervisor asks of it."""

import os
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from harness.builders import agent_values
from harness.crypto.pki import Authority, CertificateFiles
from harness.crypto.signatures import Publisher
from shoal.agent.identity import forward_key, signer
from shoal.agent.identity.forward_key import public_key_of
from shoal.agent.identity.orders import Answer, Order, RenewOrder, SignOrder
from shoal.agent.identity.programs import run_order
from shoal.agent.identity.publisher_signatures import verify_in_program
from shoal.agent.identity.signer import TOPIC, KeySigner
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.receipt import Receipt
from shoal.types.units import Wall
from shoal.wire.signing import verify

WALL = Wall(1_800_000_000.0)
DIGEST = "sha256:" + "a" * 64


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return Authority(tmp_path / "eu", "eu", WALL).issue(Role.AGENT, "edge-1")


def receipt(measured_at: float = 0.0) -> Receipt:
    return agent_values.receipt(agent_values.CPU, measured_at).receipt


class Counted:
    """Programs that run, by the class of their orders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.orders: list[str] = []
        for module in (forward_key, signer):
            monkeypatch.setattr(module, "run_order", self._run)

    def _run(self, order: Order) -> Answer:
        self.orders.append(type(order).__name__)
        return run_order(order)


async def test_receipts_are_signed_once_with_each_key(
    files: CertificateFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    signs = KeySigner(files.key, region="eu", node="edge-1")
    (first,) = await signs.sign_receipts((receipt(),))
    assert first.receipt == receipt()
    certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    verify(certificate, first.signature, "eu", "edge-1", TOPIC, first.content)
    assert await signs.sign_receipts((receipt(),)) == (first,)
    assert await signs.sign_receipts(()) == ()
    assert counted.orders == ["SignOrder"], "a session that opens asks again"
    (second,) = await signs.sign_receipts((receipt(1.0),))
    assert second.receipt.measured_at == 1.0
    renewed = Authority(tmp_path / "later", "eu", WALL).issue(Role.AGENT, "edge-1")
    renewed.key.replace(files.key)
    os.utime(files.key, ns=(1, 1))
    (third,) = await signs.sign_receipts((receipt(1.0),))
    verify(
        x509.load_pem_x509_certificate(renewed.certificate.read_bytes()),
        *(third.signature, "eu", "edge-1", TOPIC, third.content),
    )
    assert counted.orders == ["SignOrder"] * 3


@pytest.mark.parametrize("content", [None, b"", b"no key"])
def test_a_key_that_is_missing_or_unreadable_signs_nothing(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "key.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ShoalError) as caught:
        run_order(SignOrder(str(path), "eu", "edge-1", TOPIC, (b"content",)))
    assert caught.value.code is Code.UNAUTHENTICATED


def test_a_publisher_s_signature_is_verified(tmp_path: Path) -> None:
    shop = Publisher(ec.generate_private_key(ec.SECP256R1()), "shop")
    other = Publisher(ec.generate_private_key(ec.SECP256R1()), "other")
    bundle = shop.sign_digest(DIGEST, model="ocr", version=3)
    assert (verify_in_program(bundle, (shop.key,), DIGEST).model, 3) == ("ocr", 3)
    for keys, digest in (((other.key,), DIGEST), ((shop.key,), DIGEST.replace("a", "b"))):
        with pytest.raises(ShoalError) as caught:
            verify_in_program(bundle, keys, digest)
        assert caught.value.code is Code.SIGNATURE_INVALID


def test_the_forward_key_is_made_once_and_followed_when_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, path = Counted(monkeypatch), tmp_path / "forward.key"
    made = public_key_of(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert public_key_of(path) == made == _public(path)
    assert counted.orders == ["ForwardKeyOrder"]
    path.write_bytes(X25519PrivateKey.generate().private_bytes_raw())
    assert public_key_of(path) == _public(path) != made
    forward_key.public_file(path).write_text("{}")
    assert public_key_of(path) == _public(path)
    assert counted.orders == ["ForwardKeyOrder"] * 3


def _public(path: Path) -> str:
    return X25519PrivateKey.from_private_bytes(path.read_bytes()).public_key().public_bytes_raw().hex()


def test_a_program_that_ends_without_an_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.agent.identity.programs.PROGRAM", "shoal.agent.no_such_program")
    with pytest.raises(ShoalError) as caught:
        run_order(RenewOrder("127.0.0.1:1", str(tmp_path), WALL, WALL))
    assert caught.value.code is Code.INTERNAL
