"""X25519 (RFC 7748) by the OpenSSL that Python's own ssl module is linked with.

The cryptography library brings an OpenSSL of its own, 7 MiB of it, and a process that speaks TLS has one already. Where
that one cannot be reached (its names are hidden in the interpreter, or it may not do X25519), the library does it.
"""

import hmac
from functools import lru_cache
from typing import Any, Final, Protocol

KEY_BYTES: Final = 32
"""Of private keys, public keys and secrets (RFC 7748, section 5)."""
_KIND: Final = 1034
"""EVP_PKEY_X25519 (openssl/evp.h)."""
_EXAMPLE: Final = tuple(
    bytes.fromhex(text)
    for text in (
        "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
        "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
        "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
    )
)
"""Private key, public key and their secret (RFC 7748, section 5.2)."""


class Exchange(Protocol):
    """What computes shared secrets."""

    def __call__(self, private: bytes, public: bytes) -> bytes:
        """The secret of a private key and of another's public key, KEY_BYTES each. Raises ValueError for one of another
        length, and for a public key that gives every private key the same secret."""
        ...


@lru_cache(maxsize=1)
def make_exchange() -> Exchange:
    """By what is there. Raises what the library raises where it does not do X25519 either, as on a system for FIPS."""
    exchange = make_openssl_exchange()
    if exchange is None:
        exchange = make_library_exchange()
        _does_example(exchange)
    return exchange


def _does_example(exchange: Exchange) -> bool:
    private, public, secret = _EXAMPLE
    return exchange(private, public) == secret


def make_openssl_exchange() -> Exchange | None:
    """By Python's own OpenSSL; None where it does not do the example."""
    try:
        exchange = _exchange_of(_load_openssl())
        return exchange if _does_example(exchange) else None
    except Exception:  # no ctypes, or one that a confined process may not use; no such library or names; no X25519
        return None


def _load_openssl() -> Any:
    """The functions of Python's own OpenSSL, declared as in openssl/evp.h and err.h, which are the same from 1.1.1
    on."""
    import _ssl
    import ctypes

    # What is loaded already: nothing is opened, also if the installation was replaced meanwhile.
    openssl = ctypes.CDLL(getattr(_ssl, "__file__", None))
    number, pointer, data, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    functions = {
        "EVP_PKEY_new_raw_private_key": (pointer, (number, pointer, data, size)),
        "EVP_PKEY_new_raw_public_key": (pointer, (number, pointer, data, size)),
        "EVP_PKEY_CTX_new": (pointer, (pointer, pointer)),
        "EVP_PKEY_derive_init": (number, (pointer,)),
        "EVP_PKEY_derive_set_peer": (number, (pointer, pointer)),
        "EVP_PKEY_derive": (number, (pointer, data, ctypes.POINTER(size))),
        "EVP_PKEY_CTX_free": (None, (pointer,)),
        "EVP_PKEY_free": (None, (pointer,)),
        "ERR_clear_error": (None, ()),
    }
    for name, (result, arguments) in functions.items():
        function = getattr(openssl, name)
        function.restype, function.argtypes = result, arguments
    return openssl


def _exchange_of(openssl: Any) -> Exchange:
    import ctypes

    def exchange(private: bytes, public: bytes) -> bytes:
        _check_length(private, public)
        ours = theirs = context = None
        secret, size = ctypes.create_string_buffer(KEY_BYTES), ctypes.c_size_t(KEY_BYTES)
        try:
            ours = openssl.EVP_PKEY_new_raw_private_key(_KIND, None, private, KEY_BYTES)
            theirs = openssl.EVP_PKEY_new_raw_public_key(_KIND, None, public, KEY_BYTES)
            context = openssl.EVP_PKEY_CTX_new(ours, None) if ours and theirs else None
            if (
                not context
                or openssl.EVP_PKEY_derive_init(context) != 1
                or openssl.EVP_PKEY_derive_set_peer(context, theirs) != 1
                or openssl.EVP_PKEY_derive(context, secret, ctypes.byref(size)) != 1
                or size.value != KEY_BYTES
                or hmac.compare_digest(secret.raw, bytes(KEY_BYTES))  # each release we know refuses it by itself
            ):
                raise ValueError("two keys that share no secret")
            return secret.raw
        finally:
            openssl.EVP_PKEY_CTX_free(context)
            openssl.EVP_PKEY_free(theirs)
            openssl.EVP_PKEY_free(ours)
            openssl.ERR_clear_error()  # the ssl module would take an error that is left for its own

    return exchange


def make_library_exchange() -> Exchange:
    """By the cryptography library."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    def exchange(private: bytes, public: bytes) -> bytes:
        _check_length(private, public)
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))

    return exchange


def _check_length(*keys: bytes) -> None:
    if any(len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"a key that has not {KEY_BYTES} bytes")
