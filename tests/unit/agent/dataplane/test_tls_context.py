"""What a front agrees on with its clients in a handshake."""

import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from harness.crypto.pki import Authority
from shoal.agent.clock import SystemClock
from shoal.agent.dataplane.tls_context import ServerTls
from shoal.agent.dataplane.transport import TlsFiles
from shoal.agent.dataplane.trust import Authorities
from shoal.types.device import Role

SHORT, LONG = "ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-ECDSA-AES256-GCM-SHA384"


@pytest.mark.parametrize("offered", [(SHORT, LONG), (LONG, SHORT)], ids=["short", "long"])
def test_the_client_chooses_among_sound_ciphers(offered: tuple[str, str], tmp_path: Path) -> None:
    issued = Authority(tmp_path, "eu", SystemClock().wall()).issue(Role.AGENT, "n1")
    files = TlsFiles(issued.certificate, issued.key, issued.authority)
    asked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asked.check_hostname, asked.verify_mode = False, ssl.CERT_NONE
    asked.maximum_version = ssl.TLSVersion.TLSv1_2  # of which alone this module can order a client's ciphers
    asked.set_ciphers(":".join(offered))
    sent, answered = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = asked.wrap_bio(answered, sent)
    server = ServerTls(files, ("h2",), Authorities("eu", files)).context().wrap_bio(sent, answered, server_side=True)
    for side in (client, server, client, server):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    agreed = server.cipher()
    assert agreed is not None
    assert agreed[0] == offered[0]
