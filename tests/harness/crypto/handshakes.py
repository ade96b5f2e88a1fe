"""TLS handshakes in memory, and what their server's side is shown."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from harness.crypto.pki import CertificateFiles
from shoal.host.peer_certificate import PeerCertificate, certificate_of_peer
from shoal.wire.tls_files import NO_CHECK_TIME

_TURNS = 4
"""More than a handshake has of each side (RFC 8446, figure 1)."""


@dataclass(frozen=True, slots=True)
class Handshake:
    """A handshake that is done."""

    # What the client has shown, as the server's side was asked when it was done.
    certificate: PeerCertificate
    # What the client may resume.
    session: ssl.SSLSession | None
    # The server's side.
    connection: ssl.SSLObject
    # Takes bytes from the client, as they would arrive.
    receive: Callable[[bytes], int]


def server_context(own: CertificateFiles, authorities: str) -> ssl.SSLContext:
    """As a front's, whose clients may have certificates of these CAs (PEM)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.key)
    context.load_verify_locations(cadata=authorities)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.verify_flags = ssl.VerifyFlags(int(context.verify_flags) | NO_CHECK_TIME)
    return context


def client_context(client: CertificateFiles) -> ssl.SSLContext:
    """Of a client that believes every server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(client.certificate, client.key)
    return context


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None = None) -> Handshake:
    """session: what the client resumes. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_end = client.wrap_bio(to_client, to_server, session=session)
    server_end = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_TURNS):
        for end in (client_end, server_end):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
    server_end.write(b".")
    assert client_end.read(1) == b"."  # with the session's ticket before it
    shown = certificate_of_peer(server_end)
    assert shown is not None
    assert client_end.session_reused is (session is not None)
    return Handshake(shown, client_end.session, server_end, to_server.write)


def half_a_key_update(key_log: Path) -> bytes:
    """A record of TLS 1.3 with 4 of the 5 bytes of a KeyUpdate, the first that the client of this handshake sends. Its
    cipher is TLS_AES_256_GCM_SHA384. key_log: of `SSLContext.keylog_filename`."""
    lines = (line.split() for line in key_log.read_text().splitlines())
    (secret,) = (bytes.fromhex(words[2]) for words in lines if words[0] == "CLIENT_TRAFFIC_SECRET_0")

    def derive(label: bytes, size: int) -> bytes:  # RFC 8446, section 7.1
        name = b"tls13 " + label
        info = size.to_bytes(2, "big") + bytes([len(name)]) + name + b"\0"
        return HKDFExpand(hashes.SHA384(), size, info).derive(secret)

    plain = bytes([24, 0, 0, 1, 22])  # of a handshake
    head = b"\x17\x03\x03" + (len(plain) + 16).to_bytes(2, "big")
    return head + AESGCM(derive(b"key", 32)).encrypt(derive(b"iv", 12), plain, head)
