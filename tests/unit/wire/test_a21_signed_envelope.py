"""A21: a message in another region's name. An envelope counts only with the right name, CA, coordinator, recipient
and bytes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from harness.builders.negotiation import award, renewal
from harness.crypto.pki import Authority
from shoal.types.agreement import Award, Notice, Renewal
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.v1 import federation_pb2
from shoal.wire import nouns
from shoal.wire.certificates import identity_of_der
from shoal.wire.signed_envelope import RegionSigner, verify_envelope

NOW = Wall(1_800_000_000.0)


class TwoRegions:
    """Two regions with CAs of their own, of which everybody knows."""

    def __init__(self, folder: Path) -> None:
        self.authorities = {name: Authority(folder / name, name, NOW) for name in ("us-east", "mallory")}

    def roots_of(self, region: str) -> tuple[str, ...]:
        known = self.authorities.get(region)
        return () if known is None else (known.certificate.read_text(),)

    def signer(
        self, region: str, *, role: Role = Role.COORDINATOR, named: str = "", valid_s: float = 3600.0
    ) -> RegionSigner:
        """named: the region that the certificate says, whoever issued it."""
        files = self.authorities[region].issue(role, "coordinator", region=named, valid_s=valid_s)
        certificate, key, _ = files.read()
        return RegionSigner(named or region, certificate, key)

    def verify(self, said: federation_pb2.Said, *, to: str = "eu-west", kind: type = Award) -> object:
        return verify_envelope(said, kind, to=to, roots_of=self.roots_of, wall=NOW)


@pytest.fixture
def regions(tmp_path: Path) -> TwoRegions:
    return TwoRegions(tmp_path)


def refusal_code(asked: Callable[[], object]) -> Code:
    with pytest.raises(ShoalError) as error:
        asked()
    return error.value.code


def test_what_a_region_says_is_heard(regions: TwoRegions) -> None:
    said = award()
    assert regions.verify(regions.signer("us-east").sign(said, "eu-west")) == said


def test_a21_in_another_regions_name(regions: TwoRegions) -> None:
    said = regions.signer("mallory").sign(award(), "eu-west")
    said.by = "us-east"
    assert refusal_code(lambda: regions.verify(said)) is Code.REGION_MISMATCH


VERSION = bytes.fromhex("a003020102")
"""Of a certificate: X.509 v3, as DER has it."""


def test_a13_a_certificate_of_a_version_that_there_is_not(regions: TwoRegions) -> None:
    """Found by the fuzzer: the library has an error of its own for that."""
    said = regions.signer("us-east").sign(award(), "eu-west")
    assert said.certificate.count(VERSION) == 1
    said.certificate = said.certificate.replace(VERSION, VERSION[:-1] + b"\x03")
    assert refusal_code(lambda: regions.verify(said)) is Code.CERT_UNTRUSTED
    assert refusal_code(lambda: identity_of_der(said.certificate)) is Code.CERT_NAME_INVALID


def test_a21_with_a_certificate_of_its_own_making(regions: TwoRegions) -> None:
    said = regions.signer("mallory", named="us-east").sign(award(), "eu-west")
    assert refusal_code(lambda: regions.verify(said)) is Code.CERT_UNTRUSTED


def test_a21_by_a_region_that_nobody_knows(regions: TwoRegions) -> None:
    said = regions.signer("mallory", named="nowhere").sign(award(), "eu-west")
    assert refusal_code(lambda: regions.verify(said)) is Code.REGION_UNKNOWN


@pytest.mark.parametrize("role", [Role.AGENT, Role.GATEWAY, Role.OPERATOR, Role.TENANT, Role.FEDERATION])
def test_a21_by_another_role_of_the_region(regions: TwoRegions, role: Role) -> None:
    said = regions.signer("us-east", role=role).sign(award(), "eu-west")
    assert refusal_code(lambda: regions.verify(said)) is Code.ROLE_DENIED


def test_a21_for_somebody_else_or_of_another_kind(regions: TwoRegions) -> None:
    said = regions.signer("us-east").sign(award(), "eu-west")
    assert refusal_code(lambda: regions.verify(said, to="ap-south")) is Code.REGION_MISMATCH
    assert refusal_code(lambda: regions.verify(said, kind=Notice)) is Code.MESSAGE_INVALID
    said.kind = "notice"
    assert refusal_code(lambda: regions.verify(said, kind=Notice)) is Code.SIGNATURE_INVALID
    said.kind, said.to = "award", "ap-south"
    assert refusal_code(lambda: regions.verify(said, to="ap-south")) is Code.SIGNATURE_INVALID


def test_a21_changed_on_the_way(regions: TwoRegions) -> None:
    said = regions.signer("us-east").sign(award(), "eu-west")
    changed = federation_pb2.Award.FromString(said.content)
    changed.term_s *= 100
    said.content = changed.SerializeToString()
    assert refusal_code(lambda: regions.verify(said)) is Code.SIGNATURE_INVALID


def test_a21_with_anothers_certificate_beside_it(regions: TwoRegions) -> None:
    theirs = regions.signer("us-east").sign(award(), "eu-west")
    said = regions.signer("mallory", named="us-east").sign(award(), "eu-west")
    said.certificate = theirs.certificate
    assert refusal_code(lambda: regions.verify(said)) is Code.SIGNATURE_INVALID


def test_a_certificate_that_ended_or_cannot_be_read(regions: TwoRegions) -> None:
    said = regions.signer("us-east", valid_s=-60.0).sign(award(), "eu-west")
    assert refusal_code(lambda: regions.verify(said)) is Code.CERT_EXPIRED
    said.certificate = b"no certificate"
    assert refusal_code(lambda: regions.verify(said)) is Code.CERT_UNTRUSTED


def test_bytes_that_are_no_message_though_signed(regions: TwoRegions) -> None:
    said = regions.signer("us-east").sign_bytes("award", b"\xff\xff", "eu-west")
    assert refusal_code(lambda: regions.verify(said)) is Code.MESSAGE_INVALID


def test_a_signer_shows_its_leaf_alone(regions: TwoRegions) -> None:
    said = regions.signer("us-east").sign(award(), "eu-west")
    shown = x509.load_der_x509_certificate(said.certificate)
    assert shown.public_bytes(serialization.Encoding.DER) == said.certificate


def test_a22_a_renewal_with_another_report_than_was_signed(regions: TwoRegions) -> None:
    """Who carries it can change neither its figures nor its number."""
    signer = regions.signer("us-east")
    true = renewal(3)
    said = signer.sign(true, "eu-west")
    assert regions.verify(said, kind=Renewal) == true
    said.content = nouns.encode(replace(true, sequence=4))
    assert refusal_code(lambda: regions.verify(said, kind=Renewal)) is Code.SIGNATURE_INVALID
    said.content = nouns.encode(replace(true, report=replace(true.report, requests=10**6)))
    assert refusal_code(lambda: regions.verify(said, kind=Renewal)) is Code.SIGNATURE_INVALID
