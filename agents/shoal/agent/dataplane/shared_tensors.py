"""Tensors of one request that lie in shared memory: inputs are read before the request goes on, outputs are taken out
of its answer.

What goes on, to a worker or another front, holds bytes: a retry, a session's step and a captured request know nothing
of shared memory.
"""

import asyncio
import io
from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from shoal.agent.core.shared_memory import shm_refusal
from shoal.agent.dataplane.ingress_admission import SLOT_WAIT_S
from shoal.agent.dataplane.memory import MemoryCharge, MessageMemory
from shoal.agent.dataplane.request import LIMITS, invalid, too_large
from shoal.agent.dataplane.shared_regions import OpenRegion, SharedRegions
from shoal.agent.dataplane.tensors import split_response
from shoal.agent.dataplane.transport import MAX_MESSAGE
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Refusal, ShoalError
from shoal.types.units import Seconds
from shoal.wire.field_limits import check_counts, encode_head, fields_of

PIECE: Final = 2**20
"""Bytes copied before other tasks have their turn: 0.07 ms, in and out (decision 30)."""
ROOM_WAIT_S: Final = Seconds(SLOT_WAIT_S)
"""Longest wait for memory: as long as for a message."""
_REGION: Final = "shared_memory_region"
_SIZE: Final = "shared_memory_byte_size"
_OFFSET: Final = "shared_memory_offset"
_INPUTS: Final = oip.ModelInferRequest.INPUTS_FIELD_NUMBER
_CONTENTS: Final = oip.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER
_RAW_INPUTS: Final = oip.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_RAW_OUTPUTS: Final = oip.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
Parameters = MutableMapping[str, oip.InferParameter]


@lru_cache(maxsize=1)
def _scratch() -> memoryview:
    """Through which pieces go on their way from a file, used without a pause; 1 MiB that only shared memory needs.
    Reading 4 MiB so takes 0.27 ms; in one read into memory that was zeroed for it 0.24, of which other tasks wait for
    all."""
    return memoryview(bytearray(PIECE))


class _Reference(NamedTuple):
    """Where one tensor lies."""

    region: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class _Place:
    """A reference that was checked."""

    region: OpenRegion
    # Where in the region's file it begins.
    position: int
    reference: _Reference

    def __len__(self) -> int:
        return self.reference.size

    def read(self, start: int) -> memoryview:
        """At most PIECE bytes from `start` on, valid until the next read of any. Raises ShoalError(SHM_DENIED)."""
        piece = _scratch()[: min(PIECE, self.reference.size - start)]
        self.region.read(piece, self.position + start)
        return piece


class SharedTensors:
    """What a request holds of shared memory, and of the front's memory for it, until the end of its context."""

    def __init__(self, regions: SharedRegions, memory: MessageMemory, tenant: str) -> None:
        self._regions = regions
        self._memory = memory
        self._tenant = tenant
        self._held: list[OpenRegion | MemoryCharge] = []
        self._outputs: dict[str, _Place] = {}
        """By the output's name."""

    def __enter__(self) -> "SharedTensors":
        return self

    def __exit__(self, *_: object) -> None:
        while self._held:
            self._held.pop().release()

    async def read(self, request: bytes) -> bytes:
        """The request with bytes in place of its references. They are charged to the tenant.

        Raises ShoalError(SHM_DENIED | NOT_FOUND | INVALID_ARGUMENT | TOO_LARGE), CallRefused(OVERLOADED).
        """
        message, given = _split_request(request)
        places = [self._place(tensor.parameters) for tensor in message.inputs]
        if places.count(None) != len(given):
            raise invalid(f"{len(given)} raw contents", "one for each input that is not in shared memory")
        for output in message.outputs:
            place = self._place(output.parameters)
            if place is not None:
                self._outputs[output.name] = place
        head = message.SerializeToString()
        total = len(head) + sum(map(len, given)) + sum(len(each) for each in places if each is not None)
        if total > MAX_MESSAGE:
            raise too_large(f"a request of {total} bytes with what lies in shared memory", MAX_MESSAGE)
        await self._memory.wait_for_room(self._tenant, total, ROOM_WAIT_S)
        self._held.append(self._memory.hold(self._tenant, total))
        made, pace = io.BytesIO(), _Pace()
        made.write(head)
        for each in places:
            source = given.popleft() if each is None else each
            made.write(encode_head(_RAW_INPUTS, len(source)))
            for start in range(0, len(source), PIECE):
                piece = source[start : start + PIECE] if isinstance(source, memoryview) else source.read(start)
                made.write(piece)
                await pace.on_copied(len(piece))
        return made.getvalue()

    async def write(self, answer: bytes) -> bytes:
        """The answer without the contents of the outputs that were asked for in shared memory: they are there.

        As in Triton, such an output has empty raw contents. Its parameters say where it lies, and its size.

        Raises ShoalError(SHM_DENIED).
        """
        if not self._outputs:
            return answer
        (message, raws), pace = split_response(answer), _Pace()
        for number, tensor in enumerate(message.outputs):
            place = self._outputs.get(tensor.name)
            if place is None:
                continue
            raw, reference = raws[number], place.reference
            if len(raw) > reference.size:
                found = f"{reference.size} bytes of shared memory for output {tensor.name!r:.80}"
                raise ShoalError(shm_refusal(found, f"{len(raw)} or more", f"raise {_SIZE} of the output"))
            for start in range(0, len(raw), PIECE):
                place.region.write(raw[start : start + PIECE], place.position + start)
                await pace.on_copied(min(PIECE, len(raw) - start))
            tensor.parameters[_REGION].string_param = reference.region
            tensor.parameters[_SIZE].int64_param = len(raw)
            if reference.offset:
                tensor.parameters[_OFFSET].int64_param = reference.offset
            raws[number] = memoryview(b"")
        contents = (part for raw in raws for part in (encode_head(_RAW_OUTPUTS, len(raw)), raw))
        return b"".join((message.SerializeToString(), *contents))

    def _place(self, parameters: Parameters) -> _Place | None:
        """Where the tensor of these parameters lies, which are taken from it; None if it is not in shared memory.

        Raises ShoalError(SHM_DENIED | NOT_FOUND | INVALID_ARGUMENT).
        """
        reference = _take_reference(parameters)
        if reference is None:
            return None
        region = self._regions.find(self._tenant, reference.region)
        position = region.region.locate(reference.offset, reference.size)
        if isinstance(position, Refusal):
            raise ShoalError(position)
        region.hold()
        self._held.append(region)
        return _Place(region, position, reference)


class _Pace:
    """Gives other tasks their turn."""

    def __init__(self) -> None:
        self._copied = 0

    async def on_copied(self, size: int) -> None:
        self._copied += size
        if self._copied >= PIECE:
            self._copied = 0
            await asyncio.sleep(0)


def _split_request(request: bytes) -> tuple[oip.ModelInferRequest, deque[memoryview]]:
    """(the request without raw contents, these contents without a copy). Raises ShoalError(INVALID_ARGUMENT)."""
    view = memoryview(request)
    head: list[memoryview] = []
    raws: deque[memoryview] = deque()
    if check_counts(oip.ModelInferRequest.DESCRIPTOR, request, LIMITS) is not None:
        raise invalid("bytes that are no ModelInferRequest", "a request of the Open Inference Protocol")
    for number, start, content, end in fields_of(view, 0, len(view)):
        if number == _RAW_INPUTS:
            raws.append(view[content:end])
            continue
        if number == _INPUTS and any(field == _CONTENTS for field, *_ in fields_of(view, content, end)):
            raise invalid("typed contents beside shared memory", "raw contents, or shared memory, for every input")
        head.append(view[start:end])
    return oip.ModelInferRequest.FromString(b"".join(head)), raws


def _take_reference(parameters: Parameters) -> _Reference | None:
    """The reference that these parameters are, which are removed; None without one. Raises
    ShoalError(INVALID_ARGUMENT)."""
    names = [name for name in parameters if name.startswith("shared_memory")]
    if not names:
        return None
    if not {_REGION, _SIZE} <= set(names) <= {_REGION, _SIZE, _OFFSET}:
        raise invalid(
            f"parameters {', '.join(sorted(names))!s:.200}", f"{_REGION}, {_SIZE}, and {_OFFSET} where it is not 0"
        )
    region = parameters[_REGION]
    if region.WhichOneof("parameter_choice") != "string_param":
        raise invalid(f"{_REGION} that is no string", "the name of a region")
    offset = _whole_number(parameters[_OFFSET], _OFFSET) if _OFFSET in names else 0
    found = _Reference(region.string_param, offset, _whole_number(parameters[_SIZE], _SIZE))
    for name in names:
        del parameters[name]
    return found


def _whole_number(parameter: oip.InferParameter, name: str) -> int:
    """Raises ShoalError(INVALID_ARGUMENT)."""
    which = parameter.WhichOneof("parameter_choice")
    if which not in ("int64_param", "uint64_param"):
        raise invalid(f"{name} that is no whole number", "bytes")
    return int(getattr(parameter, which))
