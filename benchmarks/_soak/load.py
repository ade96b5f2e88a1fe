"""The mixed load, in a process of its own: `python -m _soak.load SPEC`.

SPEC is JSON: doors (host:port by name), context (of the caller, as `Context` has it), bearer (of the tenant over its
quota), models (ONNX file by workload), seed, and records (the file to write). It prints `ready`. After a line `rest` in
its input nothing is asked any more, until the next line. It ends when its input does; what is under way then is waited
for.
"""

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
from _soak import clients as c
from _soak.outcomes import CRASHED, SESSION, SESSION_LOST, Outcome, RequestRecord
from _soak.reference import TOLERANCE, Reference, difference

from shoal.client import Context
from shoal.types.backoff import delay

GIVE_UP_S: Final = 90.0
"""Seconds for which a request is repeated: the time in which a region must be whole again after any one fault."""
BASE_S: Final = 0.1
CAP_S: Final = 1.0
"""Seconds before a repetition: from the first to the second value, doubled each time."""
STREAM: Final = 16
"""Requests of a stream."""
STEPS: Final = 12
"""Of a session."""
STEP_S: Final = 0.3
"""Mean seconds between two of them."""
DEADLINES_S: Final = (0.002, 0.06)
"""Some can be met, some can not."""
CANCELLED_S: Final = (0.0, 0.03)
"""From when to when a client cancels."""
TOO_LATE: Final = frozenset({"DEADLINE_EXCEEDED", "OVERLOADED"})
"""What a request with a deadline may be refused with; the second: others are before it."""
OVER_QUOTA: Final = frozenset({"TENANT_RATE", "TENANT_CONCURRENCY"})

Failures = list[tuple[float, str]]


class Lane:
    """Requests of one kind, one after the other: how they are repeated and taken down. See `RequestRecord`."""

    def __init__(self, name: str, door: str, model: str, out: TextIO) -> None:
        self._name = name
        self._door = door
        self._model = model
        self._out = out

    def record(self, start: float, outcome: Outcome, detail: str = "", failures: Failures | None = None) -> None:
        now, failed = time.monotonic(), tuple(failures or ())
        record = RequestRecord(self._name, self._door, self._model, start, now, outcome, detail, failed)
        self._out.write(record.to_line() + "\n")

    def record_answer(self, start: float, problem: str, failures: Failures | None = None) -> None:
        self.record(start, Outcome.WRONG if problem else Outcome.ANSWERED, problem, failures)

    async def may_repeat(self, error: c.CallFailedError, start: float, failures: Failures) -> bool:
        """Whether the client repeats what failed so. If so it is noted, and returns when it is time."""
        now = time.monotonic()
        if not error.may_repeat or now - start > GIVE_UP_S:
            return False
        failures.append((now, error.code))
        await asyncio.sleep(delay(self._name, min(len(failures) - 1, 6), base_s=BASE_S, cap_s=CAP_S))
        return True

    async def ask(
        self,
        call: Callable[[], Awaitable[c.Arrays]],
        problem: Callable[[c.Arrays], str],
        expected: Collection[str] = (),
    ) -> bool:
        """One request; whether it was answered. expected: codes with which it may be refused."""
        start, failures = time.monotonic(), Failures()
        while True:
            try:
                answer = await call()
            except c.CallFailedError as error:
                if error.code in expected:
                    self.record(start, Outcome.REFUSED, error.code, failures)
                elif await self.may_repeat(error, start, failures):
                    continue
                else:
                    is_crashed = error.code in CRASHED
                    self.record(start, Outcome.CRASHED if is_crashed else Outcome.LOST, str(error), failures)
                return False
            self.record_answer(start, problem(answer), failures)
            return True


Round = Callable[[Lane], Awaitable[None]]
"""Sends one request or several."""


@dataclass(slots=True)
class Mix:
    """The lanes of the load."""

    # ONNX Runtime by workload.
    references: Mapping[str, Reference]
    # Takes all records.
    out: TextIO
    # Of pauses, deadlines and cancellations.
    rng: random.Random
    # Set when no further round begins.
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    # Clear while nothing is asked.
    asking: asyncio.Event = field(default_factory=asyncio.Event)
    # All that were made.
    clients: list[c.Client] = field(default_factory=list)
    # Names of sessions.
    _sequences: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def lanes_at(self, name: str, door: c.Door) -> list[Awaitable[None]]:
        """All kinds of requests at one front. Numbers are mean seconds between two rounds of a lane."""
        triton, shoal, rest, plain = c.TritonGrpc(door), c.ShoalGrpc(door), c.TritonRest(door), c.ShoalRest(door)
        json_rest = c.TritonRest(door, {model: each.outputs for model, each in self.references.items()})
        self.clients += (triton, shoal, rest, plain, json_rest)
        rounds = (
            ("unary", "small", 0.1, self._unary(triton, "small")),
            ("unary", "spread", 0.3, self._unary(triton, "spread")),
            ("unary", "classifier", 1.0, self._unary(triton, "classifier")),
            ("unary", "tensor-1mb", 1.0, self._unary(triton, "tensor-1mb")),
            ("unary shoal", "small", 0.3, self._unary(shoal, "small")),
            ("rest binary", "spread", 0.5, self._unary(rest, "spread")),
            ("rest json", "small", 1.0, self._unary(json_rest, "small")),
            ("rest json", "classifier", 3.0, self._unary(json_rest, "classifier")),
            ("rest shoal", "tensor-1mb", 1.0, self._unary(plain, "tensor-1mb")),
            ("stream triton", "small", 3.0, self._stream(triton, "small")),
            ("stream shoal", "spread", 3.0, self._stream(shoal, "spread")),
            (SESSION, "sums", 1.0, self._session(triton, "sums")),
            (SESSION, "sums", 1.0, self._session(rest, "sums")),
            ("deadline", "classifier", 0.5, self._deadline(triton, "classifier")),
            ("deadline rest", "small", 1.0, self._deadline(rest, "small")),
            ("cancel", "classifier", 0.5, self._cancel(triton, "classifier")),
            ("cancel", "tensor-1mb", 1.0, self._cancel(triton, "tensor-1mb")),
            ("cancel rest", "classifier", 1.0, self._cancel(rest, "classifier")),
            ("cancel rest", "tensor-1mb", 1.0, self._cancel(rest, "tensor-1mb")),
            ("bad", "", 0.5, self._bad(triton)),
            ("bad rest", "", 1.0, self._bad(rest)),
            *3 * (("batched", "batched", 0.3, self._unary(triton, "batched")),),
        )
        return [self._run(Lane(kind, name, model, self.out), pause_s, each) for kind, model, pause_s, each in rounds]

    def flood(self, name: str, door: c.Door) -> list[Awaitable[None]]:
        client = c.TritonGrpc(door)
        self.clients.append(client)
        each = self._unary(client, "small", OVER_QUOTA)
        return [self._run(Lane("over its quota", name, "small", self.out), 0.1, each) for _ in range(3)]

    def on_input(self) -> None:
        """One line can be read, or the end."""
        line = sys.stdin.readline()
        if not line:
            self.stopping.set()
        if line == "rest\n":
            self.asking.clear()
        else:
            self.asking.set()

    async def _run(self, lane: Lane, pause_s: float, each: Round) -> None:
        while not self.stopping.is_set():
            await self.asking.wait()
            await each(lane)
            await asyncio.sleep(self.rng.expovariate(1 / pause_s))

    def _unary(self, client: c.Client, model: str, expected: Collection[str] = ()) -> Round:
        reference = self.references[model]

        async def ask(lane: Lane) -> None:
            inputs = reference.inputs()
            await lane.ask(
                lambda: client.infer(model, inputs), lambda found: reference.problem(inputs, found), expected
            )

        return ask

    def _deadline(self, client: c.Client, model: str) -> Round:
        reference = self.references[model]

        async def ask(lane: Lane) -> None:
            inputs, deadline_s = reference.inputs(), self.rng.uniform(*DEADLINES_S)
            await lane.ask(
                lambda: client.infer(model, inputs, deadline_s=deadline_s),
                lambda found: reference.problem(inputs, found),
                TOO_LATE,
            )

        return ask

    def _stream(self, client: c.StreamClient, model: str) -> Round:
        reference = self.references[model]

        async def ask(lane: Lane) -> None:
            """What a stream that broke has left is sent in another."""
            left = [reference.inputs() for _ in range(STREAM)]
            start, failures = time.monotonic(), Failures()
            while left:
                try:
                    async for found in client.stream(model, tuple(left)):
                        lane.record_answer(start, reference.problem(left.pop(0), found), failures)
                        failures = Failures()
                    if left:
                        raise c.CallFailedError(c.BROKEN, f"a stream ended {len(left)} answers early", may_repeat=True)
                except c.CallFailedError as error:
                    if not await lane.may_repeat(error, start, failures):
                        for _ in left:
                            lane.record(start, Outcome.LOST, str(error), failures)
                        return

        return ask

    def _session(self, client: c.Client, model: str) -> Round:
        reference = self.references[model]

        async def ask(lane: Lane) -> None:
            """Steps are numbered, so that each may be repeated. What is lost ends: the remedy is to begin anew."""
            name, state = next(self._sequences), np.zeros((1, 2), np.float32)
            for step in range(1, STEPS + 1):
                await self.asking.wait()
                inputs = {"x": reference.inputs()["x"]}
                right = reference.answer({**inputs, "state": state})
                state = right["next"]
                if not await lane.ask(
                    partial(client.infer, model, inputs, options=_step(name, step)),
                    partial(difference, right={"y": right["y"]}),
                    (SESSION_LOST,),
                ):
                    return
                await asyncio.sleep(self.rng.expovariate(1 / STEP_S))

        return ask

    def _cancel(self, client: c.Client, model: str) -> Round:
        reference = self.references[model]

        async def ask(lane: Lane) -> None:
            inputs, start = reference.inputs(), time.monotonic()
            task = asyncio.ensure_future(client.infer(model, inputs))
            await asyncio.wait({task}, timeout=self.rng.uniform(*CANCELLED_S))
            task.cancel()
            try:
                lane.record_answer(start, reference.problem(inputs, await task))
            except asyncio.CancelledError:
                lane.record(start, Outcome.CANCELLED)
            except c.CallFailedError as error:
                lane.record(start, Outcome.CANCELLED, error.code)

        return ask

    def _bad(self, client: c.Client) -> Round:
        x = np.ones((1, 64), np.float32)
        cases: Iterator[tuple[str, c.Arrays, dict[str, Any], str]] = itertools.cycle([
            ("small", {"nobody": x}, {}, "INVALID_ARGUMENT"),
            ("small", {"x": x.astype(np.float64)}, {}, "INVALID_ARGUMENT"),
            ("small", {"x": x[:, :8]}, {}, "INVALID_ARGUMENT"),
            ("tensor-1mb", {"x": np.ones((1, 2**17), np.float32)}, {}, "INVALID_ARGUMENT"),
            ("nothing", {"x": x}, {}, "MODEL_NOT_FOUND"),
            ("small", {"x": x}, {"model_version": "9"}, "MODEL_NOT_FOUND"),
            ("sums", {"x": x[:, :2]}, {}, "SESSION_INVALID"),
            ("sums", {"x": x[:, :2]}, {"sequence_id": 2**62}, SESSION_LOST),
        ])  # fmt: skip

        async def ask(lane: Lane) -> None:
            model, inputs, options, code = next(cases)
            await lane.ask(
                lambda: client.infer(model, inputs, options=options), lambda _: f"answered, not {code}", (code,)
            )

        return ask


def _step(name: int, step: int) -> dict[str, Any]:
    return {
        "sequence_id": name,
        "sequence_start": step == 1,
        "sequence_end": step == STEPS,
        "parameters": {"sequence_step": step},
    }


async def run(spec: Mapping[str, Any], out: TextIO) -> None:
    numbers = np.random.default_rng(spec["seed"])
    references = {
        name: Reference(path, numbers, TOLERANCE if name == "batched" else 0.0) for name, path in spec["models"].items()
    }
    mix = Mix(references, out, random.Random(spec["seed"]))
    mix.asking.set()
    asyncio.get_running_loop().add_reader(0, mix.on_input)
    context = Context(**spec["context"])
    lanes = [lane for name, at in spec["doors"].items() for lane in mix.lanes_at(name, c.Door(at, context))]
    name, at = next(iter(spec["doors"].items()))
    lanes += mix.flood(name, c.Door(at, context, spec["bearer"]))
    print("ready", flush=True)
    await asyncio.gather(*lanes)
    for client in mix.clients:
        await client.close()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    with Path(spec["records"]).open("w") as out:
        asyncio.run(run(spec, out))


if __name__ == "__main__":
    main()
