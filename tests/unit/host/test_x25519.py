"""Python's own OpenSSL and the cryptography library compute the same secrets, and refuse the same keys."""

import _ssl
import ctypes
import secrets
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

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


def _no_openssl(*_: object) -> None:
    raise OSError("libcrypto.so: cannot open shared object file")


def _hidden_names(*_: object) -> SimpleNamespace:
    return SimpleNamespace(EVP_PKEY_new_raw_private_key=SimpleNamespace())


WITHOUT: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no ctypes": lambda patch: patch.setitem(sys.modules, "ctypes", None),
    "a _ssl that is part of the interpreter": lambda patch: patch.delattr(_ssl, "__file__"),
    "no such library": lambda patch: patch.setattr(ctypes, "CDLL", _no_openssl),
    "hidden names": lambda patch: patch.setattr(ctypes, "CDLL", _hidden_names),
    "no memory that may be run": lambda patch: patch.setattr(ctypes, "CDLL", _raise_memory_error),
    "no X25519, as in FIPS mode": lambda patch: patch.setattr(x25519, "_KIND", 0),
    "another secret": lambda patch: patch.setattr(x25519, "_EXAMPLE", (*x25519._EXAMPLE[:2], bytes(KEY_BYTES))),
}
"""What a Python may lack."""


def _raise_memory_error(*_: object) -> None:
    raise MemoryError


@pytest.fixture
def made_anew() -> Iterator[None]:
    make_exchange.cache_clear()
    yield
    make_exchange.cache_clear()


@pytest.mark.usefixtures("made_anew")
@pytest.mark.parametrize("missing", WITHOUT)
def test_where_openssl_cannot_be_used_the_library_does_it(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    private, public, secret = x25519._EXAMPLE
    WITHOUT[missing](monkeypatch)
    if missing != "a _ssl that is part of the interpreter":  # its names may be found there
        assert make_openssl_exchange() is None
    assert make_exchange()(private, public) == secret


@pytest.mark.skipif(OPENSSL is None, reason="this Python's OpenSSL cannot be reached")
@pytest.mark.usefixtures("made_anew")
def test_where_openssl_can_be_used_it_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    private, public, secret = x25519._EXAMPLE
    monkeypatch.setattr(x25519, "make_library_exchange", _no_openssl)
    assert make_exchange()(private, public) == secret


@pytest.mark.usefixtures("made_anew")
def test_where_neither_does_it_whoever_needs_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system for FIPS, where the library refuses each use, and not before."""

    def refuse(*_: bytes) -> bytes:
        raise RuntimeError("x25519 is not supported by this version of OpenSSL")

    monkeypatch.setattr(x25519, "make_openssl_exchange", lambda: None)
    monkeypatch.setattr(x25519, "make_library_exchange", lambda: refuse)
    with pytest.raises(RuntimeError, match="not supported"):
        make_exchange()


class _Agreeable:
    """Whatever is called succeeds, and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 1


def test_a_secret_of_zeros_is_refused_also_where_openssl_would_give_it() -> None:
    """Every private key gives it with such a public one (RFC 7748, section 6.1)."""
    with pytest.raises(ValueError, match="share no secret"):
        x25519._exchange_of(_Agreeable())(bytes(range(32)), bytes(range(32)))
