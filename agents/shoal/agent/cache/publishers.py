"""Whether a publisher signed a model, judged on the device, and what is remembered so that no old version comes back.

The keys that count are those that the assignment brings from the region's policy, and where the device has keys of its
own (`--publisher-keys`) one of these as well: then it loads nothing that they did not sign, whatever the region says.
The newest version of each line (key and model) lies in one small file, written before the model is loaded. When a
signature ends is for the coordinator to judge: a device may be cut off with a clock that is years wrong.
"""

import json
from pathlib import Path
from typing import Final

from shoal.agent.ports import Log
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.signature import PublisherKey, Signed, parse_key, rollback
from shoal.wire import bundle as bundles
from shoal.wire.private import write_private

_SUFFIX: Final = ".pem"


class Publishers:
    """Blocking, for one caller at a time."""

    def __init__(self, memory: Path, own: tuple[PublisherKey, ...], log: Log) -> None:
        """memory: the file of newest versions. own: the device's own keys; none: the region's word is enough."""
        self._memory = memory
        self._own = own
        self._log = log
        self._newest: dict[str, int] | None = None

    def check(self, asked: Assignment) -> None:
        """Raises ShoalError(SIGNATURE_REQUIRED | SIGNATURE_INVALID | MODEL_ROLLBACK | DISK_FULL)."""
        if asked.signed is None:
            if self._own:
                raise refuse(
                    Code.SIGNATURE_REQUIRED,
                    f"{asked.workload} brings no signature",
                    f"one by {', '.join(key.name for key in self._own)}: this device has keys of its own",
                    "ask for a signature in the workload's policy (require.trust.signed_model)",
                )
            return
        signed = self._verified(asked, asked.signed.keys)
        if self._own:
            self._verified(asked, self._own)
        newest = self._remembered().get(signed.line, 0)
        allowed = frozenset({asked.signed.allow_version} - {0})
        if (refusal := rollback(signed, newest, allowed)) is not None:
            raise ShoalError(refusal)
        if signed.version > newest:
            self._remember(signed)

    def _verified(self, asked: Assignment, keys: tuple[PublisherKey, ...]) -> Signed:
        assert asked.signed is not None
        _, signed = bundles.verify(asked.signed.bundle, keys)
        bundles.check_file(signed, asked.model)
        return signed

    def _remembered(self) -> dict[str, int]:
        if self._newest is None:
            self._newest = self._read()
        return self._newest

    def _read(self) -> dict[str, int]:
        """What an earlier process wrote. A file that is not that is set aside: serving goes before remembering."""
        try:
            found = json.loads(self._memory.read_bytes())
            return {str(line): int(version) for line, version in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as cause:
            self._log("versions_forgotten", error=True, code=Code.STATE_CORRUPT, found=f"{cause!r:.200}")
            try:
                self._memory.replace(self._memory.with_name(f"{self._memory.name}.corrupt"))
            except OSError:
                pass
            return {}

    def _remember(self, signed: Signed) -> None:
        after = {**self._remembered(), signed.line: signed.version}
        try:
            write_private(self._memory, json.dumps(after, sort_keys=True).encode())
        except OSError as cause:
            raise refuse(
                Code.DISK_FULL,
                f"{self._memory}: {cause.strerror}",
                f"{signed.model} version {signed.version} remembered before it is loaded",
                "free some space on the device",
            ) from cause
        self._newest = after
        self._log("version_remembered", model=signed.model, version=signed.version, key=signed.fingerprint)


def load_keys(folder: Path) -> tuple[PublisherKey, ...]:
    """The device's own keys: each NAME.pem of a folder. Raises ShoalError(FIELD_INVALID)."""
    try:
        found = tuple(
            PublisherKey(path.stem, parse_key(path.read_text()))
            for path in sorted(folder.iterdir())
            if path.suffix == _SUFFIX
        )
    except (OSError, UnicodeDecodeError) as cause:
        raise _no_keys(folder, f"{cause}") from cause
    if not found:
        raise _no_keys(folder, "no file NAME.pem")
    return found


def _no_keys(folder: Path, found: str) -> ShoalError:
    asked = "a folder of public keys, NAME.pem each"
    return refuse(Code.FIELD_INVALID, f"{folder}: {found}", asked, "`shoal model key FILE.pem --pem` prints one")
