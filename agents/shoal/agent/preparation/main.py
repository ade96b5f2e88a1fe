"""Entry point of a preparation: `python -m shoal.agent.preparation.main`, with its order on standard input.

It reads a model that nobody has judged, so it is confined like a worker: no network, no file but the model, the
samples, the device and its own folder. It leaves `RESULT_FILE` there, whatever happens but its own death.
"""

import os
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from shoal.agent.packing import pack, unpack
from shoal.agent.preparation.messages import (
    COMPILED_FILE,
    MODEL_FILE,
    RESULT_FILE,
    PreparationOrder,
    PreparationResult,
)
from shoal.agent.worker import isolation
from shoal.host import logs
from shoal.host.parent_death import end_with_parent
from shoal.host.sandbox import Access
from shoal.types.codes import Code, Refusal, ShoalError

_OOM_SCORE_ADJ: Final = "900"
"""Above a worker's: what serves matters more than what is to serve."""


def main() -> None:
    end_with_parent()
    logs.configure(process="preparation")
    order = unpack(PreparationOrder, sys.stdin.buffer.read())
    folder = Path(order.folder)
    resource.setrlimit(resource.RLIMIT_DATA, (order.memory_bytes, order.memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (order.file_bytes, order.file_bytes))
    own = {folder: Access.KEEP_FOLDERS, Path(order.model): Access.OPEN}
    if order.samples:
        own[Path(order.samples)] = Access.OPEN
    own |= dict.fromkeys(map(Path, order.access.files), Access.READ | Access.WRITE)
    os.environ.update(order.access.environment)
    isolation.confine(own, _OOM_SCORE_ADJ)
    (folder / RESULT_FILE).write_bytes(pack(_prepare(order, folder)))
    sys.stderr.flush()
    os._exit(0)  # threads of the runtime are not waited for


def _prepare(order: PreparationOrder, folder: Path) -> PreparationResult:
    try:
        # Imports the runtime, which starts threads, so only after it is confined.
        from shoal.agent.worker.engine import read_and_verify

        model, note = read_and_verify(order.model, order.model_digest), ""
        if order.makes:
            note = _make(order, model, folder)
            model = (folder / MODEL_FILE).read_bytes()
        return _compile(order, model, PreparationResult(note=note)) if order.provider else PreparationResult(note=note)
    except ShoalError as error:
        refusal = error.refusal
    except ModuleNotFoundError as error:
        refusal = Refusal(Code.PREPARE_UNAVAILABLE, f"{error}", "the agent's extra `prepare`", "install it here")
    except MemoryError:
        found = f"more than {order.memory_bytes} bytes"
        refusal = Refusal(Code.OUT_OF_MEMORY, found, "what a preparation may take", "a smaller model")
    except Exception as error:
        found = f"{type(error).__name__}: {error}"[:300]
        refusal = Refusal(Code.PREPARE_FAILED, found, "a prepared model", "see the agent's log")
    return PreparationResult(refusal=refusal)


def _make(order: PreparationOrder, model: bytes, folder: Path) -> str:
    """Write `MODEL_FILE` in the precision of the order, and return for people what it is. Raises ShoalError."""
    from shoal.agent.worker.engine import read_and_verify

    samples = read_and_verify(order.samples, order.samples_digest) if order.samples else b""
    made = folder / MODEL_FILE
    if order.makes == "fp16":
        from shoal.agent.preparation.halve import halve

        return halve(model, samples, order.work, order.tolerances, order.shapes, folder, made)
    from shoal.agent.preparation.quantise import quantise

    return quantise(model, samples, order.tolerances, order.shapes, folder, made)


def _compile(order: PreparationOrder, model: bytes, made: PreparationResult) -> PreparationResult:
    """`made`, compiled. What cannot be compiled is loaded as it is, and refused there if it must be."""
    from shoal.agent.worker.engine import open_engine
    from shoal.agent.worker.providers import Provider

    compiled = Path(order.folder) / COMPILED_FILE
    try:
        provider = Provider(order.provider, order.access, order.precision)
        engine = open_engine(model, provider, order.shapes, compile_to=compiled)
    except ShoalError as error:
        return replace(made, not_compiled=str(error))
    if not compiled.exists():
        return replace(made, not_compiled=f"{order.provider} wrote no compiled form")
    compiled.replace(compiled.with_name(MODEL_FILE))
    return replace(made, compiled=True, operators=tuple(sorted(engine.operators)))


if __name__ == "__main__":
    main()
