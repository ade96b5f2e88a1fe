"""A55: one request that is expensive to parse. Bodies of JSON over REST, at a real front.

One request of one tenant takes at most half a second of the event loop's CPU time. It takes memory of at most four
times its bytes: of its text, or of its tensors where these are larger. What is no tensor is refused by its count or
size, before anything is made of it.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress

import pytest

from harness.clients.oip import RestClient
from harness.cluster.dataplane_node import DataPlaneNode
from harness.measure.process_usage import Usage
from harness.report import record
from shoal.types.codes import Code
from shoal.types.device import Role

pytestmark = pytest.mark.alone

MIB = 2**20
LOOP_S = 0.5
MEMORY_RATIO = 4.0
FIXED_BYTES = 24 * MIB
"""What a request takes whatever its size: buffers of TLS, a thread's stack, arenas of the allocator."""


def infer(data: str, shape: list[int], datatype: str = "FP32") -> bytes:
    head = {"name": "x", "shape": shape, "datatype": datatype}
    return f'{{"inputs":[{json.dumps(head)[:-1]},"data":{data}}}]}}'.encode()


def json_array_of(item: str, count: int) -> str:
    return f"[{','.join([item] * count)}]"


ROWS = 2 * MIB
TENSORS_MIB = {"numbers": 32, "numbers in lists": 32, "numbers that are longs": 32}
BODIES: dict[str, tuple[Callable[[], bytes], Code | None]] = {
    "numbers": (lambda: infer(json_array_of("0", 4 * ROWS), [ROWS, 4]), None),
    "numbers in lists": (lambda: infer(json_array_of("[0,0,0,0]", ROWS), [ROWS, 4]), None),
    "numbers that are longs": (
        lambda: infer(json_array_of("0", 2 * ROWS), [ROWS // 2, 4], "INT64"),
        Code.INVALID_ARGUMENT,
    ),
    "long numbers": (lambda: infer(json_array_of("9" * 4000, 12_000), [3000, 4]), Code.INVALID_ARGUMENT),
    "long fractions": (lambda: infer(json_array_of("0." + "9" * 4000, 12_000), [3000, 4]), None),
    "a number without end": (lambda: infer("[" + "1" * 40 * MIB + "]", [1, 4]), Code.INVALID_ARGUMENT),
    "empty lists": (lambda: infer(json_array_of("[]", 12 * MIB), [ROWS, 4]), Code.INVALID_ARGUMENT),
    "lists in lists": (lambda: infer("[" * 20 * MIB + "]" * 20 * MIB, [ROWS, 4]), Code.INVALID_ARGUMENT),
    "objects in data": (lambda: infer(json_array_of("{}", 12 * MIB), [ROWS, 4]), Code.INVALID_ARGUMENT),
    "strings": (lambda: infer(json_array_of('""', 12 * MIB), [MIB, 1], "BYTES"), Code.INVALID_ARGUMENT),
    "one string": (lambda: infer('["' + "\\\\" * 20 * MIB + '"]', [1, 1], "BYTES"), Code.TOO_LARGE),
    "inputs": (lambda: f'{{"inputs":{json_array_of("{}", 12 * MIB)}}}'.encode(), Code.TOO_LARGE),
    "inputs of a small body": (lambda: f'{{"inputs":{json_array_of("{}", 200_000)}}}'.encode(), Code.FIELD_TOO_MANY),
    "inputs with data": (
        lambda: b'{"inputs":[' + b'{"data":[]},' * 3 * MIB + b"{}]}",
        Code.FIELD_TOO_MANY,
    ),
    "keys": (
        lambda: json.dumps(dict.fromkeys(map(str, range(2 * MIB)), 0)).encode(),
        Code.FIELD_TOO_MANY,
    ),
    "parameters": (
        lambda: json.dumps({"inputs": [], "parameters": {str(n): n for n in range(5000)}}).encode(),
        Code.FIELD_TOO_MANY,
    ),
    "depth": (lambda: b'{"a":' + b"[" * 40 * MIB, Code.TOO_LARGE),
    "depth of a small body": (lambda: b'{"a":' + b"[" * 900_000, Code.FIELD_TOO_MANY),
    "a shape": (lambda: infer("[0]", [1] * 100_000), Code.FIELD_TOO_MANY),
    "spaces": (lambda: infer("[" + " " * 40 * MIB + "0]", [1, 4]), Code.INVALID_ARGUMENT),
    "quotes": (lambda: b'{"a":' + b'"' * 40 * MIB, Code.FIELD_TOO_MANY),
}


async def slowest_live(client: RestClient, over: asyncio.Event) -> float:
    """Seconds that the slowest of the answers took which a probe gets meanwhile."""
    loop = asyncio.get_running_loop()
    slowest = 0.0
    while not over.is_set():
        start = loop.time()
        assert await client.live()
        slowest = max(slowest, loop.time() - start)
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), 0.2)  # each is a handshake, which the loop pays for too
    return slowest


@pytest.mark.timeout(400)
async def test_a55_json_costs_a_front_no_more_than_its_budget(node: DataPlaneNode) -> None:
    assert node.front.pid is not None
    front = Usage(node.front.pid)
    client = node.rest_client(node.authority.issue(Role.TENANT, "acme"))
    figures: dict[str, list[float]] = {}
    for name, (make, code) in BODIES.items():
        body = make()
        over = asyncio.Event()
        probes = asyncio.create_task(slowest_live(node.rest_client(), over))
        held, before = front.reset_peak(), front.loop_s()
        response = await client.request("POST", "/v2/models/relu/infer", body, timeout=120)
        loop_s, grown = front.loop_s() - before, front.peak() - held
        over.set()
        figures[name] = [len(body) / MIB, round(loop_s, 3), round(grown / MIB, 1), round(await probes, 3)]
        print(name, figures[name], response.status, flush=True)
        assert response.headers.get("shoal-code") == code, (name, response.body[:300])
        assert len(response.body) > len(body) if code is None and "long" not in name else True
    record("A55", "P", len(figures), cases=figures)
    for name, (mib, loop_s, grown_mib, _) in figures.items():
        assert loop_s <= LOOP_S, (name, figures[name])
        most = max(mib, TENSORS_MIB.get(name, 0)) * MIB
        assert grown_mib * MIB <= MEMORY_RATIO * most + FIXED_BYTES, (name, figures[name])
