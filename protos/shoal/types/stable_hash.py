"""Choices that look random and are repeatable: a hash of names stands for chance in the pure cores."""

import hashlib
from collections.abc import Iterable, Sequence


def digest(*names: str) -> bytes:
    """Eight bytes that depend on `names` and their order alone."""
    return hashlib.blake2b(encode(*names), digest_size=8).digest()


def digests(first: Sequence[str], last: Iterable[bytes]) -> list[bytes]:
    """`digest` of the first names with each of the last ones, by `encode`. What all have in common is hashed once."""
    found, head = [], hashlib.blake2b("".join(f"{name}\0" for name in first).encode(), digest_size=8)
    for names in last:
        one = head.copy()
        one.update(names)
        found.append(one.digest())
    return found


def encode(*names: str) -> bytes:
    """Names as they are hashed: those of two calls with `\\0` between them are those of one."""
    return "\0".join(names).encode()


def fraction(*names: str) -> float:
    """A number above 0 and below 1, uniform over all names.

    It has 52 bits: of 53, the middle of the last step would round to 1.
    """
    return ((int.from_bytes(digest(*names)) >> 12) + 0.5) / 2**52
