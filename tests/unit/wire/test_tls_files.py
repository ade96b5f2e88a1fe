"""The ssl module reads of a certificate what the cryptography library does."""

from pathlib import Path

import pytest
from cryptography import x509

from harness.crypto.pki import Authority, CertificateFiles
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.wire import tls_files
from shoal.wire.certificates import ca_fingerprint, identity_of_pem
from shoal.wire.tls_files import fingerprint_of, is_issued_by, read_identity, split_certificates

WALL = Wall(1_800_000_000.0)


def code_of(files: CertificateFiles) -> Code:
    with pytest.raises(ShoalError) as caught:
        read_identity(files.certificate, files.key)
    return caught.value.code


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "eu", "eu", WALL)


@pytest.mark.parametrize(("begins_s", "valid_s"), [(-3600.0, 3600.0), (-7200.0, -3600.0), (3600.0, 7200.0)])
@pytest.mark.parametrize("role", list(Role))
def test_both_libraries_read_the_same_whenever_it_is_valid(
    authority: Authority, role: Role, begins_s: float, valid_s: float
) -> None:
    files = authority.issue(role, "edge-1", begins_s=begins_s, valid_s=valid_s)
    assert read_identity(files.certificate, files.key) == identity_of_pem(files.certificate.read_bytes())


def test_certificates_after_the_first_are_for_others(authority: Authority) -> None:
    """A server shows them. They say nothing of the first one's issuer."""
    files = authority.issue(Role.AGENT, "edge-1")
    alone = identity_of_pem(files.certificate.read_bytes())
    files.certificate.write_bytes(files.certificate.read_bytes() + authority.certificate.read_bytes())
    assert read_identity(files.certificate, files.key) == alone
    assert is_issued_by(files.certificate, files.key, authority.certificate.read_text())


def test_an_issuer_is_known_by_its_key_not_by_its_name(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue(Role.AGENT, "edge-1", valid_s=-60.0)
    namesake = Authority(tmp_path / "other", "eu", WALL)
    assert is_issued_by(files.certificate, files.key, authority.certificate.read_text()), "whenever it was valid"
    assert not is_issued_by(files.certificate, files.key, namesake.certificate.read_text())
    assert not is_issued_by(files.certificate, files.key, "")


def test_where_python_tells_no_chain_nobody_issued_it(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    files = authority.issue(Role.AGENT, "edge-1")
    monkeypatch.setattr(tls_files, "verified_chain", lambda _: ())
    assert not is_issued_by(files.certificate, files.key, authority.certificate.read_text())


@pytest.mark.parametrize("uris", [(), ("shoal://eu/agent/a", "shoal://eu/agent/b"), ("https://eu/agent/a",)])
def test_other_names_than_one_of_ours_are_refused(authority: Authority, uris: tuple[str, ...]) -> None:
    assert code_of(authority.issue(Role.AGENT, "edge-1", uris=uris)) is Code.CERT_NAME_INVALID


@pytest.mark.parametrize("content", [b"", b"no certificate", b"\xff\xfe"])
def test_a_file_without_a_certificate_is_refused(authority: Authority, content: bytes) -> None:
    files = authority.issue(Role.AGENT, "edge-1")
    files.certificate.write_bytes(content)
    assert code_of(files) is Code.CERT_NAME_INVALID


def test_a_certificate_of_another_key_is_refused(authority: Authority) -> None:
    files, other = authority.issue(Role.AGENT, "edge-1"), authority.issue(Role.AGENT, "edge-2")
    files.key.write_bytes(other.key.read_bytes())
    assert code_of(files) is Code.CERT_NAME_INVALID


def test_authorities_in_one_file_are_told_apart_and_named_as_a_token_names_them(
    authority: Authority, tmp_path: Path
) -> None:
    pems = [each.certificate.read_text() for each in (authority, Authority(tmp_path / "other", "eu", WALL))]
    found = split_certificates("# both\n" + "\n\n".join(pems))
    assert found == tuple(pems)
    assert list(map(fingerprint_of, found)) == [
        ca_fingerprint(x509.load_pem_x509_certificate(pem.encode())) for pem in pems
    ]


@pytest.mark.parametrize(
    "pem",
    [
        "",
        "no certificate",
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----",
    ],
)
def test_what_is_no_authority_has_no_fingerprint(pem: str) -> None:
    with pytest.raises(ShoalError) as caught:
        fingerprint_of(pem)
    assert caught.value.code is Code.MESSAGE_INVALID
