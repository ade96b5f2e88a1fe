"""CAs that another party names: each text is one CA's certificate, and nothing else."""

from pathlib import Path

import pytest

from harness.crypto.pki import Authority
from shoal.coordinator.clock import CoordinatorClock
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.wire.tls_files import fingerprint_of
from shoal.wire.trust import authority_fingerprints, check_authorities


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "fed", CoordinatorClock().wall())


def test_fingerprints_are_those_that_operators_see(authority: Authority) -> None:
    pem = authority.certificate.read_text()
    assert authority_fingerprints((pem,)) == (fingerprint_of(pem),)
    check_authorities((pem,))


@pytest.mark.parametrize("case", ["a node's", "two in one", "nothing", "broken", "a key"])
def test_a21_what_is_no_cas_certificate_is_refused(authority: Authority, case: str) -> None:
    pem = authority.certificate.read_text()
    leaf, key, _ = authority.issue(Role.AGENT, "edge-1").read()
    told = {
        "a node's": leaf.decode(),
        "two in one": pem + pem,
        "nothing": "",
        "broken": pem.replace("A", "B"),
        "a key": key.decode(),
    }[case]
    with pytest.raises(ShoalError) as error:
        check_authorities((pem, told))
    assert error.value.code is Code.FIELD_INVALID
