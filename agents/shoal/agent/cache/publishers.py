"""Verifies publishers' signatures on the device, and remembers versions, so that no model is rolled back.

The accepted keys are those that the assignment carries from the region's policy. If the device has keys of its own
(`--publisher-keys`), one of these must have signed as well: then the device loads nothing that they did not sign,
whatever the region says.

The newest version of each line (key and model) is kept in one small file, written before the model is loaded. The
coordinator decides when a signature expires, because a device may be cut off with a clock that is years wrong.
"""

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final

from shoal.agent.ports import Log
from shoal.host.private_files import write_private
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.signature import PublisherKey, VerifiedSignature, check_rollback, parse_key

_SUFFIX: Final = ".pem"
MOST_KNOWN: Final = 64
"""Verified signatures that are remembered. A bundle is some KiB, at most 64 (`signature_bundle.BUNDLE_BYTES`)."""

VerifySignature = Callable[[bytes, tuple[PublisherKey, ...], str], VerifiedSignature]
"""What one of the keys signed in this bundle, which is the model with this digest. Blocking. Raises
ShoalError(SIGNATURE_INVALID)."""


class SignatureVerifier:
    """Blocking, for one caller at a time."""

    def __init__(
        self, versions_file: Path, device_keys: tuple[PublisherKey, ...], log: Log, *, verify: VerifySignature
    ) -> None:
        """`versions_file`: the file of newest versions. `device_keys`: the device's own keys; empty: the region's keys
        suffice."""
        # Each is verified once: an assignment is checked whenever its replica starts.
        self._verify = lru_cache(MOST_KNOWN)(verify)
        self._versions_file = versions_file
        self._device_keys = device_keys
        self._log = log
        self._newest_versions: dict[str, int] | None = None

    def check(self, asked: Assignment) -> None:
        """Raises ShoalError(SIGNATURE_REQUIRED | SIGNATURE_INVALID | MODEL_ROLLBACK | DISK_FULL)."""
        if asked.signed is None:
            if self._device_keys:
                raise refuse(
                    Code.SIGNATURE_REQUIRED,
                    f"{asked.workload} brings no signature",
                    f"one by {', '.join(key.name for key in self._device_keys)}: this device has keys of its own",
                    "ask for a signature in the workload's policy (require.trust.signed_model)",
                )
            return
        signed = self._verify(asked.signed.bundle, asked.signed.keys, asked.model)
        if self._device_keys:
            self._verify(asked.signed.bundle, self._device_keys, asked.model)
        newest = self._load_versions().get(signed.lineage, 0)
        allowed = frozenset({asked.signed.allow_version} - {0})
        if (refusal := check_rollback(signed, newest, allowed)) is not None:
            raise ShoalError(refusal)
        if signed.version > newest:
            self._record_version(signed)

    def _load_versions(self) -> dict[str, int]:
        if self._newest_versions is None:
            self._newest_versions = self._read_versions()
        return self._newest_versions

    def _read_versions(self) -> dict[str, int]:
        """The versions that an earlier process wrote. An unreadable file is moved aside, because serving matters more
        than rollback protection."""
        try:
            found = json.loads(self._versions_file.read_bytes())
            return {str(line): int(version) for line, version in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as cause:
            self._log.error("model_versions_lost", code=Code.STATE_CORRUPT, error=f"{cause!r:.200}")
            try:
                self._versions_file.replace(self._versions_file.with_name(f"{self._versions_file.name}.corrupt"))
            except OSError:
                pass
            return {}

    def _record_version(self, signed: VerifiedSignature) -> None:
        after = {**self._load_versions(), signed.lineage: signed.version}
        try:
            write_private(self._versions_file, json.dumps(after, sort_keys=True).encode())
        except OSError as cause:
            raise refuse(
                Code.DISK_FULL,
                f"{self._versions_file}: {cause.strerror}",
                f"{signed.model} version {signed.version} remembered before it is loaded",
                "free some space on the device",
            ) from cause
        self._newest_versions = after
        self._log.info("model_version_recorded", model=signed.model, version=signed.version, key=signed.fingerprint)


def load_keys(folder: Path) -> tuple[PublisherKey, ...]:
    """The device's own keys: each NAME.pem in a folder. Raises ShoalError(FIELD_INVALID)."""
    try:
        found = tuple(
            PublisherKey(path.stem, parse_key(path.read_text()))
            for path in sorted(folder.iterdir())
            if path.suffix == _SUFFIX
        )
    except (OSError, UnicodeDecodeError) as cause:
        raise _keys_error(folder, f"{cause}") from cause
    if not found:
        raise _keys_error(folder, "no file NAME.pem")
    return found


def _keys_error(folder: Path, found: str) -> ShoalError:
    asked = "a folder of public keys, NAME.pem each"
    return refuse(Code.FIELD_INVALID, f"{folder}: {found}", asked, "`shoal model key FILE.pem --pem` prints one")
