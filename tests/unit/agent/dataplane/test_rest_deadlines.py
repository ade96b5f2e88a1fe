"""The deadline of a REST request counts from its head on, through everything that comes before its model runs."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any, Final

import pytest

from harness.fakes.inference import EchoingService
from harness.wait import until
from shoal.agent.dataplane.ingress_admission import IngressAdmission
from shoal.agent.dataplane.rest import ClientIdentity, RestMethods, make_request
from shoal.agent.dataplane.transport import InboundCall
from shoal.inference import open_inference_pb2 as oip

BODY_S: Final = 0.05
"""How long a body takes at least."""
INFER: Final = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
GENERATE: Final = {"x": [1.0, 2.0], "s": "a"}


class TimedService(EchoingService):
    """Notes what each call that it gets has left."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[tuple[str, float | None]] = []

    def prepare_direct(
        self, call: InboundCall, remaining_s: float | None, memo: dict[str, object], request: bytes
    ) -> None:
        self.left.append(("prepare_direct", remaining_s))

    async def infer(self, call: InboundCall, request: bytes) -> bytes:
        self.left.append(("infer", call.remaining_s))
        return await super().infer(call, request)

    async def model_metadata(self, call: InboundCall, name: str, version: str) -> oip.ModelMetadataResponse:
        self.left.append(("model_metadata", call.remaining_s))
        return await super().model_metadata(call, name, version)


class SlowBody:
    """Carries a body that takes BODY_S."""

    def __init__(self, document: Any) -> None:
        self._body = json.dumps(document).encode()
        self.memo_calls: list[InboundCall] = []

    def memo(self, call: InboundCall) -> dict[str, object]:
        self.memo_calls.append(call)
        return {}

    def whole_body(self) -> None:
        return None

    async def body(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await until(lambda: loop.time() - began >= BODY_S, 10.0, "the time to pass")
        yield self._body

    def on_admitted(self) -> None:
        pass


@pytest.mark.parametrize(
    ("method", "document", "looks"),
    [
        ("infer", INFER, ["prepare_direct", "infer"]),
        ("generate", GENERATE, ["model_metadata", "infer"]),
        ("generate_stream", GENERATE, ["model_metadata", "infer"]),
    ],
)
@pytest.mark.parametrize("deadline_ms", [None, 1, 600_000])
async def test_the_time_that_a_body_takes_is_taken_off(
    method: str, document: Any, looks: list[str], deadline_ms: int | None
) -> None:
    service, carrier = TimedService(), SlowBody(document)
    methods = RestMethods(service, IngressAdmission())
    said = [] if deadline_ms is None else [("shoal-deadline-ms", str(deadline_ms))]
    request = make_request("POST", f"/v2/models/m/{method}", said, ClientIdentity(), carrier)
    with ExitStack() as held:
        response = await methods.answer(request, held)
        assert response.status == 200, response.body
        if response.events is not None:
            assert [each async for each in response.events]
    assert [name for name, _ in service.left] == looks
    for _, left in service.left:
        match deadline_ms:
            case None:
                assert left is None
            case 1:
                assert left == 0.0, "so that the service refuses it"
            case _:
                assert left is not None
                assert 0.0 < left <= 600.0 - BODY_S
    assert carrier.memo_calls == [request.call] * (method == "infer"), "the same for each request with these headers"
    methods.close()
