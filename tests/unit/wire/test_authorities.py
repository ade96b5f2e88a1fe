"""CAs that another party names: each text is one CA's certificate, and nothing else."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from harness.crypto.pki import Authority
from shoal.coordinator.clock import CoordinatorClock
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.wire.tls_files import fingerprint_of
from shoal.wire.trust import authority_fingerprints, bundle_of_authorities, check_authorities


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "fed", CoordinatorClock().wall())


def test_fingerprints_are_those_that_operators_see(authority: Authority) -> None:
    pem = authority.certificate.read_text()
    assert authority_fingerprints((pem,), "fed") == (fingerprint_of(pem),)
    check_authorities((pem,), "fed")


def same_name(of: Authority) -> str:
    """A CA of the same name and key identifier, with another key."""
    known = x509.load_pem_x509_certificate(of.certificate.read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        x509.CertificateBuilder()
        .subject_name(known.subject)
        .issuer_name(known.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(known.not_valid_before_utc)
        .not_valid_after(known.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(known.public_key()), critical=False)
    )
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


@pytest.mark.parametrize(
    "case",
    ["a node's", "two in one", "nothing", "broken", "a key", "no last newline", "another end", "text before",
     "text after", "another region's", "another region's name"],
)  # fmt: skip
def test_a21_what_is_no_cas_certificate_is_refused(authority: Authority, tmp_path: Path, case: str) -> None:
    pem = authority.certificate.read_text()
    leaf, key, _ = authority.issue(Role.AGENT, "edge-1").read()
    other = Authority(tmp_path / "other", "other", CoordinatorClock().wall())
    told = {
        "a node's": leaf.decode(),
        "two in one": pem + pem,
        "nothing": "",
        "broken": pem.replace("A", "B"),
        "a key": key.decode(),
        "no last newline": pem.rstrip("\n"),
        "another end": pem.rstrip("\n") + "\r",
        "text before": "-----BEGIN CERTIFICATE-----\n" + pem,
        "text after": pem + "-----BEGIN CERTIFICATE-----\n",
        "another region's": other.certificate.read_text(),
        "another region's name": same_name(other),
    }[case]
    with pytest.raises(ShoalError) as error:
        check_authorities((pem, told), "fed")
    assert error.value.code is Code.FIELD_INVALID
    assert bundle_of_authorities((("fed", pem), ("fed", told), ("fed", pem))) == pem


@pytest.mark.parametrize("attack", ["no last newline", "another region's name"])
def test_a21_a_member_whose_cas_were_stored_unchecked_shuts_no_other_one_out(tmp_path: Path, attack: str) -> None:
    wall = CoordinatorClock().wall()
    fed, bad, good = (Authority(tmp_path / name, name, wall) for name in ("fed", "bad", "good"))
    own = bad.certificate.read_text()
    hostile = (own.rstrip("\n"),) if attack == "no last newline" else (own, same_name(good))
    trusted = bundle_of_authorities(
        [
            ("fed", fed.certificate.read_text()),
            *(("bad", pem) for pem in hostile),
            ("good", good.certificate.read_text()),
        ]
    )
    shown = fed.issue(Role.FEDERATION, "federation").read()
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Echo()])
    pairs = [(shown[1], shown[0])]
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials(pairs, trusted.encode(), require_client_auth=True)
    )
    server.start()
    certificate, key, _ = good.issue(Role.COORDINATOR, "coordinator").read()
    credentials = grpc.ssl_channel_credentials(shown[2], key, certificate)
    try:
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as opened:
            assert opened.unary_unary("/echo/Echo", None, None)(b"heard", timeout=10.0) == b"heard"
    finally:
        server.stop(None)


class Echo(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # at run time it takes none
    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda request, _: request)
