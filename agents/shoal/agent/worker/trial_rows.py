"""Inputs of one row each, by which a loaded model's batches are tried, and how it is asked."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from shoal.agent.worker.engine import Engine, read_and_verify
from shoal.agent.worker.messages import LoadOrder
from shoal.agent.worker.request_reader import InferRequest, RequestNames
from shoal.agent.worker.sample_inputs import sample_input
from shoal.agent.worker.tensors import Array
from shoal.artifacts.samples import read_pack
from shoal.types.codes import ShoalError

MOST_ROWS: Final = 4
NO_NAMES: Final = RequestNames(b"", b"", b"")
_SEED: Final = 0

Ask = Callable[[InferRequest], Awaitable[tuple[dict[str, Array], float]]]
"""Runs a request alone: its outputs, and the seconds of the run. Raises ShoalError."""


def pack_rows(order: LoadOrder, engine: Engine) -> list[dict[str, Array]]:
    """The first rows of the samples that were given. Empty: there are too few."""
    if not order.samples:
        return []
    try:
        pack = read_pack(read_and_verify(order.samples, order.samples_digest), engine.inputs, engine.outputs)
    except ShoalError:
        return []  # the warm-up has logged it
    found = [pack.sample(index)[0] for index in range(min(pack.count, MOST_ROWS))]
    return [{name: array[:1] for name, array in feeds.items()} for feeds in found] if len(found) > 1 else []


def generate_row(order: LoadOrder, engine: Engine, index: int) -> dict[str, Array]:
    """Number `index` of the generated inputs, as `sample_input` has them."""
    shapes = {name: (1, *shape[1:]) if shape else shape for name, shape in order.work.shapes.items()}
    return sample_input(engine.inputs, replace(order.work, shapes=shapes), _SEED, index)
