"""Publishers' keys of the Region document, their signatures over models, and the newest version seen of each model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.core.placement.model import ModelSignature, TrustedKey
from shoal.policies import Region
from shoal.types.codes import Code, Refusal
from shoal.types.signature import PublisherKey, VerifiedSignature, check_rollback
from shoal.types.units import Wall

NEWEST: Final = "signed/"

VerifyBundle = Callable[[bytes, str, tuple[PublisherKey, ...]], tuple[str, VerifiedSignature] | Refusal]
"""Verifies a signature bundle over the model of a digest. Returns the name of the key and what was signed, or why the
signature is not valid. It has no effects; the cryptography is the caller's."""


@dataclass(frozen=True, slots=True)
class NewestVersion:
    """The newest version of one line (`VerifiedSignature.lineage`) that the region ever accepted."""

    # Publisher key and model name: `VerifiedSignature.lineage`.
    line: str
    # The newest version accepted.
    version: int
    # Older versions that an operator allowed since; a newer version clears them.
    allowed: tuple[int, ...] = ()

    @property
    def store_key(self) -> str:
        return NEWEST + self.line


@dataclass(frozen=True, slots=True)
class SignatureCheck:
    """One of a model's signatures, as checked against the current keys."""

    # The signature bundle as pushed.
    bundle: bytes
    # Name of the key that signed it; empty if the signature is not valid.
    key: str
    # What was signed; None exactly when there is a refusal.
    statement: VerifiedSignature | None
    # Why the signature is not valid; None if it is.
    refusal: Refusal | None


def publisher_keys(region: Region | None) -> Mapping[str, TrustedKey]:
    """The keys of the Region document, by name."""
    keys = region.spec.keys if region is not None else ()
    return {each.name: TrustedKey(PublisherKey(each.name, each.key), each.until) for each in keys}


def check_signature(bundle: bytes, digest: str, keys: Mapping[str, TrustedKey], verify: VerifyBundle) -> SignatureCheck:
    """Checks that one of `keys` signed exactly the model of this digest. Expiry and versions are not checked."""
    found = verify(bundle, digest, tuple(each.key for each in keys.values()))
    if isinstance(found, Refusal):
        return SignatureCheck(bundle, "", None, found)
    return SignatureCheck(bundle, *found, None)


def expiry_refusal(judged: SignatureCheck, keys: Mapping[str, TrustedKey], wall: Wall) -> Refusal | None:
    """Why a signature, or the key that made it, has expired; None while both are valid."""
    assert judged.statement is not None
    until, expires_at = keys[judged.key].until, judged.statement.expires_at
    for end, what in ((until, f"key {judged.key}"), (expires_at, "the signature")):
        if end is not None and wall >= end:
            return Refusal(
                Code.SIGNATURE_EXPIRED, f"{what} ended", "one that counts now", "sign it again, with a key that counts"
            )
    return None


def signatures(
    models: Mapping[str, Sequence[bytes]],
    keys: Mapping[str, TrustedKey],
    newest: Mapping[str, NewestVersion],
    verify: VerifyBundle,
) -> Mapping[str, tuple[ModelSignature, ...]]:
    """The signatures that verify, by digest, for placement. models: bundles by digest."""
    found = dict[str, tuple[ModelSignature, ...]]()
    for digest, bundles_of in models.items():
        good = [
            (each.key, each.bundle, each.statement)
            for each in (check_signature(one, digest, keys, verify) for one in bundles_of)
        ]
        found[digest] = tuple(
            ModelSignature(
                key, bundle, signed.version, signed.expires_at, _version_exception(signed, newest.get(signed.lineage))
            )
            for key, bundle, signed in good
            if signed is not None
        )
    return found


def rollback_refusal(signed: VerifiedSignature, newest: NewestVersion | None) -> Refusal | None:
    """Why this version may not be pushed or newly pinned; None if it may."""
    return check_rollback(signed, newest.version, frozenset(newest.allowed)) if newest is not None else None


def newer_version(signed: VerifiedSignature, newest: NewestVersion | None) -> NewestVersion | None:
    """The record to store after accepting this signature; None where nothing changes."""
    if newest is not None and signed.version <= newest.version:
        return None
    return NewestVersion(signed.lineage, signed.version)


def _version_exception(signed: VerifiedSignature, newest: NewestVersion | None) -> int:
    """The older version that nodes must accept, because it was pinned earlier or an operator allowed it; else 0."""
    return signed.version if newest is not None and signed.version < newest.version else 0
