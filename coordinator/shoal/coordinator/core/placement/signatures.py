"""Which signatures a policy asks for, which ones a model has, and what its node gets to verify."""

from shoal.coordinator.core.placement.model import ModelSignature, Signatures
from shoal.coordinator.core.placement.relax import CATEGORY_SIZE, RequiredRelaxation, manual_remedy
from shoal.types.codes import Code, Refusal
from shoal.types.signature import SignedModel
from shoal.types.units import Wall
from shoal.types.workload import ModelRef, Requirements


def missing_signature(
    signatures: Signatures, model: ModelRef, require: Requirements
) -> tuple[Refusal, RequiredRelaxation] | None:
    """Why a model lacks the signature that is asked for, regardless of expiry; None where it has one."""
    asked = f"signed by {' or '.join(require.signed_by)}"
    if not require.signed_by or _matching_signatures(signatures, model.digest, require):
        return None
    if signatures.keys.keys().isdisjoint(require.signed_by):
        refusal = Refusal(Code.PUBLISHER_UNKNOWN, f"the region knows no key {' or '.join(require.signed_by)}", asked)
        return refusal, manual_remedy(f"declare key {require.signed_by[0]} in the Region's spec.keys")
    signers = [each.key for each in signatures.models.get(model.digest, ())]
    if not signers:
        refusal = Refusal(Code.SIGNATURE_REQUIRED, f"{model.source} is not signed by a key that counts here", asked)
        return refusal, manual_remedy(
            f"sign it and push it again: shoal model push {model.source} --signature FILE.sig"
        )
    refusal = Refusal(Code.SIGNATURE_INVALID, f"{model.source} is signed by {' and '.join(signers)}", asked)
    return refusal, RequiredRelaxation(signed_by=signers[0], size=CATEGORY_SIZE)


def signature_expiry(
    signatures: Signatures, model: ModelRef, require: Requirements, wall: Wall
) -> tuple[Refusal, RequiredRelaxation] | None:
    """Why all matching signatures have expired, so that nothing new may be placed; None where one is valid."""
    fitting = _matching_signatures(signatures, model.digest, require)
    if not fitting or any(_is_valid(signatures, each, wall) for each in fitting):
        return None
    keys = " and ".join(each.key for each in fitting)
    refusal = Refusal(Code.SIGNATURE_EXPIRED, f"the signature of {model.source} by {keys} ended", "one that counts now")
    return refusal, manual_remedy(f"sign {model.source} again and push the signature")


def make_signed_model(signatures: Signatures, digest: str, require: Requirements, wall: Wall) -> SignedModel | None:
    """What a node needs to verify the model by itself: a valid signature, else an expired one. None where the policy
    asks for no signature or the model has none that matches."""
    fitting = sorted(
        _matching_signatures(signatures, digest, require), key=lambda each: not _is_valid(signatures, each, wall)
    )
    if not fitting:
        return None
    keys = tuple(signatures.keys[name].key for name in require.signed_by if name in signatures.keys)
    return SignedModel(fitting[0].bundle, keys, fitting[0].allow_version)


def _matching_signatures(signatures: Signatures, digest: str, require: Requirements) -> tuple[ModelSignature, ...]:
    """The model's signatures by keys that the policy asks for."""
    return tuple(each for each in signatures.models.get(digest, ()) if each.key in require.signed_by)


def _is_valid(signatures: Signatures, signature: ModelSignature, wall: Wall) -> bool:
    ends = (signature.expires_at, signatures.keys[signature.key].until)
    return all(end is None or wall < end for end in ends)
