"""Finds out whether a model's requests may be filled up with zeros to share a batch: are the answers the same, and from
which length on does it pay?

It runs after `batch_trial` has found that batches pay. Inputs are shortened, answered alone, and answered in a batch
with a longer one. One element is the sharpest of these tests: whatever is taken over the length (a mean, a softmax, a
maximum, the last element) then comes mostly from what was filled up.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from shoal.agent.worker.batches import Batch
from shoal.agent.worker.batching import LEAST_TIMES, BatchDecision, BatchPlan, point_of
from shoal.agent.worker.compare import why_beyond
from shoal.agent.worker.engine import Engine
from shoal.agent.worker.messages import LoadOrder
from shoal.agent.worker.padding import PaddedAxis, Padding, halves, most_of_its_digits, padded_axis
from shoal.agent.worker.request_reader import InferRequest
from shoal.agent.worker.tensors import Array
from shoal.agent.worker.trial_rows import MOST_ROWS, NO_NAMES, Ask, generate_row, pack_rows
from shoal.types.assignment import Batching
from shoal.types.codes import ShoalError

_INDEX_OF_ONES: Final = 4
"""Every fourth generated input has ones where nothing is known of an integer, as a mask over what counts has. A mask of
zeros says that all of a request is padding: what it is answered then says nothing."""


class PaddingTrial:
    """The trial of one loaded model, for which `plan` was measured."""

    def __init__(self, order: LoadOrder, engine: Engine, ask: Ask) -> None:
        self._order = order
        self._engine = engine
        self._ask = ask
        self._outputs = tuple(spec.name for spec in engine.outputs)

    async def decide(self, rule: Batching, decision: BatchDecision) -> BatchDecision:
        """The decision, with padding where it may be and pays, and why."""
        if decision.plan is None:
            return decision
        found = await self._find(rule, decision.plan)
        if isinstance(found, str):
            return replace(decision, reason=f"{decision.reason}; no padding: {found}")
        shown = f"filled up along {found.axis.name!r:.80} from {found.shortest} to at most {found.longest}"
        plan = replace(decision.plan, padding=found)
        return BatchDecision(plan, f"{decision.reason}; {shown}")

    async def _find(self, rule: Batching, plan: BatchPlan) -> Padding | str:
        """A text: why there is no padding."""
        axis = padded_axis(self._engine.input_axes, self._engine.output_axes)
        if isinstance(axis, str):
            return axis
        rows = [row for row in await asyncio.to_thread(self._rows) if (axis.length(row) or 0) > 1]
        if not rows:
            return f"inputs of one element along {axis.name!r:.80}: give samples of a usual length (spec.model.samples)"
        length = axis.length(rows[0]) or 0
        shortest = await self._shortest_that_pays(axis, rows[0], plan.share_s)
        if shortest == length:
            return f"half the length, {length // 2}, is answered sooner alone than in its share of a batch"
        if why := await self._difference(axis, rule, rows, plan.size):
            return why
        return Padding(axis, shortest, most_of_its_digits(length))

    async def _shortest_that_pays(self, axis: PaddedAxis, row: Mapping[str, Array], share_s: float) -> int:
        """The least of the row's length, its half, .. whose run alone surely takes longer than `share_s`."""
        shortest = axis.length(row) or 0
        for length in halves(shortest):
            request = self._request(axis.shorten(row, length))
            try:
                times = [(await self._ask(request))[1] for _ in range(LEAST_TIMES)]
            except ShoalError:
                break  # the model takes none of this length
            if point_of(1, times).low_s <= share_s:
                break
            shortest = length
        return shortest

    async def _difference(self, axis: PaddedAxis, rule: Batching, rows: Sequence[dict[str, Array]], size: int) -> str:
        """How an answer differs where its input was filled up; empty: it does not. Each half of the length, down to
        one element, is tried with two of the rows in turn."""
        compared = 0
        for turn, length in enumerate(halves(axis.length(rows[0]) or 0)):
            whole = rows[turn % len(rows)]
            short = [
                axis.shorten(rows[(turn + step) % len(rows)], length) for step in range(min(2, len(rows), size - 1))
            ]
            try:
                alone = [(await self._ask(self._request(feeds)))[0] for feeds in short]
            except ShoalError:
                continue  # the model takes none of this length
            batch = Batch([*short, whole], [1] * (len(short) + 1), axis)
            try:
                outputs, _ = await self._ask(self._request(batch.join()))
            except ShoalError as error:
                return f"an input filled up from {length} is refused: {error.refusal.found!s:.200}"
            why = await asyncio.to_thread(_difference, batch, alone, outputs, rule)
            if why:
                return f"an input filled up from {length} is answered otherwise than alone: {why}"
            compared += 1
        return "" if compared else "no shorter input is answered, so none can be compared"

    def _request(self, feeds: dict[str, Array]) -> InferRequest:
        return InferRequest(NO_NAMES, feeds, self._outputs)

    def _rows(self) -> list[dict[str, Array]]:
        """Inputs of one row each: samples, or generated ones, of which every second has its floats below zero, so that
        neither a maximum nor a minimum passes over the zeros that are filled in."""
        found = pack_rows(self._order, self._engine)
        if found:
            return found
        generated = [generate_row(self._order, self._engine, _INDEX_OF_ONES * index) for index in range(MOST_ROWS)]
        return [
            {name: -array if turn % 2 and array.dtype.kind == "f" else array for name, array in row.items()}
            for turn, row in enumerate(generated)
        ]


def _difference(
    batch: Batch, alone: Sequence[Mapping[str, Array]], outputs: Mapping[str, Array], rule: Batching
) -> str:
    parts = batch.split(outputs)
    if parts is None:
        return "an output has another length"
    found = (why_beyond(one, part, rule.tolerances) for one, part in zip(alone, parts, strict=False))
    return next(filter(None, found), "")
