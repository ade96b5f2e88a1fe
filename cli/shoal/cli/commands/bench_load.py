"""`shoal bench load`: requests for one workload, as many at once or as often as asked, and how they were answered."""

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from itertools import cycle
from pathlib import Path
from typing import Final

import click
import numpy as np

from shoal.cli.arrays import Array, match_inputs, read_inputs
from shoal.cli.commands.infer import gateway_of
from shoal.cli.load_figures import LoadFigures, LoadRequest, figures_of
from shoal.cli.names import WORKLOAD
from shoal.cli.options import connection, output, select_context, tenant
from shoal.cli.render.output import emit, note, table
from shoal.client.async_inference import AsyncInferenceClient
from shoal.client.tensors import BF16, BYTES, DTYPES, ModelMetadata, TensorSpec
from shoal.types.codes import Code, ShoalError, refuse

IN_FLIGHT: Final = "1,4,16"
MOST_IN_FLIGHT: Final = 4096
MOST_AXIS: Final = 4096
BUSY: Final = 0.9
"""Share of a core beyond which this client, which is one process, is what limits the rate."""

Ask = Callable[[], Awaitable[object]]


@click.command("load")
@click.argument("workloads", metavar="WORKLOAD..", type=WORKLOAD, nargs=-1, required=True)
@click.option("--input", "source", type=click.Path(path_type=Path), help="As of `shoal infer`. [default: random]")
@click.option(
    "--in-flight", default=IN_FLIGHT, show_default=True, metavar="N[,N..]", help="Requests at once, one level each."
)
@click.option("--rate", type=click.FloatRange(0.1, 100_000), help="Requests a second at random times instead.")
@click.option("--seconds", type=click.FloatRange(0.1, 3600), default=5.0, show_default=True, help="Of each level.")
@click.option("--deadline", type=click.FloatRange(0.001, 3600), default=10.0, show_default=True, help="In seconds.")
@click.option(
    "--retries",
    type=click.IntRange(0, 100),
    default=0,
    show_default=True,
    help="How often a request is sent again where that is safe, as clients do.",
)
@click.option("--gateway", default="", metavar="HOST:PORT", help="Data port. [default: of the region's gateway]")
@tenant
@connection
@output
def load(
    workloads: tuple[str, ...],
    source: Path | None,
    in_flight: str,
    rate: float | None,
    seconds: float,
    deadline: float,
    retries: int,
    gateway: str,
    tenant: str,
    context: str,
    region: str,
    output: str,
) -> None:
    """Ask WORKLOAD as often as its answers allow, and show answers, p50, p90, p99 and refusals. Several are asked in
    turn.

    Each level keeps a number of requests in flight; with --rate requests come at random times of that rate, whether or
    not earlier ones were answered, and count from when they were due. Nothing is repeated, unless --retries says so.
    Ctrl-C ends it early, and shows what was found until then. The client is one process: where it used a whole core, it
    is what was measured.
    """
    levels = _parse_levels(in_flight)
    target = replace(select_context(context, region), tenant=tenant)
    address = gateway or gateway_of(target)

    async def run() -> list[LoadFigures]:
        interrupted = asyncio.Event()
        async with AsyncInferenceClient(target, address, timeout_s=deadline, retries=retries) as client:
            arguments = {name: await _inputs(client, name, source) for name in workloads}
            turns = cycle(arguments.items())

            async def ask() -> object:
                workload, (inputs, datatypes) = next(turns)
                return await client.infer(workload, inputs, datatypes=datatypes)

            for _ in arguments:
                await ask()  # connects; a workload that cannot be asked is told of at once
            # Also where a shell started it in the background, and had it ignore interrupts.
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
            if rate is not None:
                return [await run_at_rate(ask, rate, seconds, np.random.default_rng(0), interrupted)]
            return [
                await run_in_flight(ask, count, seconds, interrupted) for count in levels if not interrupted.is_set()
            ]

    found = asyncio.run(run())
    if output in ("json", "yaml"):
        emit([_document(each) for each in found], output)
    else:
        _show(found)


async def run_in_flight(ask: Ask, count: int, seconds: float, interrupted: asyncio.Event) -> LoadFigures:
    """Keep `count` requests in flight: each is followed by the next, until `interrupted` is set."""
    loop = asyncio.get_running_loop()
    requests: list[LoadRequest] = []
    began, cpu_began = loop.time(), time.process_time()
    end = began + seconds

    async def caller() -> None:
        while (now := loop.time()) < end and not interrupted.is_set():
            requests.append(await _request(ask, now))

    await asyncio.gather(*(caller() for _ in range(count)))
    used_s = time.process_time() - cpu_began
    return figures_of(f"{count} in flight", requests, loop.time() - began, used_s)


async def run_at_rate(
    ask: Ask, rate: float, seconds: float, chance: np.random.Generator, interrupted: asyncio.Event
) -> LoadFigures:
    """Begin requests at random times, `rate` a second, until `interrupted` is set. More than MOST_IN_FLIGHT are not
    begun, and count as OVERLOADED."""
    loop = asyncio.get_running_loop()
    requests: list[LoadRequest] = []
    inside: set[asyncio.Task[LoadRequest]] = set()

    def on_done(task: asyncio.Task[LoadRequest]) -> None:
        inside.discard(task)
        requests.append(task.result())

    began, cpu_began = loop.time(), time.process_time()
    due = began + float(chance.exponential(1 / rate))
    while due < began + seconds:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(due):
                await interrupted.wait()
                break
        if len(inside) >= MOST_IN_FLIGHT:
            requests.append(LoadRequest(0.0, Code.OVERLOADED))
        else:
            task = asyncio.create_task(_request(ask, due))
            inside.add(task)
            task.add_done_callback(on_done)
        due += float(chance.exponential(1 / rate))
    await asyncio.gather(*inside)
    used_s = time.process_time() - cpu_began
    return figures_of(f"{rate:g}/s", requests, loop.time() - began, used_s)


async def _request(ask: Ask, due: float) -> LoadRequest:
    loop = asyncio.get_running_loop()
    try:
        await ask()
    except ShoalError as error:
        return LoadRequest(loop.time() - due, error.code)
    return LoadRequest(loop.time() - due)


async def _inputs(
    client: AsyncInferenceClient, workload: str, source: Path | None
) -> tuple[dict[str, Array], dict[str, str]]:
    """Arrays and datatypes by input. Raises ShoalError."""
    if source is None:
        return random_inputs(await client.metadata(workload))
    given = read_inputs(source)
    if given.datatypes:
        return given.arrays, given.datatypes
    return match_inputs(given, workload, await client.metadata(workload))


def random_inputs(metadata: ModelMetadata) -> tuple[dict[str, Array], dict[str, str]]:
    """Small numbers of each input's datatype, in its shape with 1 for an open axis. Raises
    ShoalError(INVALID_ARGUMENT)."""
    rng = np.random.default_rng(0)
    arrays = {each.name: _random_array(each, rng) for each in metadata.inputs}
    return arrays, {each.name: each.datatype for each in metadata.inputs}


def _random_array(spec: TensorSpec, rng: np.random.Generator) -> Array:
    shape = tuple(1 if size < 0 else size for size in spec.shape)
    if math.prod(shape) > MOST_AXIS**2:
        found = f"input {spec.name!r:.80} of {math.prod(shape)} elements"
        raise refuse(Code.INVALID_ARGUMENT, found, "inputs of your own", "--input FILE")
    if spec.datatype == BYTES:
        return np.full(shape, b"a", dtype=object)
    if spec.datatype == BF16:
        return np.zeros(shape, np.uint16)
    kind = np.dtype(DTYPES[spec.datatype])
    return rng.random(shape).astype(kind) if kind.kind == "f" else rng.integers(0, 2, shape).astype(kind)


def _parse_levels(text: str) -> list[int]:
    """Raises ShoalError(USAGE)."""
    levels = [int(each) if each.isascii() and each.isdecimal() else 0 for each in text.split(",")]
    if not all(1 <= each <= MOST_IN_FLIGHT for each in levels):
        raise refuse(Code.USAGE, f"--in-flight {text!r:.60}", f"numbers of 1 to {MOST_IN_FLIGHT}", "--in-flight 1,4,16")
    return levels


def _document(figures: LoadFigures) -> dict[str, object]:
    """JSON has no NaN."""
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in asdict(figures).items()
    }


def _show(found: Sequence[LoadFigures]) -> None:
    def milliseconds(seconds: float) -> str:
        return "-" if math.isnan(seconds) else f"{seconds * 1e3:.2f}"

    table(
        ["LOAD", "ANSWERS", "ANSWERS/S", "P50 MS", "P90 MS", "P99 MS", "REFUSED", "CLIENT'S CORE"],
        [
            [
                each.level, f"{each.answers:,}", f"{each.per_s:,.1f}",
                *map(milliseconds, (each.p50_s, each.p90_s, each.p99_s)),
                ", ".join(f"{code} {count}" for code, count in each.refused.items()) or "0", f"{each.client_core:.0%}",
            ]
            for each in found
        ],
    )  # fmt: skip
    if any(each.client_core > BUSY for each in found):
        note("this client used a whole core: the workload can answer more than was measured")
