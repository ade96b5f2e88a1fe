"""A real worker makes batches where that pays, and each request gets what it would get alone."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.cluster.worker_pool import CPU, WorkerClient, WorkerPoolHarness, infer, request
from harness.models import engine_cases as models
from harness.wait import until
from shoal.agent.ports import BATCHES, WorkerReady
from shoal.agent.worker.pool_options import PoolOptions
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Batching, Work
from shoal.types.codes import Code, ShoalError
from shoal.types.migration import Metric, Tolerance
from shoal.types.units import Seconds

# Whether batches pay is measured, and a run that its machine held up counts as stuck.
pytestmark = pytest.mark.alone

SIDE = 512
TOLERANCES = (Tolerance("", Metric.MAX_REL, 1e-3), Tolerance("", Metric.COSINE, 0.9999))
RULE = Batching(16, Seconds(0.0), None, TOLERANCES)
WORDS = 64
"""Rows of the table of `lookup`."""


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WorkerPoolHarness]:
    """One runner, so that what waits is known."""
    async with WorkerPoolHarness(tmp_path, PoolOptions(queue=256), replace(CPU, parallelism=1)) as opened:
        yield opened


def work(name: str = "x", *shape: int, below: int = 0) -> Work:
    return Work(nodes=1, shapes={name: (1, *(shape or (SIDE,)))}, below={name: below} if below else {})


async def serve_measured(pool: WorkerPoolHarness, name: str, data: bytes, asked: Work, rule: Batching = RULE) -> str:
    """What the replica says of batches, once they are measured."""
    await pool.serve(name, data, work=asked, batching=rule)
    return (await pool.wait_event(name, WorkerReady)).note


def largest_batch(counts: tuple[int, ...]) -> int:
    """The bucket of the largest run."""
    return max((bound for bound, count in zip(BATCHES, counts, strict=False) if count), default=0)


async def test_answers_are_those_of_each_alone_and_keep_their_callers(pool: WorkerPoolHarness) -> None:
    note = await serve_measured(pool, "layers", models.layers(8, SIDE), work())
    assert "times the rows a second" in note
    assert "batches of up to" in note
    clients = [await pool.client("layers") for _ in range(3)]
    rng = np.random.default_rng(7)
    feeds = [{"x": rng.standard_normal((1 + number % 3, SIDE)).astype(np.float32)} for number in range(90)]
    alone = [await infer(clients[0], each) for each in feeds[:30]]

    async def ask(number: int) -> Any:
        made = request(feeds[number], typed=number % 10 == 0)  # an unusual one runs alone
        made.id = f"call {number}"
        return await infer(clients[number % 3], made)

    answers = await asyncio.gather(*(ask(number) for number in range(90)))
    assert [answer.id for answer in answers] == [f"call {number}" for number in range(90)]
    for one, answer, given in zip(alone, answers[:30], feeds[:30], strict=True):
        expected, got = (np.frombuffer(each.raw_output_contents[0], np.float32) for each in (one, answer))
        assert list(answer.outputs[0].shape) == list(given["x"].shape)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    found = (await pool.stats("layers")).batches
    assert largest_batch(found.counts) > 3, found
    assert found.inputs == sum(each["x"].shape[0] for each in (*feeds, *feeds[:30]))
    (served,) = (await pool.stats("layers")).served
    assert (served.requests, served.errors) == (120, 0)
    for client in clients:
        await client.close()


async def test_a_bad_request_of_a_batch_fails_alone(pool: WorkerPoolHarness) -> None:
    note = await serve_measured(
        pool, "words", models.lookup(WORDS, 8, SIDE), replace(work("i", below=WORDS), shapes={"i": (1,)})
    )
    assert "batches of up to" in note
    client = await pool.client("words")

    def index(number: int) -> int:
        return WORDS + number if number % 40 == 5 else number % WORDS

    async def ask(number: int) -> oip.ModelInferResponse:
        return await infer(client, {"i": np.array([index(number)], np.int64)})

    expected = [await ask(number) for number in range(5)]
    answers = await asyncio.gather(*(ask(number) for number in range(120)), return_exceptions=True)
    bad = {number for number, answer in enumerate(answers) if isinstance(answer, BaseException)}
    assert bad == {number for number in range(120) if index(number) >= WORDS}
    assert {str(getattr(answers[number], "code", answers[number])) for number in bad} == {Code.INVALID_ARGUMENT}
    answered = [answer for answer in answers[:5] if isinstance(answer, oip.ModelInferResponse)]
    for one, answer in zip(expected, answered, strict=True):
        a, b = (np.frombuffer(each.raw_output_contents[0], np.float32) for each in (one, answer))
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4 * np.abs(a).max())
    stats = await pool.stats("words")
    (served,) = stats.served
    assert (served.requests, served.errors, served.refused) == (125, 0, len(bad))
    assert largest_batch(stats.batches.counts) > 1
    await client.close()


async def test_callers_that_go_while_their_batch_forms_or_runs_stop_no_other(pool: WorkerPoolHarness) -> None:
    await serve_measured(pool, "layers", models.layers(8, SIDE), work())
    client = await pool.client("layers")
    feeds = {"x": np.ones((1, SIDE), np.float32)}
    expected = (await infer(client, feeds)).raw_output_contents
    for number in range(40):
        asked = [asyncio.create_task(infer(client, feeds)) for _ in range(32)]
        # Some of them are answered, and the others are cancelled wherever they have come to.
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=10.0)
        for task in asked[number % 3 :]:
            task.cancel()
        await asyncio.wait(asked, timeout=10.0)
    answer = await infer(client, feeds, deadline_s=10.0)
    np.testing.assert_allclose(
        np.frombuffer(answer.raw_output_contents[0], np.float32), np.frombuffer(expected[0], np.float32), rtol=1e-4
    )
    assert (await pool.stats("layers")).served[0].errors == 0
    await client.close()


async def test_requests_of_unequal_lengths_share_a_run_and_are_answered_as_alone(pool: WorkerPoolHarness) -> None:
    """Also where one of them is refused."""
    asked = Work(nodes=1, shapes={"i": (1, 2)}, below={"i": WORDS})
    rule = replace(RULE, delay_s=Seconds(0.05), padding=True)
    note = await serve_measured(pool, "sequences", models.sequences("words", 8, SIDE), asked, rule)
    assert "filled up along 's' from 1 to at most 3" in note
    client = await pool.client("sequences")
    words = [np.arange(number, number + 1 + number % 3)[None] % WORDS for number in range(90)]
    alone = [await infer(client, {"i": each}) for each in words[:30]]
    assert largest_batch((await pool.stats("sequences")).batches.counts) == 1
    for _ in range(5):
        await asyncio.gather(*(infer(client, {"i": each}) for each in words[:3]))
    assert largest_batch((await pool.stats("sequences")).batches.counts) > 1, "no two of three are of one length"

    async def ask(number: int) -> Any:
        made = request({"i": np.full((1, 2), WORDS) if number == 50 else words[number]})
        made.id = f"call {number}"
        return await infer(client, made)

    answers = await asyncio.gather(*(ask(number) for number in range(90)), return_exceptions=True)
    assert [number for number, answer in enumerate(answers) if isinstance(answer, BaseException)] == [50]
    assert str(getattr(answers[50], "code", answers[50])) == Code.INVALID_ARGUMENT
    for number, one in enumerate(alone):
        answer = answers[number]
        assert isinstance(answer, oip.ModelInferResponse)
        assert answer.id == f"call {number}"
        assert list(answer.outputs[0].shape) == [1, 1 + number % 3, SIDE]
        a, b = (np.frombuffer(each.raw_output_contents[0], np.float32) for each in (one, answer))
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4 * np.abs(a).max())
    await client.close()


@pytest.mark.parametrize(
    ("how", "why"),
    [("mean", "otherwise than alone"), ("scale", "otherwise than alone"), ("twice", "another number of rows")],
)
async def test_rows_that_are_not_independent_never_share_a_run(pool: WorkerPoolHarness, how: str, why: str) -> None:
    note = await serve_measured(pool, how, models.mixing(how, 4, SIDE), work())
    assert "no batches" in note
    assert why in note
    client = await pool.client(how)
    feeds = {"x": np.random.default_rng(3).standard_normal((1, SIDE)).astype(np.float32)}
    alone = await infer(client, feeds)
    answers = await asyncio.gather(*(infer(client, feeds) for _ in range(40)))
    assert all(answer.raw_output_contents == alone.raw_output_contents for answer in answers)
    assert largest_batch((await pool.stats(how)).batches.counts) == 1
    await client.close()


async def test_what_needs_no_batch_has_none_and_says_why(pool: WorkerPoolHarness) -> None:
    """One whose run is shorter than a hop, one whose axis is fixed, one whose latency bound leaves no room."""
    assert "no batches: a run takes" in await serve_measured(
        pool, "small", models.add_one(), Work(nodes=1, shapes={"x": (1,)})
    )
    assert "open first axis" in await serve_measured(pool, "fixed", models.heavy(1), work("x", 1))
    tight = replace(RULE, latency_s=Seconds(1e-5))
    note = await serve_measured(pool, "tight", models.layers(8, SIDE), work(), tight)
    assert "no batches" in note


async def test_a_worker_without_the_rule_makes_no_batches(pool: WorkerPoolHarness) -> None:
    ready = await pool.serve("layers", models.layers(8, SIDE), work=work())
    assert "batch" not in ready.note
    client = await pool.client("layers")
    await asyncio.gather(*(infer(client, {"x": np.ones((1, SIDE), np.float32)}) for _ in range(40)))
    assert largest_batch((await pool.stats("layers")).batches.counts) == 1
    await client.close()


async def test_a_comparison_runs_alone(pool: WorkerPoolHarness) -> None:
    """So its answer is bit for bit that of a replica that makes no batches."""
    data = models.layers(8, SIDE)
    assert "batches of up to" in await serve_measured(pool, "layers", data, work())
    await pool.serve("plain", data, work=work())
    client, plain = await pool.client("layers"), await pool.client("plain")
    body = request({"x": np.random.default_rng(5).standard_normal((1, SIDE)).astype(np.float32)}).SerializeToString()
    expected = bytes((await plain.call("answer", body)).payload)
    others = [asyncio.create_task(client.ask(body)) for _ in range(60)]
    answers = [bytes((await client.call("answer", body)).payload) for _ in range(3)]
    assert answers == [expected] * 3
    await asyncio.gather(*others)
    await client.close()
    await plain.close()


LONG = 100_000
"""Trips of a run that takes longer than a message."""


class _Blocked:
    """A replica whose one runner is taken by a request that runs until it is cancelled."""

    def __init__(self, pool: WorkerPoolHarness) -> None:
        self._pool = pool

    async def start(self) -> WorkerClient:
        await self._pool.serve("loop", models.loop(-1))
        self.client = await self._pool.client("loop")
        self._slow = asyncio.create_task(infer(self.client, trips(2**60), deadline_s=60))
        await until(self._is_alone, 5, "it runs")
        return self.client

    async def in_flight(self) -> int:
        return (await self._pool.stats("loop")).in_flight

    async def release(self) -> None:
        self._slow.cancel()
        await asyncio.wait([self._slow])

    async def _is_alone(self) -> bool:
        return await self.in_flight() == 1


def trips(count: int) -> dict[str, Any]:
    return {"x": np.ones(1, np.float32), "n": np.array(count, np.int64)}


async def test_what_waits_runs_earliest_deadline_first(pool: WorkerPoolHarness) -> None:
    blocked = _Blocked(pool)
    client = await blocked.start()
    ended: list[float] = []

    async def ask(deadline_s: float) -> None:
        await infer(client, trips(3), deadline_s=deadline_s)
        ended.append(deadline_s)

    tasks = [asyncio.create_task(ask(seconds)) for seconds in (40.0, 20.0, 50.0, 30.0)]

    async def waits() -> bool:
        return await blocked.in_flight() == 5

    await until(waits, 5, "four that wait")
    await blocked.release()
    await asyncio.gather(*tasks)
    assert ended == [20.0, 30.0, 40.0, 50.0]
    await client.close()


async def test_a_comparison_does_not_wait_for_all_that_end_earlier(pool: WorkerPoolHarness) -> None:
    """A replica that is always busy would answer it never, and no move from it could be verified."""
    blocked = _Blocked(pool)
    client = await blocked.start()
    ended: list[str] = []

    async def ask(deadline_s: float) -> None:
        await infer(client, trips(LONG), deadline_s=deadline_s)
        ended.append("request")

    async def compare() -> None:
        await client.call("answer", request(trips(LONG)).SerializeToString(), header={"deadline_s": 60.0})
        ended.append("comparison")

    tasks = [asyncio.create_task(ask(10.0)) for _ in range(3)]
    tasks.append(asyncio.create_task(compare()))

    async def waits() -> bool:
        return await blocked.in_flight() == 5

    await until(waits, 5, "four that wait")
    await blocked.release()
    await asyncio.gather(*tasks)
    assert ended[0] == "comparison"
    await client.close()


async def test_cancelled_and_expired_requests_leave_the_queue_at_once(pool: WorkerPoolHarness) -> None:
    """While the runner is still taken: their places are free, and they cost no run."""
    blocked = _Blocked(pool)
    client = await blocked.start()
    gone = [asyncio.create_task(infer(client, trips(3), deadline_s=50)) for _ in range(100)]
    late = [asyncio.create_task(infer(client, trips(3), deadline_s=0.3)) for _ in range(100)]

    async def only_the_slow_one() -> bool:
        return await blocked.in_flight() == 1

    async def all_of_them() -> bool:
        return await blocked.in_flight() >= 101

    await until(all_of_them, 5, "they wait")
    for task in gone:
        task.cancel()
    await until(only_the_slow_one, 5, "an empty queue")
    refused = await asyncio.gather(*late, return_exceptions=True)
    assert {each.code for each in refused if isinstance(each, ShoalError)} == {Code.DEADLINE_EXCEEDED}
    (served,) = (await pool.stats("loop")).served
    assert (served.late, served.successes) == (200, 0)
    await blocked.release()
    assert (await infer(client, trips(3))).outputs[0].name == "y"
    await client.close()
