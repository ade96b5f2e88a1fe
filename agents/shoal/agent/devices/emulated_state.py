"""Current state of an emulated device, from a file that the user of the emulation writes; nothing is measured.

`{"temperature_c": 97.0, "throttled": true}`: its sensor, and that it throttles; its answers do not become slower.

`{"answers": false}`: its driver gets no answer from it.

Without the file the device is as its profile says, and its temperature is unknown.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.types.codes import Code, ShoalError, refuse


@dataclass(frozen=True, slots=True)
class EmulatedState:
    """Content of the state file."""

    # NaN: unknown.
    temperature_c: float = math.nan
    # True: the device reports that it throttles.
    throttled: bool = False
    # False: reading the device fails with DEVICE_LOST.
    answers: bool = True


def read_state(path: Path | None) -> EmulatedState:
    """Raises ShoalError(DEVICE_LOST) if the file cannot be parsed: the state of the device is then unknown."""
    if path is None:
        return EmulatedState()
    try:
        said: dict[str, Any] = json.loads(path.read_bytes())
        found = EmulatedState(**said)
        if (
            isinstance(found.throttled, bool)
            and isinstance(found.answers, bool)
            and not math.isinf(found.temperature_c)
        ):
            return found
    except FileNotFoundError:
        return EmulatedState()
    except (OSError, ValueError, TypeError) as cause:
        raise _unreadable_state(path, type(cause).__name__) from cause
    raise _unreadable_state(path, str(found))


def _unreadable_state(path: Path, found: str) -> ShoalError:
    return refuse(Code.DEVICE_LOST, f"{path}: {found:.80}", "temperature_c, throttled, answers", "mend or remove it")
