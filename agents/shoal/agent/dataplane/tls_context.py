"""TLS of a front: what its handshakes present and trust, read again when the files change."""

import ssl
from collections.abc import Sequence

from shoal.agent.dataplane.transport import TlsFiles
from shoal.agent.dataplane.trust import Authorities, Handshake
from shoal.wire.tls_files import NO_CHECK_TIME


class ServerTls:
    """Contexts for the handshakes of one port, whose clients may show a certificate.

    alpn: protocols that it speaks, the preferred first. authorities: other regions' CAs are trusted too.
    """

    def __init__(self, tls: TlsFiles, alpn: Sequence[str], authorities: Authorities) -> None:
        self._tls = tls
        self._alpn = tuple(alpn)
        self._authorities = authorities
        self._stamp: tuple[tuple[int, ...], Handshake] | None = None
        self._context: ssl.SSLContext | None = None

    def context(self) -> ssl.SSLContext:
        """The context for the next handshake. Files that are half replaced do not count yet.

        Raises OSError (including ssl.SSLError) where no context could be made before.
        """
        try:
            stamp = self._tls.stamp(), self._authorities.handshake
            if stamp != self._stamp:
                self._context = self._build(stamp[1])
                self._stamp = stamp
        except OSError:
            if self._context is None:
                raise
        assert self._context is not None
        return self._context

    def _build(self, others: Handshake) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # Which of the sound ones is for the client to say, that knows what its processor is quick at: gRPC's clients
        # ask for AES with 128 bits first, and OpenSSL for 256 (decision 0045). HTTP/2 wants no others of TLS 1.2
        # (RFC 9113, appendix A); those of TLS 1.3 are not named here.
        context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")
        context.options &= ~ssl.Options.OP_CIPHER_SERVER_PREFERENCE
        context.load_cert_chain(self._tls.certificate, self._tls.key)
        context.set_alpn_protocols(list(self._alpn))
        context.load_verify_locations(self._tls.authority)
        if others.pem:
            context.load_verify_locations(cadata=others.pem.decode())
        context.verify_mode = ssl.CERT_OPTIONAL
        # Dates are checked for each call, by the time that this node trusts: its machine's clock may be years off.
        context.verify_flags = ssl.VerifyFlags(int(context.verify_flags) | NO_CHECK_TIME)
        return context
