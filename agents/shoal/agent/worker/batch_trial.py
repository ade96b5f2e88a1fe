"""Measures whether a model's requests are to run in batches: are its rows independent, and what does a run take?

It sends requests of one row and of several to the replica that serves, one at a time. A row's answer in a batch must be
its answer alone, within the tolerances, whatever the other rows are: one of them is an outlier, which would change a
scale that is taken over the whole batch.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Final

import numpy as np
import structlog

from shoal.agent.worker import isolation
from shoal.agent.worker.batches import Batch, has_batch_axis, row_bytes
from shoal.agent.worker.batching import LEAST_TIMES, BatchDecision, choose, most_seconds, point_of
from shoal.agent.worker.compare import why_beyond
from shoal.agent.worker.engine import Engine
from shoal.agent.worker.messages import LoadOrder, LoadResult
from shoal.agent.worker.request_reader import InferRequest
from shoal.agent.worker.tensors import Array
from shoal.agent.worker.trial_rows import MOST_ROWS, NO_NAMES, Ask, generate_row, pack_rows
from shoal.types.assignment import Batching
from shoal.types.codes import ShoalError
from shoal.types.units import Seconds, show_seconds

_log = structlog.get_logger(__name__)

LONGEST_RUN_S: Final = 0.25
"""A larger batch is not tried if its run may take longer: a client's request may have to wait for it."""
BUDGET_S: Final = 1.0
"""Seconds of runs after which a trial measures no more than it must. As long as a warm-up."""
_MOST_TURNS: Final = 4 * LEAST_TIMES
"""Turns in which the sizes are measured: the interval of 24 times is half as wide as that of 6."""
_OUTLIER: Final = 1000.0
"""Times the magnitude of the other rows: three decimal digits, which is more than int8 resolves."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One input and its answer alone."""

    feeds: Mapping[str, Array]
    # None for an outlier, which is only a neighbour to others.
    answer: Mapping[str, Array] | None


class BatchTrial:
    """The trial of one loaded model."""

    def __init__(self, order: LoadOrder, engine: Engine, ask: Ask) -> None:
        self._order = order
        self._engine = engine
        self._ask = ask
        self._outputs = tuple(spec.name for spec in engine.outputs)
        # By rows: the least seconds of a run so far.
        self._least: dict[int, float] = {}

    async def decide(self, rule: Batching, loaded: LoadResult, hop_s: Seconds) -> BatchDecision:
        """Measure the curve, and decide. `hop_s`: cost of a hop to a runner's thread."""
        reason = self._reason_against(loaded, hop_s)
        if reason:
            return BatchDecision(None, f"no batches: {reason}")
        rows = await self._answer_alone()
        if sum(row.answer is not None for row in rows) < 2:
            return BatchDecision(None, "no batches: fewer than two inputs were answered, so none can be compared")
        mixed = await self._try_sizes(rule, rows)
        if mixed:
            return BatchDecision(None, f"no batches: {mixed}")
        times = await self._measure(rows)
        return choose([point_of(size, found) for size, found in times.items()], rule.delay_s, rule.latency_s)

    def _reason_against(self, loaded: LoadResult, hop_s: Seconds) -> str:
        """Why nothing needs to be measured; empty: it does."""
        pace = self._order.access.pace
        if not has_batch_axis(self._engine.inputs, self._engine.outputs):
            return "not every input and output has an open first axis, or an input holds strings or booleans"
        if pace is not None and pace.simulated:
            return "its device is simulated, and takes no time"
        if not loaded.measured.samples:
            return "it had no warm-up"
        if pace is None and loaded.run_s <= hop_s:
            return f"a run takes {loaded.run_s * 1e6:.0f} us, less than to hand it to a thread ({hop_s * 1e6:.0f} us)"
        if 2 * self._seconds_of_one(loaded) > LONGEST_RUN_S:
            run = show_seconds(self._seconds_of_one(loaded))
            return f"a run takes {run}, and one of two rows may hold others up too long"
        return ""

    def _seconds_of_one(self, loaded: LoadResult) -> float:
        """Of this machine, that a run of the warm-up took."""
        pace = self._order.access.pace
        device_s = 0.0 if pace is None else loaded.measured.latency_p50_s * pace.time_scale
        return max(loaded.run_s, device_s)

    async def _answer_alone(self) -> list[_Row]:
        """Rows with their answers. Inputs that the model refuses are left out."""
        rows: list[_Row] = []
        for feeds, is_outlier in await asyncio.to_thread(self._inputs):
            try:
                answer, seconds = await self._ask(self._request(feeds))
            except ShoalError:
                continue
            self._least[1] = min(seconds, self._least.get(1, seconds))
            rows.append(_Row(feeds, None if is_outlier else answer))
        return rows

    async def _try_sizes(self, rule: Batching, rows: Sequence[_Row]) -> str:
        """Compare batches of each size, and find those worth measuring. Why there must be none; empty: there may."""
        within_s = most_seconds(rule.delay_s, rule.latency_s)
        size = 1
        while size < rule.max and self._may_double(size, within_s):
            size = min(2 * size, rule.max)
            before = isolation.data_bytes()
            try:
                _, first_s = await self._ask_batch(rows, size)  # it also gets its memory
                parts, again_s = await self._ask_batch(rows, size)
                self._least[size] = min(first_s, again_s)
            except ShoalError as error:
                _log.info("batch_refused", assignment=self._order.assignment, size=size, error=str(error))
                return ""
            if parts is None:
                return f"an output of {size} rows has another number of rows"
            if mixed := await asyncio.to_thread(self._difference, rule, rows, parts):
                return f"a row is answered otherwise than alone: {mixed}"
            left, grown = isolation.headroom_bytes(), isolation.data_bytes() - before
            if left is not None and left < 2 * grown:
                return ""
        return ""

    def _may_double(self, size: int, within_s: float) -> bool:
        """Whether a batch of twice the size may be tried, and may be worth it."""
        least = self._least
        speeds = sorted(((rows / seconds, rows) for rows, seconds in least.items()), reverse=True)
        is_past_best = size // 4 >= speeds[0][1]
        fits = 2 * size * row_bytes(self._engine.inputs, self._order.work) <= self._order.max_request_bytes
        return fits and not is_past_best and least[size] <= within_s and 2 * least[size] <= LONGEST_RUN_S

    async def _measure(self, rows: Sequence[_Row]) -> dict[int, list[float]]:
        """Seconds of runs by size, in turns: what changes on the machine meanwhile changes all of them.

        A run alone is timed after another one, as it would be without batches, and larger ones after one of another
        size, as they would be with them: some providers plan anew for a size that is not the one before it (CUDA's, for
        convolutions).
        """
        times: dict[int, list[float]] = {size: [] for size in sorted(self._least)}
        spent = 0.0
        for turn in range(_MOST_TURNS):
            if turn >= LEAST_TIMES and spent >= BUDGET_S:
                break
            for size, found in times.items():
                if size == 1:
                    spent += (await self._ask_batch(rows, size))[1]
                _, seconds = await self._ask_batch(rows, size)
                found.append(seconds)
                spent += seconds
        return times

    async def _ask_batch(self, rows: Sequence[_Row], size: int) -> tuple[list[dict[str, Array]] | None, float]:
        """The rows' answers, as `split` gives them, and the seconds of the run, with those of joining and splitting
        where there is more than one."""

        batch = Batch([row.feeds for row in islice(cycle(rows), size)], [1] * size)

        def join_rows() -> tuple[dict[str, Array], float]:
            start = time.perf_counter()
            return batch.join(), time.perf_counter() - start

        def split_rows() -> tuple[list[dict[str, Array]] | None, float]:
            start = time.perf_counter()
            return batch.split(outputs), time.perf_counter() - start

        feeds, join_s = await asyncio.to_thread(join_rows)
        outputs, run_s = await self._ask(self._request(feeds))
        parts, split_s = await asyncio.to_thread(split_rows)
        return parts, run_s + (join_s + split_s if size > 1 else 0.0)

    def _difference(self, rule: Batching, rows: Sequence[_Row], parts: Sequence[Mapping[str, Array]]) -> str:
        """How a row's answer in a batch differs from its answer alone; empty: it does not."""
        for row, part in zip(cycle(rows), parts, strict=False):
            if row.answer is None:
                continue
            if why := why_beyond(row.answer, part, rule.tolerances):
                return why
        return ""

    def _request(self, feeds: dict[str, Array]) -> InferRequest:
        return InferRequest(NO_NAMES, feeds, self._outputs)

    def _inputs(self) -> list[tuple[dict[str, Array], bool]]:
        """Inputs of one row each, and whether it is an outlier. The second is one, if the model takes numbers."""
        found = pack_rows(self._order, self._engine) or [
            generate_row(self._order, self._engine, index) for index in range(MOST_ROWS)
        ]
        with np.errstate(over="ignore"):
            outlier = {
                name: (array * array.dtype.type(_OUTLIER) if array.dtype.kind == "f" else array)
                for name, array in found[-1].items()
            }
        if all(array.dtype.kind != "f" for array in outlier.values()):
            return [(feeds, False) for feeds in found]
        return [(found[0], False), (outlier, True), *((feeds, False) for feeds in found[1:])]
