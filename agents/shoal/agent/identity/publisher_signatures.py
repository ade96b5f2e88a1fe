"""Verifies publishers' signatures of models, in the program of the identity."""

from shoal.agent.identity.orders import VerifyOrder
from shoal.agent.identity.programs import run_order
from shoal.types.signature import PublisherKey, VerifiedSignature


def verify_in_program(bundle: bytes, keys: tuple[PublisherKey, ...], digest: str) -> VerifiedSignature:
    """As `signature_bundle.verify_file`. Blocking. Raises ShoalError(SIGNATURE_INVALID | INTERNAL)."""
    verified = run_order(VerifyOrder(bundle, keys, digest)).verified
    assert verified is not None
    return verified
