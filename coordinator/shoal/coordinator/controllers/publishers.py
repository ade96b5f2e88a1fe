"""Publishers' keys as the Region declares them, what they signed, and the newest version seen of each model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from shoal.coordinator.core.placement.model import ModelSignature, Publisher
from shoal.policies import Region
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.signature import PublisherKey, Signed, rollback
from shoal.types.units import Wall
from shoal.wire import bundle as bundles

NEWEST: Final = "signed/"


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest version of one line (`Signed.line`) that the region ever took in.

    allowed: older ones that an operator let back since; a newer version ends that.
    """

    line: str
    version: int
    allowed: tuple[int, ...] = ()

    @property
    def stored_at(self) -> str:
        return NEWEST + self.line


@dataclass(frozen=True, slots=True)
class Judged:
    """One of a model's signatures as the region sees it now. refusal: why it does not count; then signed is None."""

    bundle: bytes
    key: str
    signed: Signed | None
    refusal: Refusal | None


def declared(region: Region | None) -> Mapping[str, Publisher]:
    """The keys of the Region document, by name."""
    keys = region.spec.keys if region is not None else ()
    return {each.name: Publisher(PublisherKey(each.name, each.key), each.until) for each in keys}


def judge(bundle: bytes, digest: str, keys: Mapping[str, Publisher]) -> Judged:
    """Whether one of `keys` signed exactly the model of this digest; expiry and versions are not looked at."""
    found = _verified(bundle, digest, tuple(each.key for each in keys.values()))
    if isinstance(found, Refusal):
        return Judged(bundle, "", None, found)
    return Judged(bundle, *found, None)


def ended(judged: Judged, keys: Mapping[str, Publisher], wall: Wall) -> Refusal | None:
    """Why a signature, or the key that made it, counts no more."""
    assert judged.signed is not None
    until, expires_at = keys[judged.key].until, judged.signed.expires_at
    for end, what in ((until, f"key {judged.key}"), (expires_at, "the signature")):
        if end is not None and wall >= end:
            return Refusal(
                Code.SIGNATURE_EXPIRED, f"{what} ended", "one that counts now", "sign it again, with a key that counts"
            )
    return None


def signatures(
    models: Mapping[str, Sequence[bytes]], keys: Mapping[str, Publisher], newest: Mapping[str, Newest]
) -> Mapping[str, tuple[ModelSignature, ...]]:
    """What placement reads, by digest: the signatures that verify. models: bundles by digest."""
    found = dict[str, tuple[ModelSignature, ...]]()
    for digest, bundles_of in models.items():
        good = [(each.key, each.bundle, each.signed) for each in (judge(one, digest, keys) for one in bundles_of)]
        found[digest] = tuple(
            ModelSignature(key, bundle, signed.version, signed.expires_at, _allowed(signed, newest.get(signed.line)))
            for key, bundle, signed in good
            if signed is not None
        )
    return found


def went_back(signed: Signed, newest: Newest | None) -> Refusal | None:
    """Why this version may not come in, or be pinned anew."""
    return rollback(signed, newest.version, frozenset(newest.allowed)) if newest is not None else None


def advanced(signed: Signed, newest: Newest | None) -> Newest | None:
    """What is remembered once this was taken in; None where that changes nothing."""
    if newest is not None and signed.version <= newest.version:
        return None
    return Newest(signed.line, signed.version)


def _allowed(signed: Signed, newest: Newest | None) -> int:
    """What nodes are told of an older version that runs here: it was pinned before, or an operator allowed it."""
    return signed.version if newest is not None and signed.version < newest.version else 0


@lru_cache(maxsize=4096)
def _verified(bundle: bytes, digest: str, keys: tuple[PublisherKey, ...]) -> tuple[str, Signed] | Refusal:
    try:
        key, signed = bundles.verify(bundle, keys)
        bundles.check_file(signed, digest)
    except ShoalError as error:
        return error.refusal
    return key.name, signed
