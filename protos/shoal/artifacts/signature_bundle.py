"""OpenSSF model signatures (OMS 1.0) made with a bare key: a Sigstore bundle that contains a DSSE envelope, which
contains an in-toto statement that lists the model's files.

What is verified, and in which order, follows sections 8.1 to 8.4 of the specification. Certificates and Sigstore's
keyless method are refused (docs/decisions/0008-model-signatures.md). Two things are additions: Ed25519 is accepted
beside the specification's three curves, and the subject carries annotations (`shoal/model`, `shoal/version`,
`shoal/expires`). In-toto leaves those to producers, and other verifiers ignore them.
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.signature import PublisherKey, SignedFile, VerifiedSignature, parse_key
from shoal.types.units import Wall

BUNDLE_BYTES: Final = 64 * 1024
"""Limit of a bundle that is stored with a model. One for a directory of many files may be longer where it is only read
here."""
MEDIA_TYPE: Final = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://model_signing/signature/v1.0"
DEFAULT_IGNORED: Final = (".git", ".gitattributes", ".github", ".gitignore")
MAX_VERSION: Final = 2**53

_HEX: Final = re.compile(r"[0-9a-f]{64}")
_HASHES: Final[Mapping[int, hashes.HashAlgorithm]] = {
    256: hashes.SHA256(),
    384: hashes.SHA384(),
    521: hashes.SHA512(),
}
"""By the curve's size in bits, as Sigstore pairs them."""

SigningKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


def load_signing_key(pem: bytes, passphrase: bytes | None) -> SigningKey:
    """Raises ShoalError(FIELD_INVALID)."""
    try:
        key = serialization.load_pem_private_key(pem, passphrase)
    except (ValueError, TypeError, UnsupportedAlgorithm) as cause:
        raise refuse(
            Code.FIELD_INVALID,
            f"no private key that can be read: {cause}",
            "a PEM file with a private key, and its passphrase where it has one",
            "give the passphrase as SHOAL_KEY_PASSPHRASE, or make a key: shoal model key FILE.pem --new",
        ) from cause
    publisher_key("", key)
    if not isinstance(key, SigningKey):
        raise AssertionError  # publisher_key refuses every other kind
    return key


def publisher_key(name: str, key: Any) -> PublisherKey:
    """The public key of a private key. Raises ShoalError(FIELD_INVALID) for kinds that cannot sign models."""
    der = key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )  # fmt: skip
    return PublisherKey(name, parse_key(base64.b64encode(der).decode()))


def sign(
    key: SigningKey,
    subject: str,
    files: Sequence[SignedFile],
    *,
    model: str = "",
    version: int = 0,
    expires_at: Wall | None = None,
    ignored: Sequence[str] = (),
) -> bytes:
    """A bundle over `files`. subject: the base name of the model's file or directory.

    version: 0 for none. Raises ShoalError(FIELD_INVALID) for content that no verifier would accept.
    """
    listed = sorted(files, key=lambda file: file.name)
    annotations: dict[str, Any] = {}
    if model:
        annotations["shoal/model"] = model
    if version:
        annotations["shoal/version"] = version
    if expires_at is not None:
        annotations["shoal/expires"] = datetime.fromtimestamp(expires_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    root = hashlib.sha256(b"".join(bytes.fromhex(file.sha256) for file in listed)).hexdigest()
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [
            {"name": subject, "digest": {"sha256": root}, **({"annotations": annotations} if annotations else {})}
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": sorted({*DEFAULT_IGNORED, *ignored}),
            },
            "resources": [{"name": file.name, "algorithm": "sha256", "digest": file.sha256} for file in listed],
        },
    }
    try:
        _parse_statement("", statement)
    except ShoalError as error:
        raise refuse(Code.FIELD_INVALID, error.refusal.found, error.refusal.asked, "correct it, then sign") from error
    payload = json.dumps(statement, ensure_ascii=False, separators=(",", ":")).encode()
    return enclose(payload, _sign(key, pre_auth_encoding(PAYLOAD_TYPE, payload)), publisher_key("", key))


def enclose(payload: bytes, signature: bytes, key: PublisherKey, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """The bundle around a signed payload."""
    bundle = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": _hint(key)}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": payload_type,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return json.dumps(bundle).encode()


def pre_auth_encoding(payload_type: str, payload: bytes) -> bytes:
    """What DSSE signs: the pre-authentication encoding."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def verify(
    bundle: bytes, keys: Sequence[PublisherKey], *, most: int = BUNDLE_BYTES
) -> tuple[PublisherKey, VerifiedSignature]:
    """The key among `keys` that made the signature, and what it signed. most: limit of the bundle in bytes.

    The caller checks expiry, the model's bytes and rollback. Raises ShoalError(SIGNATURE_INVALID).
    """
    if len(bundle) > most:
        raise _invalid(f"a bundle of {len(bundle)} bytes", f"at most {most}")
    found = _object(_json(bundle, "the bundle"), "the bundle")
    _only(found, "the bundle", {"mediaType", "verificationMaterial", "dsseEnvelope"})
    if found.get("mediaType") != MEDIA_TYPE:
        raise _invalid(f"media type {found.get('mediaType')!r:.80}", MEDIA_TYPE)
    candidates = _candidates(_object(found.get("verificationMaterial"), "verificationMaterial"), keys)
    payload, signature = _envelope(_object(found.get("dsseEnvelope"), "dsseEnvelope"))
    encoded = pre_auth_encoding(PAYLOAD_TYPE, payload)
    key = next((key for key in candidates if _is_signed_by(key, signature, encoded)), None)
    if key is None:
        names = ", ".join(sorted(key.name for key in keys)) or "none"
        raise _invalid("a signature that these keys did not make", f"one by {names}")
    return key, _parse_statement(key.fingerprint, _json(payload, "the statement"))


def verify_file(bundle: bytes, keys: Sequence[PublisherKey], digest: str) -> VerifiedSignature:
    """What one of these keys signed, which is exactly the file with this digest. Raises
    ShoalError(SIGNATURE_INVALID)."""
    _, signed = verify(bundle, keys)
    check_file(signed, digest)
    return signed


def check_file(signed: VerifiedSignature, digest: str) -> None:
    """Checks that the statement is about exactly one file, with this digest (`sha256:HEX`). Raises
    ShoalError(SIGNATURE_INVALID)."""
    if len(signed.files) != 1:
        raise _invalid(
            f"a signature over {len(signed.files)} files", "one over the model's file alone: a region stores one file"
        )
    if f"sha256:{signed.files[0].sha256}" != digest:
        raise _invalid(f"a signature over sha256:{signed.files[0].sha256}", digest)


def check_files(signed: VerifiedSignature, present: Mapping[str, str], *, others_allowed: bool = False) -> None:
    """Checks that a model consists of the signed files. present: name -> SHA-256 (hex) of the files that exist.

    others_allowed: files that are not listed are accepted. Raises ShoalError(SIGNATURE_INVALID).
    """
    listed = {file.name: file.sha256 for file in signed.files}
    for name, expected in listed.items():
        if name not in present:
            raise _invalid(f"{name!r:.120} is missing", "every file that is listed")
        if present[name] != expected:
            raise _invalid(f"{name!r:.120} has other bytes: sha256:{present[name]}", f"sha256:{expected}")
    extra = sorted(set(present) - set(listed))
    if extra and not others_allowed:
        raise _invalid(f"{extra[0]!r:.120} is not listed", "nothing beside the signed files")


def is_ignored(name: str, paths: Sequence[str]) -> bool:
    """Whether a file is at or beneath one of these paths, each relative to the model's root."""
    return any(name == path or name.startswith(f"{path}/") for path in paths)


# -- the layers, outermost first -----------------------------------------------------------------------------------


def _candidates(material: Mapping[str, Any], keys: Sequence[PublisherKey]) -> Sequence[PublisherKey]:
    """Keys that may have made it: the one that the bundle's hint names, or all without a hint."""
    public = material.get("publicKey")
    if not isinstance(public, dict) or {"certificate", "x509CertificateChain"} & material.keys():
        raise _invalid("a signature by certificate", "one by a bare key (publicKey)")
    hint = public.get("hint") or ""
    if not isinstance(hint, str):
        raise _invalid("a hint that is no text", "a key's fingerprint")
    if not hint:
        return keys
    named = [key for key in keys if hint in (_hint(key), key.fingerprint)]
    if not named:
        names = ", ".join(sorted(key.name for key in keys)) or "none"
        raise _invalid(f"a signature by key {hint:.64}", f"one by {names}")
    return named


def _envelope(envelope: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """(payload, signature)."""
    _only(envelope, "dsseEnvelope", {"payload", "payloadType", "signatures"})
    if envelope.get("payloadType") != PAYLOAD_TYPE:
        raise _invalid(f"payload type {envelope.get('payloadType')!r:.80}", PAYLOAD_TYPE)
    signatures = envelope.get("signatures")
    if not isinstance(signatures, list) or len(signatures) != 1:
        raise _invalid("no signature, or several", "exactly one")
    signature = _object(signatures[0], "signatures[0]")
    if not isinstance(signature.get("keyid"), str | None):
        raise _invalid("a keyid that is no text", "a text, or none")
    return _bytes(envelope.get("payload"), "payload"), _bytes(signature.get("sig"), "sig")


def _parse_statement(fingerprint: str, found: object) -> VerifiedSignature:
    """The content of a statement, checked as sections 5, 6.5 and 8.3 require."""
    statement = _object(found, "the statement")
    for name, expected in (("_type", STATEMENT_TYPE), ("predicateType", PREDICATE_TYPE)):
        if statement.get(name) != expected:
            raise _invalid(f"{name} {statement.get(name)!r:.80}", expected)
    subjects = statement.get("subject")
    if not isinstance(subjects, list) or len(subjects) != 1:
        raise _invalid("no subject, or several", "exactly one: the model")
    subject = _object(subjects[0], "subject[0]")
    predicate = _object(statement.get("predicate"), "predicate")
    left_out = _serialization(_object(predicate.get("serialization"), "serialization"))
    resources = predicate.get("resources")
    if not isinstance(resources, list) or not resources:
        raise _invalid("no resources", "at least one file")
    files = tuple(_file(_object(each, "a resource")) for each in resources)
    names = [file.name for file in files]
    if names != sorted(set(names)):
        raise _invalid("resources out of order, or one twice", "each file once, sorted by name")
    root = hashlib.sha256(b"".join(bytes.fromhex(file.sha256) for file in files)).hexdigest()
    if _object(subject.get("digest"), "subject[0].digest").get("sha256") != root:
        raise _invalid("a root digest of other files", f"sha256 {root}")
    model, version, expires_at = _annotations(subject)
    return VerifiedSignature(fingerprint, model, version, expires_at, files, left_out)


def _serialization(found: Mapping[str, Any]) -> tuple[str, ...]:
    """The paths that were excluded."""
    if found.get("method") != "files" or "shard_size" in found:
        raise _invalid(f"serialization by {found.get('method')!r:.40}", "files: each file hashed as a whole")
    if found.get("hash_type") != "sha256":
        raise _invalid(f"digests by {found.get('hash_type')!r:.40}", "sha256")
    if not isinstance(found.get("allow_symlinks"), bool):
        raise _invalid("allow_symlinks is not told", "true or false")
    paths = found.get("ignore_paths", [])
    if not isinstance(paths, list) or not all(isinstance(path, str) and _is_path(path) for path in paths):
        raise _invalid("ignore_paths that are no paths", "paths relative to the model's root")
    return tuple(paths)


def _file(found: Mapping[str, Any]) -> SignedFile:
    name, digest = found.get("name"), found.get("digest")
    if not isinstance(name, str) or not _is_path(name):
        raise _invalid(f"a file called {name!r:.120}", "a path relative to the model's root, without . and ..")
    if found.get("algorithm") != "sha256":
        raise _invalid(f"{name!r:.80} hashed by {found.get('algorithm')!r:.40}", "sha256")
    if not isinstance(digest, str) or not _HEX.fullmatch(digest):
        raise _invalid(f"{name!r:.80} with digest {digest!r:.80}", "64 lower-case hex digits")
    return SignedFile(name, digest)


def _annotations(subject: Mapping[str, Any]) -> tuple[str, int, Wall | None]:
    """(model, version, expires_at)."""
    found = _object(subject.get("annotations", {}), "annotations")
    model = found.get("shoal/model", subject.get("name"))
    if not isinstance(model, str) or not 0 < len(model) <= 255 or not model.isprintable():
        raise _invalid(f"a model called {model!r:.80}", "a name of 1 to 255 printable characters")
    version = found.get("shoal/version", 0)
    if type(version) is not int or not 0 <= version <= MAX_VERSION:
        raise _invalid(f"version {version!r:.40}", f"a whole number up to {MAX_VERSION}")
    expires = found.get("shoal/expires")
    if expires is None:
        return model, version, None
    try:
        ends = datetime.strptime(expires, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except (TypeError, ValueError) as cause:
        raise _invalid(f"expires {expires!r:.40}", "a time in UTC such as 2027-01-31T00:00:00Z") from cause
    return model, version, Wall(ends.timestamp())


# -- helpers ----------------------------------------------------------------------------------------------------------


def _sign(key: SigningKey, content: bytes) -> bytes:
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign(content)
    return key.sign(content, ec.ECDSA(_HASHES[key.curve.key_size]))


def _is_signed_by(key: PublisherKey, signature: bytes, content: bytes) -> bool:
    try:
        public = serialization.load_der_public_key(key.der)
        if isinstance(public, ed25519.Ed25519PublicKey):
            public.verify(signature, content)
        elif isinstance(public, ec.EllipticCurvePublicKey):
            public.verify(signature, content, ec.ECDSA(_HASHES[public.curve.key_size]))
        else:
            return False
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True


def _hint(key: PublisherKey) -> str:
    """How bundles name a bare key: the SHA-256 of its PEM."""
    return hashlib.sha256(key.pem.encode()).hexdigest()


def _is_path(name: str) -> bool:
    return name.isprintable() and not {"", ".", ".."} & set(name.split("/"))


def _json(content: bytes, where: str) -> object:
    """Strict JSON: UTF-8, no duplicate key, no NaN."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key twice")
        return found

    def constant(text: str) -> object:
        raise ValueError(f"{text} is no JSON")

    try:
        value: object = json.loads(content.decode(), object_pairs_hook=once, parse_constant=constant)
    except (ValueError, RecursionError) as cause:
        raise _invalid(f"{where}: {str(cause)[:120] or 'too deep'}", "JSON in UTF-8") from cause
    return value


def _object(found: object, where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise _invalid(f"{where} is missing, or no object", "a bundle as the specification says")
    return found


def _only(found: Mapping[str, Any], where: str, known: set[str]) -> None:
    if unknown := sorted(found.keys() - known):
        raise _invalid(f"{where} has {unknown[0]!r:.80}", f"only {', '.join(sorted(known))}")


def _bytes(found: object, where: str) -> bytes:
    try:
        value = base64.b64decode(found, validate=True) if isinstance(found, str) else b""
    except (binascii.Error, ValueError) as cause:
        raise _invalid(f"{where}: {cause}", "base64") from cause
    if not value:
        raise _invalid(f"{where} is missing, empty or no text", "base64")
    return value


def _invalid(found: str, asked: str) -> ShoalError:
    return refuse(
        Code.SIGNATURE_INVALID,
        found,
        asked,
        "sign the model's file with a key that is asked for: shoal model sign FILE --key KEY.pem",
    )
