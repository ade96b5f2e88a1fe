"""What a caller finds out about its own files before it blames the other side."""

from pathlib import Path

import pytest

from harness.crypto.pki import Authority, CertificateFiles
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.wire.handshake import check_own

WALL = Wall(1_800_000_000.0)


def issue_from(folder: Path) -> tuple[CertificateFiles, bytes]:
    """A certificate of an authority of its own, and that authority, PEM."""
    authority = Authority(folder, "eu", WALL)
    return authority.issue(Role.AGENT, "edge-1"), authority.certificate.read_bytes()


@pytest.mark.parametrize("own_is_first", [True, False])
def test_a_certificate_of_any_authority_in_the_file_is_good(tmp_path: Path, own_is_first: bool) -> None:
    """While a region changes to another CA, the next one stands first and the certificate may be of the one before."""
    files, own = issue_from(tmp_path / "own")
    _, other = issue_from(tmp_path / "other")
    files.ca.write_bytes(own + other if own_is_first else other + own)
    check_own(files, WALL)


@pytest.mark.parametrize("content", ["another authority", "no certificate"])
def test_a_certificate_of_no_authority_in_the_file_is_untrusted(tmp_path: Path, content: str) -> None:
    files, _ = issue_from(tmp_path / "own")
    _, other = issue_from(tmp_path / "other")
    files.ca.write_bytes(other if content == "another authority" else b"")
    with pytest.raises(ShoalError) as caught:
        check_own(files, WALL)
    assert caught.value.code is Code.CERT_UNTRUSTED
