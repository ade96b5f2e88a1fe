"""Choices that look random and are repeatable: a hash of names stands for chance in the pure cores."""

import hashlib


def digest(*names: str) -> bytes:
    """Eight bytes that depend on `names` and their order alone."""
    return hashlib.blake2b("\0".join(names).encode(), digest_size=8).digest()


def fraction(*names: str) -> float:
    """A number above 0 and below 1, uniform over all names.

    It has 52 bits: of 53, the middle of the last step would round to 1.
    """
    return ((int.from_bytes(digest(*names)) >> 12) + 0.5) / 2**52
