"""Which authority vouches for which names, at a gateway that believes those of several regions."""

import ssl
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.crypto.handshakes import client_context, server_context, shake_hands
from harness.crypto.pki import Authority, CertificateFiles
from shoal.agent.dataplane import issuers
from shoal.agent.dataplane.transport import TlsFiles
from shoal.agent.dataplane.trust import Authorities
from shoal.host.peer_certificate import PeerCertificate, VerifiedCertificate
from shoal.types.assignment import PeerTrust
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.wire.certificates import identity_of_pem

NOW = 1_800_000_000.0
LIBRARY = "shoal.agent.dataplane.issuers"


@pytest.fixture
def west(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "west", "west", NOW)


@pytest.fixture
def east(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "east", "east", NOW)


@pytest.fixture
def authorities(west: Authority, east: Authority) -> Authorities:
    own = west.issue(Role.GATEWAY, "g1")
    found = Authorities("west", TlsFiles(own.certificate, own.key, own.authority))
    found.configure((trust(east),))
    return found


def trust(of: Authority, *roots: str) -> PeerTrust:
    return PeerTrust(of.region, roots or (of.certificate.read_text(),), ("g9",), ("ag-1",))


IdentityOrCode = Callable[[Authorities, CertificateFiles], str]


@pytest.fixture(params=["told by the handshake", "by the library"])
def identity_or_code(request: pytest.FixtureRequest, west: Authority) -> IdentityOrCode:
    """Whom a certificate names, or why it counts for nobody."""

    def find(authorities: Authorities, files: CertificateFiles) -> str:
        certificate = PeerCertificate(files.certificate.read_bytes())
        if request.param == "told by the handshake":
            server = server_context(west.issue(Role.GATEWAY, "g1"), files.issuer)
            certificate = shake_hands(server, client_context(files)).certificate
        try:
            return authorities.identity(certificate).uri
        except ShoalError as error:
            return error.code

    return find


def test_each_authority_vouches_for_names_of_its_own_region(
    authorities: Authorities, west: Authority, east: Authority, identity_or_code: IdentityOrCode
) -> None:
    assert identity_or_code(authorities, west.issue(Role.AGENT, "n1")) == "shoal://west/agent/n1"
    assert identity_or_code(authorities, east.issue(Role.GATEWAY, "g9")) == "shoal://east/gateway/g9"
    assert identity_or_code(authorities, east.issue(Role.OPERATOR, "ops", region="west")) == Code.CERT_UNTRUSTED
    assert identity_or_code(authorities, west.issue(Role.GATEWAY, "g9", region="east")) == Code.CERT_UNTRUSTED
    assert identity_or_code(authorities, east.issue(Role.GATEWAY, "g9", region="north")) == Code.REGION_MISMATCH


def test_a_region_that_leaves_is_believed_no_more(
    authorities: Authorities, east: Authority, identity_or_code: IdentityOrCode
) -> None:
    files = east.issue(Role.GATEWAY, "g9")
    before = authorities.handshake
    assert identity_or_code(authorities, files) == "shoal://east/gateway/g9"
    authorities.configure(())
    assert identity_or_code(authorities, files) == Code.REGION_MISMATCH
    assert authorities.roots_of("east", "g9") is None
    assert authorities.handshake.pem == b""
    assert authorities.handshake.version > before.version


def test_told_the_same_again_nothing_is_read_anew(authorities: Authorities, east: Authority) -> None:
    before = authorities.handshake
    authorities.configure((trust(east),))
    assert authorities.handshake is before


def test_only_gateways_that_an_agreement_names_are_called(authorities: Authorities, east: Authority) -> None:
    assert authorities.roots_of("east", "g9") == east.certificate.read_bytes()
    assert authorities.roots_of("east", "g8") is None
    assert authorities.roots_of("north", "g9") is None


def test_our_own_new_authority_counts_without_being_told(
    authorities: Authorities, west: Authority, tmp_path: Path, identity_or_code: IdentityOrCode
) -> None:
    second = Authority(tmp_path / "second", "west", NOW)
    files = second.issue(Role.AGENT, "n2")
    assert identity_or_code(authorities, files) == Code.CERT_UNTRUSTED
    west.certificate.write_bytes(west.certificate.read_bytes() + second.certificate.read_bytes())
    assert identity_or_code(authorities, files) == "shoal://west/agent/n2"


def test_an_authority_of_ours_that_went_vouches_for_who_came_while_it_stood(
    authorities: Authorities, west: Authority, east: Authority, tmp_path: Path, identity_or_code: IdentityOrCode
) -> None:
    """New connections are the handshake's to refuse; one that is open does not end with the rotation (F30)."""
    files = west.issue(Role.TENANT, "acme")
    second = Authority(tmp_path / "second", "west", NOW)
    west.certificate.write_bytes(second.certificate.read_bytes())
    authorities.configure((trust(east),))
    assert identity_or_code(authorities, files) == "shoal://west/tenant/acme"
    assert identity_or_code(authorities, second.issue(Role.TENANT, "acme")) == "shoal://west/tenant/acme"


def test_a_root_that_bears_our_name_or_none_is_left_out(
    authorities: Authorities, east: Authority, tmp_path: Path, identity_or_code: IdentityOrCode
) -> None:
    """Two authorities of one name, and TLS may look for a signature at the wrong one: ours would be shadowed."""
    forged = Authority(tmp_path / "forged", "west", NOW)
    authorities.configure((trust(east, forged.certificate.read_text(), "no PEM", east.certificate.read_text()),))
    assert authorities.handshake.pem == east.certificate.read_bytes()
    assert identity_or_code(authorities, forged.issue(Role.OPERATOR, "ops")) == Code.CERT_UNTRUSTED


def test_a_root_whose_subject_cannot_be_read_hides_no_other(
    authorities: Authorities, east: Authority, tmp_path: Path, identity_or_code: IdentityOrCode
) -> None:
    """The library reads a subject when it is asked for it, and not before."""
    south = Authority(tmp_path / "south", "south", NOW)
    der = ssl.PEM_cert_to_DER_cert(south.certificate.read_text())
    at = der.rindex(b"Shoal region south")
    broken = ssl.DER_cert_to_PEM_cert(der[:at] + b"\xff\xfe" + der[at + 2 :])
    authorities.configure((trust(south, broken), trust(east)))
    assert authorities.handshake.pem == east.certificate.read_bytes()
    assert identity_or_code(authorities, south.issue(Role.GATEWAY, "g9")) == Code.CERT_UNTRUSTED


@pytest.fixture(params=[ImportError("gone"), OSError(24, "too many"), SyntaxError(), EOFError(), AttributeError("old")])
def without_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import ends so: an installation that was replaced, a file that is half written, no descriptor left."""

    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == LIBRARY:
                raise request.param

    monkeypatch.delitem(sys.modules, LIBRARY, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])


@pytest.fixture
def alone(west: Authority) -> Authorities:
    """Of a region that has no agreements."""
    own = west.issue(Role.GATEWAY, "g1")
    found = Authorities("west", TlsFiles(own.certificate, own.key, own.authority))
    found.configure(())
    return found


@pytest.mark.usefixtures("without_library")
def test_what_a_handshake_tells_needs_no_library(alone: Authorities, west: Authority) -> None:
    server = server_context(west.issue(Role.GATEWAY, "g1"), west.certificate.read_text())
    certificate = shake_hands(server, client_context(west.issue(Role.AGENT, "n1"))).certificate
    assert alone.identity(certificate).uri == "shoal://west/agent/n1"


@pytest.mark.usefixtures("without_library")
def test_without_the_library_nobody_is_believed_whom_it_would_verify(
    alone: Authorities, west: Authority, east: Authority
) -> None:
    files = west.issue(Role.AGENT, "n1")
    with pytest.raises(ShoalError, match=Code.INTERNAL):
        alone.identity(PeerCertificate(files.certificate.read_bytes()))
    identity = identity_of_pem(files.certificate.read_bytes())
    by_another = VerifiedCertificate(identity, ssl.PEM_cert_to_DER_cert(east.certificate.read_text()))
    with pytest.raises(ShoalError, match=Code.INTERNAL):
        alone.identity(PeerCertificate(files.certificate.read_bytes(), by_another))


@pytest.mark.usefixtures("without_library")
def test_without_the_library_other_regions_are_refused_until_it_is_back(
    alone: Authorities, east: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with pytest.raises(ShoalError, match=Code.INTERNAL):
            alone.configure((trust(east),))
        assert alone.roots_of("east", "g9") is None
        assert alone.handshake.pem == b""
    alone.configure(())
    monkeypatch.undo()
    alone.configure((trust(east),))
    assert alone.roots_of("east", "g9") == east.certificate.read_bytes()


def test_an_error_of_the_librarys_first_use_is_one_of_its_import(
    alone: Authorities, west: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports more of itself when it verifies a first signature."""

    def read(*_: object) -> None:
        raise OSError(24, "too many open files")

    certificate = PeerCertificate(west.issue(Role.AGENT, "n1").certificate.read_bytes())
    monkeypatch.setattr(issuers, "has_known_issuer", read)
    with pytest.raises(ShoalError, match=Code.INTERNAL):
        alone.identity(certificate)
    monkeypatch.undo()
    assert alone.identity(certificate).uri == "shoal://west/agent/n1", "an error is not remembered"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_who_resumes_a_session_is_verified_by_the_library(
    authorities: Authorities, west: Authority, east: Authority, version: ssl.TLSVersion
) -> None:
    own, found = west.issue(Role.GATEWAY, "g1"), []
    for files in (west.issue(Role.AGENT, "n1"), east.issue(Role.OPERATOR, "ops", region="west")):
        server, client = server_context(own, files.issuer), client_context(files)
        client.maximum_version = version
        certificate = shake_hands(server, client, shake_hands(server, client).session).certificate
        assert certificate.verified is None
        try:
            found.append(authorities.identity(certificate).uri)
        except ShoalError as error:
            found.append(error.code)
    assert found == ["shoal://west/agent/n1", Code.CERT_UNTRUSTED]


def test_the_same_authority_as_another_one_certified_it_vouches_too(
    authorities: Authorities, west: Authority, east: Authority, tmp_path: Path
) -> None:
    """The handshake may find another way to a CA that it trusts: the library looks whose key it was."""
    own, other, found = west.issue(Role.GATEWAY, "g1"), Authority(tmp_path / "other", "north", NOW), []
    for of, role, name in ((west, Role.AGENT, "n1"), (east, Role.OPERATOR, "ops")):
        server = server_context(own, other.certify(of))
        server.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        shown = shake_hands(server, client_context(of.issue(role, name, region="west"))).certificate
        assert shown.verified is not None
        assert shown.verified.issuer != ssl.PEM_cert_to_DER_cert(of.certificate.read_text())
        try:
            found.append(authorities.identity(shown).uri)
        except ShoalError as error:
            found.append(error.code)
    assert found == ["shoal://west/agent/n1", Code.CERT_UNTRUSTED]


def test_an_authority_of_ours_that_the_library_cannot_read_hides_no_other(
    west: Authority, east: Authority, tmp_path: Path
) -> None:
    """OpenSSL passes over what follows a certificate in its PEM."""
    second, forged = Authority(tmp_path / "second", "west", NOW), Authority(tmp_path / "forged", "west", NOW)
    longer = ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(west.certificate.read_text()) + b"\0")
    own = west.issue(Role.GATEWAY, "g1")
    west.certificate.write_text(longer + second.certificate.read_text())
    authorities = Authorities("west", TlsFiles(own.certificate, own.key, own.authority))
    authorities.configure((trust(east, forged.certificate.read_text(), east.certificate.read_text()),))
    assert authorities.handshake.pem == east.certificate.read_bytes()
    for of, role, name in ((second, Role.AGENT, "n2"), (east, Role.GATEWAY, "g9")):
        shown = PeerCertificate(of.issue(role, name).certificate.read_bytes())
        assert authorities.identity(shown).name == name
    with pytest.raises(ShoalError, match=Code.CERT_UNTRUSTED):
        authorities.identity(PeerCertificate(forged.issue(Role.OPERATOR, "ops").certificate.read_bytes()))


def test_our_name_is_nobody_elses_while_no_authority_of_ours_can_be_read(
    west: Authority, east: Authority, tmp_path: Path
) -> None:
    own, forged = west.issue(Role.GATEWAY, "g1"), Authority(tmp_path / "forged", "west", NOW)
    west.certificate.unlink()
    authorities = Authorities("west", TlsFiles(own.certificate, own.key, own.authority))
    authorities.configure((trust(east, forged.certificate.read_text(), east.certificate.read_text()),))
    assert authorities.handshake.pem == east.certificate.read_bytes()


@pytest.mark.parametrize("content", [b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_a_file_of_authorities_that_cannot_be_read_changes_nothing(
    authorities: Authorities, west: Authority, east: Authority, identity_or_code: IdentityOrCode, content: bytes
) -> None:
    files = west.issue(Role.AGENT, "n1")
    west.certificate.write_bytes(content)
    authorities.configure(())
    assert identity_or_code(authorities, files) == "shoal://west/agent/n1"
    assert identity_or_code(authorities, east.issue(Role.AGENT, "n1", region="west")) == Code.CERT_UNTRUSTED
