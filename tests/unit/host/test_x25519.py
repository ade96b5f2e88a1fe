"""Python's own OpenSSL and the cryptography library compute the same secrets, and refuse the same keys."""

import _ssl
import ctypes
import secrets

import pytest

from shoal.host import x25519
from shoal.host.x25519 import KEY_BYTES, Exchange, make_exchange, make_library_exchange, make_openssl_exchange

OPENSSL, LIBRARY = make_openssl_exchange(), make_library_exchange()
EXCHANGES = [each for each in (OPENSSL, LIBRARY) if each is not None]
PRIME = 2**255 - 19
SMALL_ORDER = (0, 1, PRIME - 1, PRIME, PRIME + 1, 2**255, 2**255 + 1)
"""Numbers of public keys whose point has an order of at most 4, some of them written in another way (RFC 7748, sections
5 and 7)."""


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_iterated_it_is_what_the_rfc_says(exchange: Exchange) -> None:
    """RFC 7748, section 5.2: each secret is the next private key, and each private key the next public one."""
    private = public = (9).to_bytes(KEY_BYTES, "little")
    for _ in range(1000):
        private, public = exchange(private, public), private
    assert private.hex() == "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"


@pytest.mark.skipif(OPENSSL is None, reason="this Python's OpenSSL cannot be reached")
def test_both_compute_the_same() -> None:
    assert OPENSSL is not None
    for _ in range(200):
        private, public = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES)
        assert OPENSSL(private, public) == LIBRARY(private, public)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("public", [*(each.to_bytes(KEY_BYTES, "little") for each in SMALL_ORDER), b"", b"\t" * 31])
def test_keys_that_share_no_secret_are_refused(exchange: Exchange, public: bytes) -> None:
    with pytest.raises(ValueError):
        exchange(secrets.token_bytes(KEY_BYTES), public)
    with pytest.raises(ValueError):
        exchange(public[:31], bytes([9, *bytes(31)]))


@pytest.mark.skipif(OPENSSL is None, reason="this Python's OpenSSL cannot be reached")
def test_a_refusal_leaves_no_error_for_the_ssl_module() -> None:
    assert OPENSSL is not None
    with pytest.raises(ValueError):
        OPENSSL(secrets.token_bytes(KEY_BYTES), bytes(KEY_BYTES))
    assert ctypes.CDLL(_ssl.__file__).ERR_peek_error() == 0


def test_where_openssl_cannot_be_reached_the_library_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for functions in ({"EVP_PKEY_of_another_name": (ctypes.c_int, ())}, x25519._FUNCTIONS):
        monkeypatch.setattr(x25519, "_FUNCTIONS", functions)
        make_exchange.cache_clear()
        private, public, secret = x25519._EXAMPLE
        assert make_exchange()(private, public) == secret
    monkeypatch.setattr(x25519, "_KIND", 0)  # as where FIPS mode has no such keys
    assert make_openssl_exchange() is None
    make_exchange.cache_clear()
    assert make_exchange()(private, public) == secret
    make_exchange.cache_clear()
