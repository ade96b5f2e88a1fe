"""Verifies publishers' signatures over models, for the decisions of `core/catalog/publishers.py`."""

from functools import lru_cache

from shoal.artifacts import signature_bundle as bundles
from shoal.types.codes import Refusal, ShoalError
from shoal.types.signature import PublisherKey, VerifiedSignature


@lru_cache(maxsize=4096)
def verify_bundle(
    bundle: bytes, digest: str, keys: tuple[PublisherKey, ...]
) -> tuple[str, VerifiedSignature] | Refusal:
    try:
        key, signed = bundles.verify(bundle, keys)
        bundles.check_file(signed, digest)
    except ShoalError as error:
        return error.refusal
    return key.name, signed
