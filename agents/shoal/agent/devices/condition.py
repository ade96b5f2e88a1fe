"""How an emulated device is at the moment, by a file that whoever emulates it writes: nothing is measured here.

    {"temperature_c": 97.0, "throttled": true}    its sensor, and that it slows itself down; its answers stay as fast
    {"answers": false}                            its driver hears nothing of it

Without the file it is as its profile says, and its heat is unknown.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.types.codes import Code, ShoalError, refuse


@dataclass(frozen=True, slots=True)
class Condition:
    temperature_c: float = math.nan
    throttled: bool = False
    answers: bool = True


def condition_of(path: Path | None) -> Condition:
    """Raises ShoalError(DEVICE_LOST) where the file cannot be understood: of such a device nothing is known."""
    if path is None:
        return Condition()
    try:
        said: dict[str, Any] = json.loads(path.read_bytes())
        found = Condition(**said)
        if (
            isinstance(found.throttled, bool)
            and isinstance(found.answers, bool)
            and not math.isinf(found.temperature_c)
        ):
            return found
    except FileNotFoundError:
        return Condition()
    except (OSError, ValueError, TypeError) as cause:
        raise _misread(path, type(cause).__name__) from cause
    raise _misread(path, str(found))


def _misread(path: Path, found: str) -> ShoalError:
    return refuse(Code.DEVICE_LOST, f"{path}: {found:.80}", "temperature_c, throttled, answers", "mend or remove it")
