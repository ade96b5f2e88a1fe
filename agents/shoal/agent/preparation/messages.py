"""What the program of a preparation is told, and what it leaves beside the prepared model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shoal.agent.driver_port import DeviceAccess
from shoal.types.assignment import Work
from shoal.types.codes import Refusal
from shoal.types.migration import Tolerance

MODEL_FILE: Final = "prepared.onnx"
"""Name of the prepared model in the folder of the preparation."""
COMPILED_FILE: Final = "compiled.onnx"
"""Name of the compiled model in the folder of the preparation, until it is whole."""
LOG_FILE: Final = "log"
"""Name of the file in that folder that has what the program printed."""
RESULT_FILE: Final = "result.json"
"""Name of the `PreparationResult` in the folder of the preparation."""


@dataclass(frozen=True, slots=True)
class PreparationOrder:
    """One model to prepare."""

    # Path of the pushed model.
    model: str
    # Digest that the model must have.
    model_digest: str
    # Precision that the model is made in: one of `workload.PREPARABLE`. Empty: it stays as it was pushed.
    makes: str
    # Path of the samples, an .npz, by which it is made and judged. Empty: there are none.
    samples: str
    # Digest that the samples must have.
    samples_digest: str
    # Precision that the model runs in.
    precision: str
    # The pushed model's, by which inputs are generated where there are no samples.
    work: Work
    # How far the answers of the prepared model may be from those of the pushed one.
    tolerances: tuple[Tolerance, ...]
    # By input name: the only shapes that are served; -1 for an axis that stays open. Empty: what the graph takes.
    shapes: Mapping[str, tuple[int, ...]]
    # Folder that the program may write to, and nowhere else.
    folder: str
    # Most bytes of memory that it may take.
    memory_bytes: int
    # Most bytes of one file that it may write.
    file_bytes: int
    # Provider that compiles the model, by the runtime's name. Empty: it is not compiled.
    provider: str
    # What that needs to run on the device.
    access: DeviceAccess


@dataclass(frozen=True, slots=True)
class PreparationResult:
    """How a preparation ended."""

    # For people: what was made and how far its answers are from those of the pushed model. Empty if it was refused, and
    # if it was compiled alone.
    note: str = ""
    # Whether `MODEL_FILE` is compiled for the device.
    compiled: bool = False
    # Operators that the provider took.
    operators: tuple[str, ...] = ()
    # Why it is not compiled, where that was asked, for the log.
    not_compiled: str = ""
    # Why nothing was made; None: `MODEL_FILE` is whole.
    refusal: Refusal | None = None
