"""A57: what messages hold of a front. Those of REST are charged as what they become, and an answer while it waits to
become JSON."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Final, TypeVar

import pytest

from harness.fakes.inference import EchoingService
from harness.wait import until
from shoal.agent.dataplane.conversion import Conversions
from shoal.agent.dataplane.ingress_admission import IngressAdmission
from shoal.agent.dataplane.memory import COPIES, MessageMemory
from shoal.agent.dataplane.rest import ClientIdentity, RestMethods, RestResponse, make_request
from shoal.agent.dataplane.tensors import Steps
from shoal.agent.dataplane.transport import InboundCall
from shoal.inference import open_inference_pb2 as oip

ANSWER_BYTES: Final = 2**20
INFER: Final = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1.0]}]}'
GENERATE: Final = b'{"x": [1.0, 2.0], "s": "a"}'
_T = TypeVar("_T")


def _answer(size: int) -> bytes:
    made = oip.ModelInferResponse(model_name="m", raw_output_contents=[struct.pack("<f", 0.1234567) * (size // 4)])
    made.outputs.add(name="y", datatype="FP32", shape=[size // 4])
    return made.SerializeToString()


class Model(EchoingService):
    """Answers with ANSWER_BYTES, once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()
        self.asked: list[int] = []

    async def infer(self, call: InboundCall, request: bytes) -> bytes:
        self.asked.append(len(request))
        await self.may_answer.wait()
        return _answer(ANSWER_BYTES)


class Body:
    """Carries a body that is here."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def memo(self, call: InboundCall) -> dict[str, object]:
        return {}

    def whole_body(self) -> bytearray | None:
        return bytearray(self._body)

    async def body(self) -> AsyncIterator[bytes]:
        yield self._body

    def on_admitted(self) -> None:
        pass


class Front:
    """The REST methods of a front, whose large answers wait until they may be converted."""

    def __init__(self, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory = MessageMemory(budget=budget)
        self.model = Model()
        self.may_convert = asyncio.Event()
        self.refused = 0
        self.waiting = 0
        run = Conversions.run

        async def run_once_allowed(conversions: Conversions, caller: str, size: int, steps: Steps[_T]) -> _T:
            if size >= ANSWER_BYTES:
                self.waiting += 1
                await self.may_convert.wait()
                self.waiting -= 1
            return await run(conversions, caller, size, steps)

        monkeypatch.setattr(Conversions, "run", run_once_allowed)
        self.admission = IngressAdmission(self.memory)
        self._methods = RestMethods(self.model, self.admission)

    async def ask(self, path: str, body: bytes, token: str = "t") -> RestResponse:
        fields = [("authorization", f"Bearer {token}")]
        with ExitStack() as held:
            request = make_request("POST", f"/v2/models/m/{path}", fields, ClientIdentity(), Body(body))
            response = await self._methods.answer(request, held)
            is_refused = response.status == 503
            if response.events is not None:
                is_refused = any([b"OVERLOADED" in event async for event in response.events])
            self.refused += is_refused
            return response

    def close(self) -> None:
        self._methods.close()


@pytest.mark.parametrize(("path", "body"), [("infer", INFER), ("generate", GENERATE), ("generate_stream", GENERATE)])
async def test_answers_that_wait_for_their_conversion_are_charged(
    path: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = Front(8 * COPIES * ANSWER_BYTES, monkeypatch)
    front.model.may_answer.set()
    asking = [asyncio.create_task(front.ask(path, body)) for _ in range(10)]
    try:
        await until(lambda: front.waiting + front.refused == len(asking), 10.0, "all to be answered or refused")
        assert front.waiting == 3, "the tenant's share is half of eight; an answer has a few bytes beside its tensor"
        assert front.memory.held_bytes >= front.waiting * COPIES * ANSWER_BYTES
    finally:
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        front.close()
    assert front.memory.held_bytes == 0


@pytest.mark.parametrize(("path", "body"), [("infer", INFER), ("generate", GENERATE)])
async def test_an_answer_that_fits_alone_is_sent(path: str, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes and its JSON, which has three times as many, do not fit together."""
    front = Front(8 * ANSWER_BYTES, monkeypatch)
    front.model.may_answer.set()
    front.may_convert.set()
    response = await front.ask(path, body)
    assert response.status == 200
    assert len(response.body) > front.memory.payer_share // COPIES
    assert front.memory.held_bytes == 0
    front.close()


@pytest.mark.parametrize(("path", "body"), [("infer", INFER), ("generate", GENERATE)])
async def test_a_tenants_credentials_share_its_calls(path: str, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front(8 * 2**20, monkeypatch)
    front.admission.places.most_per_payer = 3
    asking = [asyncio.create_task(front.ask(path, body, f"t{number}")) for number in range(4)]
    await until(lambda: len(front.model.asked) == 3 and front.refused == 1, 10.0, "three to run, and one to be refused")
    for each in asking:
        each.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    front.close()


@pytest.mark.parametrize("path", ["infer", "generate"])
async def test_a_request_is_charged_as_what_it_becomes(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 1000
    numbers = [1] * count
    document: dict[str, object] = {"x": numbers, "s": "a"}
    if path == "infer":
        document = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [count], "data": numbers}]}
    body = json.dumps(document, separators=(",", ":")).encode()
    front = Front(8 * 2**20, monkeypatch)
    asking = asyncio.create_task(front.ask(path, body))
    await until(lambda: bool(front.model.asked), 10.0, "the model to be asked")
    assert front.model.asked[0] > len(body)
    assert front.memory.held_bytes == COPIES * front.model.asked[0]
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert front.memory.held_bytes == 0
    front.close()
